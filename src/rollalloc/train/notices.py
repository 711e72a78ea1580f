"""Warnings, given once per process, about a reward that fails, never differs, is not a success rate or is slow, and about
a policy that gives the same answers each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollalloc.core.allocator import Allocator
from rollalloc.core.teaching import FIRST, WINDOW
from rollalloc.files.text import one_line
from rollalloc.generate.outcomes import Outcomes
from rollalloc.runs.learning_signal import in_words
from rollalloc.train.config import Config
from rollalloc.train.evaluation import Evaluation

log = logging.getLogger(__name__)

_MANY = 0.1  # warn if at least this share of samples has no score
_HALF = 0.5  # warn if at least half of the samples are truncated, or if scoring takes at least half of the time
_HARDLY = 1e-3  # below this exact accuracy, warn that rollouts are hardly ever right
_SLOW_S = 10.0  # check the share of time spent on scoring only after this many seconds of training
# A policy has lost its variety if pass@k was above the accuracy by `_VARIED` at first, and is now by at most `_ALIKE`. This
# cannot be told from fewer than `_ATTEMPTS` attempts, nor if nearly all or nearly none are right.
_VARIED, _ALIKE, _ATTEMPTS, _BETWEEN = 0.1, 0.02, 4, (0.1, 0.9)
_ROUNDING = 1e-6  # tolerance for means of float32 scores near 0 or 1
_NAMED = 2  # number of reasons that a warning names


class Notices:
    """Watches the beginning of a run, and warns about problems that the user should check.

    Args:
        config: configuration of the run; `notices=False` turns all warnings off.
        report: returns figures about scoring so far, as `Scorer.report` does.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        report: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._report, self._clock = config, report, clock
        self._began = clock()
        self._said: set[str] = set()
        self._last_warning: str | None = None
        self._differs = False  # whether the first evaluation found scores that differ
        self._first: Evaluation | None = None  # of the initial model; None in a resumed run

    def check_first_evaluation(self, evaluation: Evaluation) -> None:
        """Check the evaluation of the initial model."""
        self._first = evaluation
        self._differs = evaluation.accuracy is not None and evaluation.sampled > 0 and evaluation.constant is None
        for text in of_first_evaluation(evaluation):
            self._warn_once(text, text)
        if evaluation.truncated > _HALF * evaluation.sampled or (
            evaluation.sampled and self._config.sampling.max_new_tokens == 1
        ):
            self._warn_of_truncation(f"{evaluation.truncated:,} of {evaluation.sampled:,} held-out samples")
        if evaluation.accuracy is not None and not -_ROUNDING <= evaluation.accuracy <= 1 + _ROUNDING:
            self._warn_once("no rate", _of_no_rate(f"the mean held-out metric is {evaluation.accuracy:.4g}"))
        self._check_time()

    def check_later_evaluation(self, evaluation: Evaluation) -> None:
        """Check whether the attempts at a prompt still differ as those of the initial model did."""
        if self._first is not None and (text := of_lost_variety(self._first, evaluation)) is not None:
            self._warn_once("lost variety", text)

    def check_rollouts(self, allocator: Allocator, outcomes: Outcomes) -> None:
        """Check the rollouts scored so far. Call this even before the first batch, which may take long."""
        self._check_time()
        unscored, paid = sum(outcomes.unscored.values()), allocator.paid
        if unscored >= max(FIRST * _MANY, paid * _MANY) and paid >= FIRST:
            self._warn_once(
                "unscored",
                f"check the reward function: {unscored:,} of the first {paid:,} rollouts have no score: "
                f"{counted(outcomes.unscored)}. They are paid for and not trained on",
            )
        if outcomes.no_rate is not None:
            self._warn_once("no rate", _of_no_rate(f"a rollout has the metric {outcomes.no_rate:.4g}"))
        # Not once the recipe itself stops rollouts at a length.
        if allocator.limit is None and outcomes.ended >= FIRST and outcomes.truncated > _HALF * outcomes.ended:
            self._warn_of_truncation(f"{outcomes.truncated:,} of the first {outcomes.ended:,} rollouts")
        if not allocator.version:
            self._warn_of_no_signal(in_words(allocator.teaching.final_shares()), allocator.paid)

    def check_batch(self, allocator: Allocator) -> None:
        """Check, after each batch, whether rollouts still teach, prompts are left to draw, and rows are still replayed."""
        if allocator.teaching.should_warn:
            self._warn_of_no_signal(in_words(allocator.teaching.shares()), allocator.paid)
        for line in (allocator.few_prompts(), allocator.shut_gate()):
            if line is not None:
                log.warning("%s", line)

    def _warn_of_no_signal(self, text: str | None, paid: int) -> None:
        """Warn that rollouts give no learning signal, unless the last warning had the same text.

        If the scores of the first evaluation differ, there is no warning before `WINDOW` rollouts are paid.
        """
        if text is not None and text != self._last_warning and not (self._differs and paid < WINDOW):
            self._last_warning = text
            self._warn_once(f"teaching: {len(self._said)}", text)

    def _warn_of_truncation(self, which: str) -> None:
        most = self._config.sampling.max_new_tokens
        text = (
            f"{which} were cut off at {most:,} tokens, end of sequence included, and may not have reached their "
            "answer: try a higher --max-new-tokens"
        )
        if most == 1:
            text = (
                "--max-new-tokens 1: each rollout is a single token. If this is the end of sequence, the answer is empty; "
                "otherwise the answer is cut off. If answers are longer than one token, set a larger value"
            )
        self._warn_once("cut off", text)

    def _check_time(self) -> None:
        if "slow" in self._said or not self._config.notices:
            return
        report = self._report()
        seconds, workers = report.get("seconds", 0.0), max(1, report.get("workers", 1))
        count = report.get("scored", 0) + sum(report.get("unscored", {}).values())
        elapsed = self._clock() - self._began
        share = seconds / workers / max(elapsed, 1e-9)
        if seconds / workers >= _SLOW_S and share >= _HALF:
            self._warn_once(
                "slow",
                f"the reward function is slow: it took {seconds / max(1, count):.2g} s a sample, {min(share, 1):.0%} of "
                f"the time so far with {workers} worker{'s' * (workers > 1)}. More --reward-workers, or a faster function, "
                "would help",
            )

    def _warn_once(self, name: str, text: str) -> None:
        if self._config.notices and name not in self._said:
            self._said.add(name)
            log.warning("%s", text)


def counted(reasons: Mapping[str, int]) -> str:
    """The most frequent reasons with their counts, such as "KeyError: 'answer' (48)"."""
    most = sorted(reasons.items(), key=lambda entry: -entry[1])
    named = [f"{one_line(reason, 120)} ({count:,})" for reason, count in most[:_NAMED]]
    others = sum(count for _, count in most[_NAMED:])
    return "; ".join([*named, *([f"other reasons ({others:,})"] if others else [])])


def of_first_evaluation(evaluation: Evaluation) -> Iterator[str]:
    """Warnings that follow from the evaluation of the initial model. Each says what to check."""
    unscored, accuracy = sum(evaluation.unscored.values()), evaluation.accuracy
    of_all = f"of {evaluation.sampled:,} held-out samples"
    if accuracy is None:
        yield (
            f"check the reward function: none {of_all} has a score: {counted(evaluation.unscored)}. The accuracy is not "
            "known"
        )
    elif unscored >= max(1, _MANY * evaluation.sampled):
        yield (
            f"check the reward function: {unscored:,} {of_all} have no score: {counted(evaluation.unscored)}. The "
            "accuracy is the mean over the others"
        )
    if accuracy is not None and evaluation.constant is not None:
        which = f"all {evaluation.sampled - unscored:,} held-out samples scored"
        if evaluation.constant <= _ROUNDING:
            yield (
                f"check the reward function: {which} {evaluation.constant:.3g} before any training. Try it on an answer "
                "that you know to be right, and look at the form of the ground truths. If it is sound, the model cannot do "
                "the task yet: take easier prompts or a stronger model"
            )
        else:
            yield (
                f"check the reward function: {which} {evaluation.constant:g} before any training. Try it on an answer that "
                "you know to be wrong. If it is sound, these prompts have nothing left to teach"
            )
    if accuracy is not None and not evaluation.sampled and accuracy < _HARDLY:
        at_k = "" if evaluation.breadth is None else f", pass@{evaluation.breadth.k} {evaluation.breadth.pass_at_k:.2g}"
        yield (
            f"the model hardly ever gives the right answer to a held-out prompt: accuracy {accuracy:.2g}{at_k}, so that "
            "most rollouts will teach nothing. Check the form of the prompts and of the ground truths; if they are sound, "
            "take easier prompts or a stronger model"
        )


def of_lost_variety(first: Evaluation, now: Evaluation) -> str | None:
    """The warning that the policy gives nearly the same answers each time, though it does not know the right ones."""
    if first.accuracy is None or now.accuracy is None or first.breadth is None or now.breadth is None:
        return None
    before, gap = first.breadth.pass_at_k - first.accuracy, now.breadth.pass_at_k - now.accuracy
    if now.breadth.k < _ATTEMPTS or before < _VARIED or gap > _ALIKE or not _BETWEEN[0] <= now.accuracy <= _BETWEEN[1]:
        return None
    return (
        f"the policy gives nearly the same answer each time: pass@{now.breadth.k} {now.breadth.pass_at_k:.2g} is hardly "
        f"above the accuracy {now.accuracy:.2g}, and was {first.breadth.pass_at_k:.2g} to {first.accuracy:.2g} before "
        "training. From such rollouts little more is learned. Try a lower --learning-rate, from the start"
    )


def _of_no_rate(what: str) -> str:
    return (
        f"{what}, which is not a success rate. The reported accuracy is then a mean score, and only 1 counts as right. "
        'Let the reward function return {"score": reward, "acc": 1.0 if right else 0.0}'
    )
