"""Sample a profile: score a few rollouts of some prompts before any training.

The folder has four files. `rollouts.jsonl` has the rollouts, in the schema of `rollalloc train --log-rollouts`, with one
group per prompt. `prompts.jsonl` and `features.safetensors` have the prompts' rows and features, with the log's keys.
`profile.json` has the settings. Every draw is a function of (seed, prompt, rollout), and every run has the same waves of
rollouts. So a profile that was interrupted and continued equals an uninterrupted profile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from rollalloc.advise.profile_folder import PROMPTS_DRAWN, ROLLOUTS_EACH, ProfileFolder
from rollalloc.core.events import NoScores, Order
from rollalloc.core.recipe import at_least
from rollalloc.core.seeds import rng
from rollalloc.data.feature_file import save_features
from rollalloc.data.prompts import EncodedPrompts, PromptSet, load_unless_loaded
from rollalloc.files.names import FEATURES, PROMPTS, REWARDS, ROLLOUTS
from rollalloc.files.regular import write_text
from rollalloc.generate.engine import SyncEngine
from rollalloc.generate.outcomes import Outcomes
from rollalloc.models.featurizer import features_of
from rollalloc.models.policy import Behaviour, Policy, usable_device
from rollalloc.rewards.function import Outcome, Scored
from rollalloc.rewards.scorers import Scorer
from rollalloc.tasks.files import Shown, unseen
from rollalloc.train.config import Config, digests_of
from rollalloc.train.loading import encoded, scorer_of, try_reward

_WAVE = 32  # number of prompts per wave; the first waves are smaller, so that the time left can be estimated early
_PATIENCE = 64  # if none of this many rollouts has a score, stop
_HOW_FAST = ("max_rows", "kv_tokens")  # sampling settings that change only the speed


def sample_profile(
    run: Config,
    folder: Path,
    *,
    prompts: int = PROMPTS_DRAWN,
    n: int = ROLLOUTS_EACH,
    seed: int = 0,
    overwrite: bool = False,
    progress: Shown = unseen,
) -> Path:
    """Roll out some prompts of a run's training set with its initial model, and score the rollouts.

    Prompts are drawn uniformly without replacement, or all are taken if there are at most `prompts`. Rollouts that are
    already in the folder are kept. So the same call continues after an interruption, and a call with more prompts extends
    the profile.

    Args:
        run: the configuration. Only its data, reward and sampling settings are used.
        folder: folder of the profile; created, continued or refused.
        prompts: number of prompts to draw, at least 1.
        n: rollouts per prompt, at least 1.
        seed: seed of the draw and of sampling, at least 0.
        overwrite: True: first remove the files of another profile in the folder.
        progress: called with the stage ("features" or "rollouts"), the number done, and the total number.

    Returns:
        The log, `folder/rollouts.jsonl`.

    Raises:
        InUse, FileExistsError: the folder cannot be used, see `ProfileFolder.check`.
        ValueError: a number is out of its range; the folder has a profile with other settings (the message names them); or
            the model, the prompts or the reward cannot be used.
        NoScores: no rollout has a score.
        OSError, ImportError: a file or a package is missing.
    """
    described = described_profile(run, prompts, n, seed)
    with ProfileFolder(folder) as place:
        place.check(described, overwrite=overwrite)
        if not overwrite and place.is_whole(prompts, n):
            return folder / ROLLOUTS
        usable_device(run.device)
        try_reward(run)
        prompt_set = load_unless_loaded(*run.prompts)
        with scorer_of(run) as scorer:
            policy = Policy.load(run.model, device=run.device)
            train = encoded(run, policy, prompt_set)
            drawn = drawn_of(seed, prompts, len(train.tokens))
            before = place.begin(overwrite=overwrite)
            if before < len(drawn):
                _write_prompts(folder, policy, train, drawn, progress)
                place.describe(described | {"prompts": len(drawn), "of": len(train.tokens)})
            sampler = _Sampler(Behaviour(policy, "float32"), train, scorer, run.sampling, seed, folder / ROLLOUTS)
            roll_out(sampler, orders_of(drawn, n), kept(place, before, n), place, progress)
    return folder / ROLLOUTS


class Waves(Protocol):
    """Generates, scores and logs rollouts wave by wave, in this process or at a server.

    Attributes:
        scorer: scorer of the rollouts.
        outcomes: outcomes of the rollouts so far.
    """

    scorer: Scorer
    outcomes: Outcomes

    def wave(self, orders: Sequence[Order], done: Callable[[int], None]) -> list[Outcome]:
        """Generate, score and log one wave. `done` is called with the number of rollouts of the profile so far."""
        ...


def roll_out(waves: Waves, orders: Sequence[Order], begun: int, place: ProfileFolder, progress: Shown) -> None:
    """Generate and score all orders after the first `begun`, wave by wave. Each wave is logged when it is complete.

    Raises:
        NoScores: no rollout of this call has a score. This is checked from 64 rollouts on, and at the end of a new
            profile.
    """
    n = len(orders[0].rollouts)
    progress("rollouts", begun * n, len(orders) * n)
    scored = False
    for begin, end in _waves(begun, len(orders)):
        outcomes = waves.wave(orders[begin:end], lambda done: progress("rollouts", done, len(orders) * n))
        place.stamp()
        write_text(place.path / REWARDS, json.dumps(waves.scorer.report(), indent=1))
        scored |= any(isinstance(outcome, Scored) for outcome in outcomes)
        if not scored and ((end - begun) * n >= _PATIENCE or (begun, end) == (0, len(orders))):
            raise NoScores(
                f"none of {(end - begun) * n} rollouts has a score, mostly because: "
                f"{waves.outcomes.commonest_failure()}. Repair the reward or the server, then sample the profile in "
                f"{place.path} again (--overwrite)"
            )


class _Sampler(SyncEngine):
    """Generates, scores and logs rollouts. The orders do not come from an allocator."""

    def wave(self, orders: Sequence[Order], done: Callable[[int], None]) -> list[Outcome]:
        """See `Waves.wave`."""
        count = min(rollout for order in orders for rollout in order.rollouts)

        def on_ended(rollouts: int) -> None:
            nonlocal count
            count += rollouts
            done(count)

        self.on_ended = on_ended
        self.submit(orders)
        results = self.poll()
        for result in results:
            self.outcomes.add(result.outcome, truncated=result.truncated, tokens=result.tokens)
        self.release([result.rollout for result in results])
        return [result.outcome for result in results]


def described_profile(run: Config, prompts: int, n: int, seed: int) -> dict[str, Any]:
    """The settings that determine a profile's rollouts. Equal settings give equal rollouts.

    Raises:
        ValueError: a number is out of its range.
    """
    for name, number, least in (("prompts", prompts, 1), ("n", n, 1), ("seed", seed, 0)):
        at_least(name, number, least)
    named = ("model", "prompts", "reward", "drop_overlong", "overlong_buffer")
    newer = {} if run.chat_template_args is None else {"chat_template_args": run.chat_template_args}
    sampling = {name: value for name, value in asdict(run.sampling).items() if name not in _HOW_FAST}
    return json.loads(
        json.dumps(
            {
                "task": run.task,
                "source": {name: getattr(run, name) for name in named} | newer,
                "sampling": sampling,
                "prompts": prompts,
                "n": n,
                "seed": seed,
                "digests": digests_of(replace(run, heldout=None)),
            }
        )
    )


def _write_prompts(folder: Path, policy: Policy, train: EncodedPrompts, drawn: Sequence[int], progress: Shown) -> None:
    """Write each drawn prompt's row (in verl's schema) and its features (under the initial model), both with its key."""
    prompt_set = train.prompt_set
    write_rows(folder, prompt_set, drawn)
    features = features_of(
        policy.model,
        [train.tokens[prompt] for prompt in drawn],
        pad_id=policy.pad_id,
        progress=lambda done, of: progress("features", done, of),
    )
    save_features(folder / FEATURES, [prompt_set.keys[prompt] for prompt in drawn], features)


def write_rows(folder: Path, prompt_set: PromptSet, drawn: Sequence[int]) -> None:
    """Write the row of each drawn prompt in verl's schema, with the prompt's key."""
    rows = [
        {
            "key": prompt_set.keys[prompt],
            "data_source": prompt_set.sources[prompt],
            "prompt": prompt_set.prompts[prompt],
            "reward_model": {"ground_truth": prompt_set.ground_truths[prompt]},
            "extra_info": prompt_set.extra_infos[prompt],
        }
        for prompt in drawn
    ]
    write_text(folder / PROMPTS, "".join(json.dumps(row) + "\n" for row in rows))


def drawn_of(seed: int, prompts: int, of: int) -> list[int]:
    """Draw the indices of a profile's prompts from [0, of), uniformly without replacement: at most `prompts` indices."""
    return rng(seed, "profile").permutation(of)[:prompts].tolist()


def orders_of(drawn: Sequence[int], n: int) -> list[Order]:
    """One group of n rollouts for each drawn prompt. Rollout r belongs to group r // n."""
    return [Order(group, prompt, 0, tuple(range(group * n, (group + 1) * n))) for group, prompt in enumerate(drawn)]


def kept(place: ProfileFolder, before: int, n: int) -> int:
    """Keep only complete waves of the log. Return their number of prompts; see `whole_waves`."""
    complete = whole_waves(place, before, n)
    place.cut(complete * n)
    return complete


def whole_waves(place: ProfileFolder, before: int, n: int) -> int:
    """Number of prompts in the log: all of the `before` if the profile was complete, otherwise those in complete waves."""
    groups = place.rollouts() // n
    return groups if groups == before else _boundary(groups)


def _boundary(prompts: int) -> int:
    """Round a number of prompts down to the start of a wave. Waves start at 0, 1, 2, 4, 8, 16, 32, 64, 96, ..."""
    return prompts // _WAVE * _WAVE or (1 << prompts.bit_length()) // 2


def _waves(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of prompts, one per wave. If `begin` is within a wave, the first range is the rest of this wave."""
    while begin < end:
        after = (begin // _WAVE + 1) * _WAVE if begin >= _WAVE else 1 << begin.bit_length()
        yield begin, min(after, end)
        begin = after
