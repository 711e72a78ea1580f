"""A profile sampled: some rollouts of some prompts, scored, before anything is trained or paid for.

The folder has `rollouts.jsonl` in the schema of `rollalloc train --log-rollouts`, a group a prompt; `prompts.jsonl` and
`features.safetensors`, the rows and the features of the prompts under the keys that the log has; and `profile.json`, what it
was made with. Every draw is a function of (seed, prompt, rollout), and rollouts are made in waves that begin at the same
prompts each time: a profile that was killed and went on is the profile that was not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rollalloc.core.errors import NoScores
from rollalloc.core.events import Order
from rollalloc.core.recipe import at_least
from rollalloc.core.seeds import rng
from rollalloc.data.feature_file import save_features
from rollalloc.data.prompts import EncodedPrompts, load_prompts
from rollalloc.files.atomic import write_text
from rollalloc.files.names import FEATURES, PROMPTS, REWARDS, ROLLOUTS
from rollalloc.generate.engine import Scoring
from rollalloc.generate.sampler import Generation
from rollalloc.generate.sync_engine import SyncEngine, in_order
from rollalloc.lab.advise.profile_folder import ProfileFolder
from rollalloc.lab.bench.tasks.files import Shown, unseen
from rollalloc.models.behaviour import Behaviour
from rollalloc.models.features import features_of
from rollalloc.models.policy import Policy, usable_device
from rollalloc.rewards.function import Outcome, Scored
from rollalloc.train.description import Run, digests_of
from rollalloc.train.execution import encoded, scorer_of, try_reward

PROMPTS_DRAWN, ROLLOUTS_EACH = 256, 4
_WAVE = 32  # prompts that are rolled out together; fewer at first, so that it is soon known how long all will take
_PATIENCE = 64  # rollouts without a single score before the reward is given up
_HOW_FAST = ("max_rows", "kv_tokens")  # of the sampling: they decide how many rollouts run together, and no draw


def sample_profile(
    run: Run,
    folder: Path,
    *,
    prompts: int = PROMPTS_DRAWN,
    n: int = ROLLOUTS_EACH,
    seed: int = 0,
    overwrite: bool = False,
    progress: Shown = unseen,
) -> Path:
    """Roll out some prompts of a run's training set under its model as it is, and score what comes.

    Prompts are drawn without replacement, each with the same probability; all of them where there are no more. What is in
    the folder already is kept: the same call goes on after a kill at any moment, and one with more prompts adds to it.

    Args:
        run: a run; its source and its sampling count, its recipe and its training do not.
        folder: of the profile; made new, gone on with, or refused.
        prompts: to draw, at least 1.
        n: rollouts of each, at least 1.
        seed: of the draw and of sampling, at least 0.
        overwrite: remove what another profile wrote there, and nothing else.
        progress: called with what is being made ("features", "rollouts"), how much of it is done, and of how much.

    Returns:
        The log, `folder/rollouts.jsonl`.

    Raises:
        InUse, FileExistsError: as `ProfileFolder.check`.
        ValueError: a number out of its range; the folder holds a profile made under other settings, which are named; a
            model, prompts, or a reward that cannot be used.
        NoScores: no rollout has a score.
        OSError, ImportError: what is needed is not there.
    """
    for name, number, least in (("prompts", prompts, 1), ("n", n, 1), ("seed", seed, 0)):
        at_least(name, number, least)
    source, sampling = run.source, run.settings.sampling
    described = _described(run, prompts, n, seed)
    with ProfileFolder(folder) as place:
        place.check(described, overwrite=overwrite)
        if not overwrite and place.is_whole(prompts, n):
            return folder / ROLLOUTS
        usable_device(source.device)
        try_reward(source, sampling)
        given = load_prompts(*source.prompts)
        with scorer_of(run) as scorer:
            policy = Policy.load(source.model, device=source.device)
            train = encoded(source, policy, sampling, given)
            drawn = rng(seed, "profile").permutation(len(train.tokens))[:prompts].tolist()
            before = place.begin(overwrite=overwrite)
            if before < len(drawn):
                _write_prompts(folder, policy, train, drawn, progress)
                place.describe(described | {"prompts": len(drawn), "of": len(train.tokens)})
            sampler = _Sampler(Behaviour(policy, "float32"), train, scorer, sampling, seed, folder / ROLLOUTS)
            orders = [Order(group, prompt, 0, _ids(group, n)) for group, prompt in enumerate(drawn)]
            sampler.roll_out(orders, _kept(place, before, n), place, progress)
    return folder / ROLLOUTS


class _Sampler(SyncEngine):
    """Carries out orders that no allocator gave, and records the rollouts."""

    def roll_out(self, orders: Sequence[Order], begun: int, place: ProfileFolder, progress: Shown) -> None:
        """Roll out all but the first `begun` of the orders, wave by wave; what a wave came to is written at its end.

        Raises:
            NoScores: none of what was rolled out here has a score, and that is much, or all that there is.
        """
        each = len(orders[0].rollouts)
        progress("rollouts", begun * each, len(orders) * each)
        scored = False
        for begin, end in _waves(begun, len(orders)):
            outcomes = self._wave(orders[begin:end], lambda done: progress("rollouts", done, len(orders) * each))
            place.stamp()
            write_text(place.path / REWARDS, json.dumps(self.scorer.report(), indent=1))
            scored |= any(isinstance(outcome, Scored) for outcome in outcomes)
            if not scored and ((end - begun) * each >= _PATIENCE or (begun, end) == (0, len(orders))):
                raise NoScores(
                    f"none of {(end - begun) * each} rollouts has a score, mostly because: "
                    f"{self.outcomes.commonest_failure()}. Repair the reward, then sample again over what is in "
                    f"{place.path} (--overwrite)"
                )

    def _wave(self, orders: Sequence[Order], done: Callable[[int], None]) -> list[Outcome]:
        """Generate, score and write these; `done` hears how many rollouts of the profile there are by then."""
        order_of = {rollout: order for order in orders for rollout in order.rollouts}
        scoring: list[Scoring] = []
        count = min(order_of)

        def on_finished(ended: list[Generation]) -> tuple[int, ...]:
            nonlocal count
            scoring.append((ended, self.score(ended, order_of)))
            count += len(ended)
            done(count)
            return ()

        self.sample(orders, on_finished)
        made, outcomes = zip(*in_order(scoring, order_of), strict=True)
        for generation, outcome in zip(made, outcomes, strict=True):
            self.outcomes.add(outcome, truncated=generation.truncated, tokens=len(generation.tokens))
        self.write(made, outcomes, order_of, now=((0, 0),))
        return list(outcomes)


def _described(run: Run, prompts: int, n: int, seed: int) -> dict[str, Any]:
    """What a profile was made with; where these are equal, its rollouts are."""
    source = replace(run.source, heldout=None)
    named = ("model", "prompts", "reward", "drop_overlong", "overlong_buffer")
    newer = {} if source.chat_template_args is None else {"chat_template_args": source.chat_template_args}
    sampling = {name: value for name, value in asdict(run.settings.sampling).items() if name not in _HOW_FAST}
    return json.loads(
        json.dumps(
            {
                "task": run.task,
                "source": {name: getattr(source, name) for name in named} | newer,
                "sampling": sampling,
                "prompts": prompts,
                "n": n,
                "seed": seed,
                "digests": digests_of(source),
            }
        )
    )


def _write_prompts(folder: Path, policy: Policy, train: EncodedPrompts, drawn: Sequence[int], progress: Shown) -> None:
    """Each drawn prompt as a row in verl's schema, and what the model makes of it, both under its key."""
    given = train.prompt_set
    rows = [
        {
            "key": given.keys[prompt],
            "data_source": given.sources[prompt],
            "prompt": given.prompts[prompt],
            "reward_model": {"ground_truth": given.ground_truths[prompt]},
            "extra_info": given.extra_infos[prompt],
        }
        for prompt in drawn
    ]
    write_text(folder / PROMPTS, "".join(json.dumps(row) + "\n" for row in rows))
    features = features_of(
        policy.model,
        [train.tokens[prompt] for prompt in drawn],
        pad_id=policy.pad_id,
        progress=lambda done, of: progress("features", done, of),
    )
    save_features(folder / FEATURES, [given.keys[prompt] for prompt in drawn], features)


def _ids(group: int, n: int) -> tuple[int, ...]:
    return tuple(range(group * n, (group + 1) * n))


def _kept(place: ProfileFolder, before: int, n: int) -> int:
    """Prompts whose rollouts need not be made again: all of a profile that was whole, else those of whole waves."""
    groups = place.rollouts() // n
    kept = groups if groups == before else _boundary(groups)
    place.cut(kept * n)
    return kept


def _boundary(prompts: int) -> int:
    """The last of so many prompts at which a wave begins: 0, 1, 2, 4, 8, 16, 32, 64, 96, ..."""
    return prompts // _WAVE * _WAVE or (1 << prompts.bit_length()) // 2


def _waves(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Waves of prompts, as the first and beyond the last; from within one on, the rest of it comes first."""
    while begin < end:
        after = (begin // _WAVE + 1) * _WAVE if begin >= _WAVE else 1 << begin.bit_length()
        yield begin, min(after, end)
        begin = after
