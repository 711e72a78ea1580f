"""Sample a profile from a served model: the folder of `sampling.sample_profile`, with rollouts that a server generated.

Each answer is written to `answers.jsonl` when it arrives, under a digest of its request. The same call reads these answers
and requests only the others: after a kill, with another reward (`overwrite`), and with more prompts or rollouts.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from rollalloc.core.events import Order
from rollalloc.core.recipe import at_least
from rollalloc.data.encoding import template_arguments
from rollalloc.data.prompts import PromptSet, load_prompts
from rollalloc.files.atomic import append_text
from rollalloc.files.names import ANSWERS, ROLLOUTS
from rollalloc.generate.outcomes import Outcomes, RolloutLog
from rollalloc.generate.sampling import Sampling
from rollalloc.generate.served import Answer, Answers, Ask, Endpoint, ServerFailed, check_server, openai_module
from rollalloc.lab.advise.profile_folder import ProfileFolder
from rollalloc.lab.advise.sampling import (
    PROMPTS_DRAWN,
    ROLLOUTS_EACH,
    described_profile,
    drawn_of,
    kept,
    orders_of,
    roll_out,
    write_rows,
)
from rollalloc.lab.bench.tasks.files import Shown, unseen
from rollalloc.rewards.function import Outcome, Sample, Unscored
from rollalloc.rewards.scorers import Scorer
from rollalloc.train.config import Config
from rollalloc.train.loading import loaded_reward, scorer_of

log = logging.getLogger(__name__)

_FEW = 16  # answers after which the cost of all is estimated
_SHORT = 4  # tokens: shorter answers may well be equal
_MOST_PROMPTS = 8  # at least so many groups of equal answers are no chance


def sample_served(
    run: Config,
    endpoint: Endpoint,
    folder: Path,
    *,
    prompts: int = PROMPTS_DRAWN,
    n: int = ROLLOUTS_EACH,
    seed: int = 0,
    prices: tuple[float, float] | None = None,
    overwrite: bool = False,
    progress: Shown = unseen,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Roll out some prompts of a run's training set at a server, and score the rollouts here.

    Arguments and errors are those of `sample_profile`, and:

    Args:
        run: its model is the name under which the server serves it.
        endpoint: the server.
        seed: seed of the draw of prompts; the server samples with randomness of its own.
        prices: prices of a million tokens of prompts and of answers; None: tokens are shown without their cost.
        overwrite: remove another profile's files first, except answers.
        say: called with sentences on tokens, time and cost.

    Raises:
        ServerFailed: the server cannot be used; the answers so far are kept.
        ImportError: the `openai` package is not installed.
    """
    for name, number, least in (("prompts", prompts, 1), ("n", n, 1), ("seed", seed, 0)):
        at_least(name, number, least)
    described = described_profile(run, prompts, n, seed) | {"served": True}
    with ProfileFolder(folder) as place:
        place.check(described, overwrite=overwrite)
        if not overwrite and place.is_whole(prompts, n):
            return folder / ROLLOUTS
        openai_module()
        loaded_reward(run.reward)
        given = load_prompts(*run.prompts)
        drawn = drawn_of(seed, prompts, len(given))
        template = template_arguments(run.chat_template_args)
        ask = Ask(run.model, run.sampling, template, skip_refused=run.drop_overlong)
        orders = orders_of(drawn, n)
        kept_answers = _Kept(folder / ANSWERS, ask, given, orders)
        asked = kept_answers.missing()
        answers = Answers(
            endpoint, ask, [given.prompts[orders[r // n].prompt] for r in asked], kept_answers.keeper(asked)
        )
        if asked:
            check_server(endpoint, ask)
        before = place.begin(overwrite=overwrite)
        kept_answers.repair()
        if before < len(drawn):
            write_rows(folder, given, drawn)
            place.describe(described | {"prompts": len(drawn), "of": len(given)})
        cost = _Cost(kept_answers, len(orders) * n, endpoint, run.sampling, prices, say)
        cost.before(len(asked))
        number_of = {rollout: number for number, rollout in enumerate(asked)}

        def answer(rollout: int) -> Answer:
            number = number_of.get(rollout)
            return kept_answers.of[rollout] if number is None else answers[number]

        try:
            with scorer_of(run) as scorer, answers:
                waves = _Waves(given, scorer, answer, folder / ROLLOUTS, cost)
                roll_out(waves, orders, kept(place, before, n), place, progress)
        except (ServerFailed, OSError) as error:  # a full disk, too
            count = kept_answers.figures()[0]
            raise (ServerFailed if isinstance(error, ServerFailed) else OSError)(
                f"{error}. {count:,} answers are kept in {folder}: the same command goes on with them"
            ) from None
        cost.after(answers.refused)
        _doubt(kept_answers, orders, run.sampling.max_new_tokens)
    return folder / ROLLOUTS


class _Waves:
    """Scores and logs the answers of orders, as `sampling.Waves`."""

    def __init__(
        self, given: PromptSet, scorer: Scorer, answer: Callable[[int], Answer], path: Path, cost: _Cost
    ) -> None:
        self.scorer, self.outcomes = scorer, Outcomes()
        self._given, self._answer, self._cost = given, answer, cost
        self._log = RolloutLog(path)

    def wave(self, orders: Sequence[Order], done: Callable[[int], None]) -> list[Outcome]:
        order_of = {rollout: order for order in orders for rollout in order.rollouts}
        answer_of: dict[int, Answer] = {}
        for rollout in order_of:
            answer_of[rollout] = self._answer(rollout)
            self._cost.during()
            done(rollout + 1)
        whole = [rollout for rollout, answer in answer_of.items() if not answer.failure]
        samples = [self._sample(rollout, order_of[rollout].prompt, answer_of[rollout]) for rollout in whole]
        scored = dict(zip(whole, self.scorer.submit(samples).result(), strict=True))
        outcomes = [scored.get(rollout) or Unscored(answer.failure) for rollout, answer in answer_of.items()]
        for (rollout, answer), outcome in zip(answer_of.items(), outcomes, strict=True):
            order = order_of[rollout]
            self.outcomes.add(outcome, truncated=answer.truncated, tokens=answer.tokens or 0)
            figures: dict[str, Any] = {"tokens": answer.tokens, "truncated": answer.truncated, "text": answer.text}
            self._log.add(rollout, order, self._given.keys[order.prompt], 0, outcome, **figures)
        self._log.flush()
        return outcomes

    def _sample(self, rollout: int, prompt: int, answer: Answer) -> Sample:
        given = self._given
        return Sample(
            data_source=given.sources[prompt],
            completion=answer.text,
            ground_truth=given.ground_truths[prompt],
            extra_info=given.extra_infos[prompt],
            tokens=answer.tokens,
            name=f"{given.keys[prompt]}#{rollout}",
        )


class _Kept:
    """The answers in a profile's folder, by rollout.

    Attributes:
        of: answers of the rollouts that were ordered.
        seconds: seconds of each answer's arrival, in this process.
    """

    def __init__(self, path: Path, ask: Ask, given: PromptSet, orders: Sequence[Order]) -> None:
        self._path, self._lock = path, Lock()
        self.seconds: list[float] = []
        self._asked: dict[int, tuple[str, int]] = {}
        times: Counter[str] = Counter()  # two data sources may have the same prompt
        for order in orders:
            digest = ask.digest(given.prompts[order.prompt])
            for rollout in order.rollouts:
                self._asked[rollout] = digest, times[digest]
                times[digest] += 1
        rollout_of = {asked: rollout for rollout, asked in self._asked.items()}
        self.of = {rollout_of[asked]: answer for asked, answer in _saved(path) if asked in rollout_of}

    def missing(self) -> list[int]:
        """Rollouts without an answer, in their order."""
        return [rollout for rollout in self._asked if rollout not in self.of]

    def repair(self) -> None:
        """Remove what a kill left of a line, so that the next one begins on its own."""
        if self._path.exists():
            text = self._path.read_bytes()
            os.truncate(self._path, text.rfind(b"\n") + 1)

    def keeper(self, asked: Sequence[int]) -> Callable[[int, Answer], None]:
        """What keeps the answer to request number i, which is of rollout `asked[i]`."""

        def keep(number: int, answer: Answer) -> None:
            digest, place = self._asked[asked[number]]
            if answer.tokens != 0 or not answer.failure:  # else it cost nothing, and may be asked for again
                append_text(self._path, json.dumps({"asked": digest, "rollout": place, **asdict(answer)}) + "\n")
            with self._lock:
                self.of[asked[number]] = answer
                self.seconds.append(time.monotonic())

        return keep

    def figures(self) -> tuple[int, float, float]:
        """Number of answers so far; mean tokens of their prompts and of the answers, over those that the server counted."""
        with self._lock:
            answers = list(self.of.values())
        prompts = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
        tokens = [answer.tokens for answer in answers if answer.tokens is not None]
        return len(answers), sum(prompts) / max(1, len(prompts)), sum(tokens) / max(1, len(tokens))


def _saved(path: Path) -> list[tuple[tuple[str, int], Answer]]:
    """Answers in a file, each with the digest of what was asked and its number among those; half a line is left out."""
    if not path.exists():
        return []
    saved: list[tuple[tuple[str, int], Answer]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                saved.append(((str(row.pop("asked")), int(row.pop("rollout"))), Answer(**row)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                if line.endswith(b"\n"):
                    raise ValueError(
                        f"{path}:{number}: expected an answer as rollalloc writes it ({error}); remove the line, or move "
                        "the file away"
                    ) from None
    return saved


@dataclass
class _Cost:
    """Shows what a profile costs: the most before it begins, an estimate after the first answers, and the sum at the end."""

    _kept: _Kept
    _rollouts: int
    _endpoint: Endpoint
    _sampling: Sampling
    _prices: tuple[float, float] | None
    _say: Callable[[str], None]
    _began: float = field(default_factory=time.monotonic)
    _estimated: bool = False

    def _price(self, prompts: float, answers: float) -> str:
        """Cost of so many tokens, in words; empty without prices."""
        return "" if self._prices is None else f", {_money(prompts * self._prices[0] + answers * self._prices[1])}"

    def before(self, asked: int) -> None:
        """Show the most tokens that the answers can have, and the sampling parameters."""
        before = len(self._kept.of)
        there = f", {before:,} of them kept from before" if before else ""
        sampling = self._sampling
        most = asked * sampling.max_new_tokens
        prompts = f"{self._price(0, most)} and their prompts" if self._prices else ""
        other = (
            "" if sampling.temperature == 1 else ", for a run that trains at this temperature too (the default is 1)"
        )
        self._say(
            f"{self._rollouts:,} rollouts{there}: {asked:,} requests, {self._endpoint.concurrency} at once, at most "
            f"{most:,} tokens of answers{prompts}; temperature {sampling.temperature:g}, top_p {sampling.top_p:g}{other}"
        )

    def during(self) -> None:
        """Show an estimate once, after the first answers."""
        arrived = len(self._kept.seconds)
        if self._estimated or arrived < _FEW:
            return
        self._estimated = True
        count, prompt, answer = self._kept.figures()
        left = self._rollouts - count
        minutes = left * (self._kept.seconds[-1] - self._began) / arrived / 60
        if left and prompt + answer:
            self._say(
                f"by the first {arrived} answers: {prompt:.0f} tokens a prompt and {answer:.0f} an answer, so {left:,} more "
                f"take about {left * (prompt + answer):,.0f} tokens and {minutes:.0f} min"
                + self._price(left * prompt, left * answer)
            )

    def after(self, refused: Sequence[str]) -> None:
        """Show the sum of tokens, and warn of sampling parameters that the server does not know."""
        count, prompt, answer = self._kept.figures()
        tokens = f"{count * prompt:,.0f} tokens of prompts and {count * answer:,.0f} of answers"
        tokens += self._price(count * prompt, count * answer)
        self._say(f"{count:,} answers: {tokens if prompt + answer else 'the server reported no counts of tokens'}")
        if refused:
            log.warning(
                "%s does not take %s: its own values hold, and if they cut the distribution the profile is not that of "
                "training, which samples from all tokens", self._endpoint.url, ", ".join(refused),
            )  # fmt: skip


def _money(millionths: float) -> str:
    return f"{millionths / 1e6:,.2f} in your currency"


def _doubt(answers: _Kept, orders: Sequence[Order], longest: int) -> None:
    """Warn of answers that no training would sample: all equal, or cut off before the limit."""
    groups = [[answers.of[rollout] for rollout in order.rollouts] for order in orders]
    long = [group for group in groups if len(group) > 1 and min(len(answer.text) for answer in group) > _SHORT]
    if len(long) >= _MOST_PROMPTS and all(len({answer.text for answer in group}) == 1 for group in long):
        log.warning(
            "all answers to a prompt are equal, for each of %d prompts: the server does not sample (it decodes greedily, "
            "has a fixed seed, or a cache), so this is not what training would see", len(long),
        )  # fmt: skip
    early = [
        answer for group in groups for answer in group if answer.truncated and (answer.tokens or longest) < longest
    ]
    if early:
        log.warning(
            "the server cut %d answers off before %d tokens (the shortest at %d): its own limit or context is less than "
            "--max-new-tokens", len(early), longest, min(answer.tokens or longest for answer in early),
        )  # fmt: skip
