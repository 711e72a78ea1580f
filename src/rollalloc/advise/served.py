"""Sample a profile from a model at a server, into the same kind of folder as `sampled_profile.sample_profile`.

Each answer is written to `answers.jsonl` when it arrives, with a digest of its request: server, model, sampling, arguments
of the template, and prompt. A later call uses these answers and requests only the missing ones. Answers that cannot be
scored, for example because the server aborted them, count as missing until their rollouts are in the log. So an interrupted
call continues, and a call with another reward (`overwrite`) or with more prompts or rollouts pays only for new requests.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from threading import Lock

from rollalloc.advise.profile_folder import PROMPTS_DRAWN, ROLLOUTS_EACH, ProfileFolder
from rollalloc.advise.sampled_profile import (
    described_profile,
    drawn_of,
    kept,
    orders_of,
    roll_out,
    whole_waves,
    write_rows,
)
from rollalloc.core.events import Order
from rollalloc.data.encoding import template_arguments
from rollalloc.data.prompts import PromptSet, load_unless_loaded
from rollalloc.files.names import ANSWERS, ROLLOUTS
from rollalloc.files.regular import append_text
from rollalloc.generate.endpoint import Endpoint
from rollalloc.generate.openai_server import Answer, Ask, ServedModel, ServerFailed
from rollalloc.generate.outcomes import Outcomes, RolloutLog, RolloutResult
from rollalloc.models.settings import Sampling
from rollalloc.rewards.function import Outcome, Unscored
from rollalloc.rewards.scorers import Scorer
from rollalloc.tasks.files import Shown, unseen
from rollalloc.train.config import Config
from rollalloc.train.loading import scorer_of

log = logging.getLogger(__name__)

_FEW = 16  # number of answers after which the total cost is estimated
_SHORT = 4  # number of characters; answers that are not longer may be equal by chance
_MOST_PROMPTS = 8  # number of groups; equal answers in fewer groups may be chance


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

    This has the arguments and raises the errors of `sample_profile`, with these additions:

    Args:
        run: the run to profile. Its model is the name under which the server serves the model.
        endpoint: the server that generates the rollouts.
        seed: seed of the draw of prompts. The server's sampling has its own randomness.
        prices: price of a million prompt tokens, and price of a million answer tokens. None: only numbers of tokens are
            shown.
        overwrite: True: first remove the files of another profile, except the answers that can be scored.
        say: called with sentences about tokens, time and cost.

    Raises:
        ServerFailed: the server cannot be used; the answers so far are kept.
    """
    described = described_profile(run, prompts, n, seed) | {"served": endpoint.address}
    with ProfileFolder(folder) as place:
        place.check(described, overwrite=overwrite)
        if not overwrite and place.is_whole(prompts, n):
            return folder / ROLLOUTS
        given = load_unless_loaded(*run.prompts)
        drawn = drawn_of(seed, prompts, len(given))
        ask = Ask(run.model, run.sampling, template_arguments(run.chat_template_args), skip_refused=run.drop_overlong)
        orders = orders_of(drawn, n)
        logged = 0 if overwrite else whole_waves(place, place.prompts(), n)
        answers = _Answers(folder / ANSWERS, endpoint, ask, given, orders, logged * n)
        try:
            with scorer_of(run) as scorer, ServedModel(endpoint, ask) as served:
                if answers.missing:
                    served.check_server()
                before = place.begin(overwrite=overwrite)
                if before < len(drawn):
                    write_rows(folder, given, drawn)
                    place.describe(described | {"prompts": len(drawn), "of": len(given)})
                cost = _Cost(answers, prices, say)
                cost.before(endpoint.concurrency, run.sampling)
                answers.request(served)
                waves = _Waves(given, scorer, answers, folder / ROLLOUTS, cost)
                roll_out(waves, orders, kept(place, before, n), place, progress)
        except (ServerFailed, OSError) as error:  # OSError: for example, the disk is full
            if not (count := len(answers.of)):
                raise
            raise (ServerFailed if isinstance(error, ServerFailed) else OSError)(
                f"{error}. {count:,} answers are kept in {folder}: the same command continues with them"
            ) from None
        cost.after()
        _doubt(answers, orders, run.sampling.max_new_tokens)
        if served.refused:
            log.warning(
                "%s does not take %s and uses its own values. Training samples from all tokens: if these values exclude "
                "some, the profile does not show what training would see", endpoint.url, ", ".join(served.refused),
            )  # fmt: skip
    return folder / ROLLOUTS


class _Waves:
    """Implements `sampled_profile.Waves` with a server's answers: scores and logs them."""

    def __init__(self, given: PromptSet, scorer: Scorer, answers: _Answers, path: Path, cost: _Cost) -> None:
        self.scorer, self.outcomes = scorer, Outcomes()
        self._given, self._answers, self._cost = given, answers, cost
        self._log = RolloutLog(path)

    def wave(self, orders: Sequence[Order], done: Callable[[int], None]) -> list[Outcome]:
        asked = [(order, rollout) for order in orders for rollout in order.rollouts]
        answers: list[Answer] = []
        for _, rollout in asked:
            answers.append(self._answers[rollout])
            self._cost.during()
            done(rollout + 1)
        samples = [
            self._given.sample(order.prompt, rollout, answer.text, answer.tokens)
            for (order, rollout), answer in zip(asked, answers, strict=True)
            if not answer.failure
        ]
        scores = iter(self.scorer.submit(samples).result())
        outcomes = [Unscored(answer.failure) if answer.failure else next(scores) for answer in answers]
        for (order, rollout), answer, outcome in zip(asked, answers, outcomes, strict=True):
            tokens, truncated = answer.tokens or 0, answer.truncated
            self.outcomes.add(outcome, truncated=truncated, tokens=tokens)
            result = RolloutResult(rollout=rollout, outcome=outcome, tokens=tokens, version=0, truncated=truncated)
            key = self._given.keys[order.prompt]
            self._log.add(result, order, key, answer.text, tokens_known=answer.tokens is not None)
        self._log.flush()
        return outcomes


class _Answers:
    """The answers to a profile's requests, by rollout.

    Attributes:
        of: the answers so far, from the folder and from the server.
        missing: the rollouts without an answer in the folder, in order.

    Args:
        path: the file of answers.
        endpoint: the server.
        ask: what is the same in all requests.
        given: the prompts.
        orders: the profile's groups.
        logged: number of rollouts in the profile's log. Those after them are requested again if they cannot be scored.
    """

    def __init__(
        self, path: Path, endpoint: Endpoint, ask: Ask, given: PromptSet, orders: Sequence[Order], logged: int
    ) -> None:
        self._path, self._lock = path, Lock()
        self._prompts = {rollout: given.prompts[order.prompt] for order in orders for rollout in order.rollouts}
        self._asked: dict[int, tuple[str, int]] = {}
        times: Counter[str] = Counter()  # counts equal prompts: two data sources may have the same prompt
        for rollout, prompt in self._prompts.items():
            digest = ask.digest(endpoint.address, prompt)
            self._asked[rollout] = digest, times[digest]
            times[digest] += 1
        rollout_of = {asked: rollout for rollout, asked in self._asked.items()}
        saved = {rollout_of[asked]: answer for asked, answer in _saved(path) if asked in rollout_of}
        self.of = {rollout: answer for rollout, answer in saved.items() if rollout < logged or not answer.failure}
        self.missing = [rollout for rollout in self._prompts if rollout not in self.of]
        self._coming: dict[int, Future[Answer]] = {}

    def __getitem__(self, rollout: int) -> Answer:
        """Wait for the answer of a rollout.

        Raises:
            ServerFailed, OSError: this answer, or an earlier one, could not be requested or saved.
        """
        return self._coming[rollout].result() if rollout in self._coming else self.of[rollout]

    def request(self, served: ServedModel) -> None:
        """Request the missing answers. Before that, remove an incomplete last line from the file."""
        if self._path.exists():
            text = self._path.read_bytes()
            os.truncate(self._path, text.rfind(b"\n") + 1)
        coming = served.answers([self._prompts[rollout] for rollout in self.missing], self._keep)
        self._coming = dict(zip(self.missing, coming, strict=True))

    def _keep(self, number: int, answer: Answer) -> None:
        rollout = self.missing[number]
        digest, place = self._asked[rollout]
        append_text(self._path, json.dumps({"asked": digest, "rollout": place, **asdict(answer)}) + "\n")
        with self._lock:
            self.of[rollout] = answer

    def figures(self) -> tuple[int, float, float]:
        """The number of answers so far, and the mean number of tokens of a prompt and of an answer; 0 if unknown."""
        with self._lock:
            answers = list(self.of.values())
        prompts = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
        tokens = [answer.tokens for answer in answers if answer.tokens is not None]
        return len(answers), sum(prompts) / max(1, len(prompts)), sum(tokens) / max(1, len(tokens))


def _saved(path: Path) -> list[tuple[tuple[str, int], Answer]]:
    """Read the complete lines of a file. Each gives ((digest of the request, index among equal requests), answer)."""
    if not path.exists():
        return []
    saved: list[tuple[tuple[str, int], Answer]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                saved.append(((str(row.pop("asked")), int(row.pop("rollout"))), Answer(**row)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{path}:{number}: expected an answer as rollalloc writes it ({error}); remove the line, or move the "
                    "file away"
                ) from None
    return saved


def amount(price: float) -> str:
    """A price with two decimals; below 1 with two digits that are not 0, because 0.00 would say nothing."""
    return f"{price:,.2f}" if price >= 1 else f"{Decimal(f'{price:.2g}'):f}"


class _Cost:
    """Shows the cost of a profile: the maximum at the start, an estimate after some answers, and the sum at the end.

    Args:
        answers: the profile's answers.
        prices: price of a million prompt tokens, and price of a million answer tokens; or None.
        say: called with each sentence.
    """

    def __init__(self, answers: _Answers, prices: tuple[float, float] | None, say: Callable[[str], None]) -> None:
        self._answers, self._prices, self._say = answers, prices, say
        self._before, self._began, self._estimated = len(answers.of), time.monotonic(), False

    def _price(self, prompts: float, answers: float) -> str:
        """Cost of these numbers of tokens, in words; empty without prices."""
        if self._prices is None:
            return ""
        price = (prompts * self._prices[0] + answers * self._prices[1]) / 1e6
        return f", {amount(price)} in your currency"

    def before(self, concurrency: int, sampling: Sampling) -> None:
        """Show the maximum number of tokens of all answers, and the sampling parameters."""
        before, asked = self._before, len(self._answers.missing)
        there = f", {before:,} of them kept from before" if before else ""
        most = asked * sampling.max_new_tokens
        prompts = f"{self._price(0, most)} and their prompts" if self._prices else ""
        other = "" if sampling.temperature == 1 else " (training must use this temperature too; its default is 1)"
        self._say(
            f"{before + asked:,} rollouts{there}: {asked:,} requests, {concurrency} at once, at most {most:,} tokens of "
            f"answers{prompts}; temperature {sampling.temperature:g}, top_p 1{other}"
        )

    def during(self) -> None:
        """Show an estimate once, after the first answers."""
        count, prompt, answer = (0, 0, 0) if self._estimated else self._answers.figures()
        arrived = count - self._before
        if arrived < _FEW:
            return
        self._estimated = True
        left = len(self._answers.missing) - arrived
        minutes = left * (time.monotonic() - self._began) / arrived / 60
        time_left = f"{minutes:.0f} min" if minutes >= 1 else "less than a minute"
        if left and prompt + answer:
            self._say(
                f"after the first {arrived} answers: {prompt:.0f} tokens per prompt and {answer:.0f} per answer; the "
                f"other {left:,} will take about {left * (prompt + answer):,.0f} tokens and {time_left}"
                + self._price(left * prompt, left * answer)
            )

    def after(self) -> None:
        """Show the total number of tokens."""
        count, prompt, answer = self._answers.figures()
        tokens = f"{count * prompt:,.0f} tokens of prompts and {count * answer:,.0f} of answers"
        tokens += self._price(count * prompt, count * answer)
        self._say(f"{count:,} answers: {tokens if prompt + answer else 'the server reported no counts of tokens'}")


def _doubt(answers: _Answers, orders: Sequence[Order], longest: int) -> None:
    """Warn if answers cannot be scored, if each prompt's answers are all equal, or if they are cut off before the limit.

    In the last two cases, training would see other answers.
    """
    if failures := Counter(answer.failure for answer in answers.of.values() if answer.failure):
        log.warning(
            "%d of %d answers have no score, mostly because: %s. The same command with --overwrite asks for these answers "
            "again", failures.total(), len(answers.of), failures.most_common(1)[0][0],
        )  # fmt: skip
    groups = [[answers.of[rollout] for rollout in order.rollouts] for order in orders]
    long = [group for group in groups if len(group) > 1 and min(len(answer.text) for answer in group) > _SHORT]
    if len(long) >= _MOST_PROMPTS and all(len({answer.text for answer in group}) == 1 for group in long):
        log.warning(
            "all answers to a prompt are equal, for each of %d prompts: the server does not sample (it decodes greedily, "
            "uses a fixed seed, or caches answers), so training would see other answers", len(long),
        )  # fmt: skip
    early = [
        answer for group in groups for answer in group if answer.truncated and (answer.tokens or longest) < longest
    ]
    if early:
        log.warning(
            "the server cut %d answers off before %d tokens (the shortest at %d): its own limit or context is less than "
            "--max-new-tokens", len(early), longest, min(answer.tokens or longest for answer in early),
        )  # fmt: skip
