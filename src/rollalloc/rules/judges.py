"""Judges: what becomes of a group when its results are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, inf, lgamma, log
from statistics import fmean, pvariance

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompt_pool import NEVER, NEXT_EPOCH, NOW, Epochs, Until
from rollalloc.core.recipe import at_least
from rollalloc.core.rule import Act, JudgeRule, JudgeTraits, Verdict, View, rows_of
from rollalloc.core.statistics import aged

SUCCESS_ABOVE = 0.7  # what is above it is a success: Reinforce-Ada's
_ROUNDING = 1e-3  # of counts that are kept in float16
_TINY = 1e-9  # 1 - 0.9 is a little less than 0.1; a mean of 1/10 must not fall out of the window by that


def _mixed(group: GroupView) -> bool:
    return group.metrics_G.size > 0 and bool((group.metrics_G != group.metrics_G[0]).any())


@dataclass(frozen=True, slots=True)
class Complete(JudgeRule):
    """Train on every group once all its rollouts ended (GRPO); `until`: when its prompt may be drawn again."""

    until: Until = NEXT_EPOCH

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=(), waits_for_all=True, after_failure=self.until)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        return None if group.unfinished else Verdict(Act.TRAIN, until=self.until)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        return {
            "it decides just when all rollouts ended": (verdict is None) == (group.unfinished > 0),
            "every group is trained on": verdict is None or verdict.act is Act.TRAIN,
        }


@dataclass(frozen=True, slots=True)
class NonzeroVariance(JudgeRule):
    """Keep a complete group if its metrics differ, drop it otherwise (dynamic sampling, DAPO, arXiv 2503.14476).

    Attributes:
        act: TRAIN in a last stage, NEXT in an earlier one.
        early: decide as soon as two metrics differ, although rollouts are still to come.
        until: when the prompt may be drawn again.
    """

    act: Act = Act.TRAIN
    early: bool = False
    until: Until = NEXT_EPOCH

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=("metrics_G",), waits_for_all=not self.early)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished and not self.early:
            return None
        if _mixed(group):
            return Verdict(self.act, until=self.until)
        return None if group.unfinished else Verdict(Act.DROP, "zero_variance", self.until)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        differ, ended = len(set(group.metrics_G.tolist())) > 1, not group.unfinished
        return {
            "a group goes on only if its metrics differ": verdict is None or verdict.act is Act.DROP or differ,
            "a group is dropped only if it ended and its metrics are equal": (
                verdict is None or verdict.act is not Act.DROP or (ended and not differ)
            ),
            "it decides when all rollouts ended, and early just where it says so": (
                (verdict is not None) == (ended or (self.early and differ))
            ),
        }


def surely_at_least(rate: float, attempts: float, failures: float, confidence: float) -> bool:
    """Whether so few failures show, with that confidence, that the success rate is at least `rate`.

        Σ_{k=0}^{f} C(n, k) (1 - rate)^k rate^(n - k) ≤ 1 - confidence

    for f failures in n attempts. That is: the exact one-sided lower bound of Clopper and Pearson (1934), the
    (1 - confidence)-quantile of Beta(n - f, f + 1), is at least `rate`. Without a failure it is rate^n ≤ 1 - confidence: a
    rate of .9 takes 29 attempts at .95. Counts that are no whole numbers, as of graded metrics or of weighted attempts, are
    rounded against it.

    Args:
        rate: in (0, 1), or above, which nothing shows.
        attempts: 0 or more.
        failures: in [0, attempts].
        confidence: in (0, 1).
    """
    count, failures = floor(attempts + _ROUNDING), ceil(failures - _ROUNDING)
    if failures > count * (1 - rate):  # fewer successes than the rate itself gives on average
        return False
    logs = (log(rate), log(1 - rate), lgamma(count + 1))
    tail = sum(
        exp(logs[2] - lgamma(k + 1) - lgamma(count - k + 1) + k * logs[1] + (count - k) * logs[0])
        for k in range(failures + 1)
    )
    return tail <= 1 - confidence + _TINY


@dataclass(frozen=True, slots=True)
class Band(JudgeRule):
    """Keep a complete group whose mean metric lies in a window; Pilot-Commit's pilot stage, arXiv 2605.26606.

    Solved: evicted, to be probed again after `reprobe_every` epochs, if ever. Else, mean > 1 - p_upper or mean < p_lower:
    back in the next epoch. Otherwise it goes on.

    A prompt is solved where this visit's mean is at least p_solve and, with a `confidence`, all visits together show that
    its rate is (`surely_at_least`), of which an attempt weighs half after every `HALF_LIFE` later ones: old successes stay
    evidence, and failures of a policy that has learnt since do not stand against the prompt for ever. The confidence is that
    of one look; a prompt is looked at once a visit.

    Attributes:
        p_lower: in [0, 1].
        p_upper: distance of the window's upper end from 1, in [0, 1].
        p_solve: above 0; above 1 evicts nothing.
        reprobe_every: epochs, at least 1; None: an evicted prompt stays evicted.
        confidence: in (0, 1), with a p_solve below 1; None: this visit's mean alone decides, as published.

    Raises:
        ValueError: a number out of its range, a window that is empty (p_lower > 1 - p_upper), or a confidence that a rate is
            1, which no number of rollouts gives.
    """

    p_lower: float
    p_upper: float
    p_solve: float
    reprobe_every: int | None = None
    confidence: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.p_lower <= 1 and 0 <= self.p_upper <= 1):
            raise ValueError(f"p_lower and p_upper must lie in [0, 1], got {self.p_lower} and {self.p_upper}")
        if self.p_lower > 1 - self.p_upper + _TINY:
            raise ValueError(
                f"the window from p_lower={self.p_lower} to 1 - p_upper={1 - self.p_upper:g} is empty; "
                "p_upper is the distance from 1: choose p_lower + p_upper <= 1"
            )
        if not self.p_solve > 0:
            raise ValueError(f"p_solve must be above 0, got {self.p_solve}")
        if self.reprobe_every is not None:
            at_least("reprobe_every", self.reprobe_every, 1)
        if self.confidence is None:
            return
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be in (0, 1), or None, got {self.confidence!r}")
        if self.p_solve == 1:
            raise ValueError(
                f"p_solve=1 with confidence={self.confidence:g}: no number of rollouts shows that a success rate is 1; give "
                "p_solve=0.9, say, or confidence=None to evict on one visit that is all right, as published; above 1 "
                "nothing is evicted"
            )

    @property
    def traits(self) -> JudgeTraits:
        recent = self.confidence is not None
        return JudgeTraits(reads=("metrics_G",), reads_rate=True, waits_for_all=True, reads_recent=recent)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        mean = float(np.mean(group.metrics_G))
        if self._solved(group, mean):
            until = NEVER if self.reprobe_every is None else Epochs(self.reprobe_every)
            return Verdict(Act.DROP, "out_of_band/solved", until)
        if mean > 1 - self.p_upper + _TINY:
            return Verdict(Act.DROP, "out_of_band/too_easy")
        if mean < self.p_lower - _TINY:
            return Verdict(Act.DROP, "out_of_band/too_hard")
        return Verdict(Act.NEXT)

    def _solved(self, group: GroupView, mean: float) -> bool:
        if mean < self.p_solve - _TINY or self.confidence is None:
            return mean >= self.p_solve - _TINY
        attempts, failures = _recent(group)
        return surely_at_least(self.p_solve, attempts, failures, self.confidence)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        if verdict is None or not group.scored:
            return {"it decides just when all rollouts ended": (verdict is None) == (group.unfinished > 0)}
        mean = fmean(group.metrics_G.tolist())
        inside = self.p_lower - _TINY <= mean <= 1 - self.p_upper + _TINY
        solved = self._solved_promised(group, mean)
        if solved is None:  # too near to the limit to be told apart by numerical integration
            return {"it decides just when all rollouts ended": not group.unfinished}
        away = NEXT_EPOCH if not solved else NEVER if self.reprobe_every is None else Epochs(self.reprobe_every)
        return {
            "it decides just when all rollouts ended": not group.unfinished,
            "just the means inside the window go on": (verdict.act is not Act.DROP) == (inside and not solved),
            "a solved prompt is evicted for as long as said, another one comes back": (
                verdict.act is not Act.DROP or verdict.until == away
            ),
        }

    def _solved_promised(self, group: GroupView, mean: float) -> bool | None:
        """Whether the prompt is solved, by integrating the density of Beta(s, n - s + 1); None: too near to tell."""
        if mean < self.p_solve - _TINY or self.confidence is None or self.p_solve > 1:
            return mean >= self.p_solve - _TINY
        attempts, failures = _recent(group)
        count, failures = floor(attempts + _ROUNDING), ceil(failures - _ROUNDING)
        if failures >= count:
            return False
        rate_R = (np.arange(20_000) + 0.5) / 20_000
        log_density_R = (count - failures - 1) * np.log(rate_R) + failures * np.log1p(-rate_R)
        density_R = np.exp(log_density_R - log_density_R.max())
        below = float(density_R[rate_R <= self.p_solve].sum() / density_R.sum())
        return None if abs(below - (1 - self.confidence)) < 1e-3 else below < 1 - self.confidence


def _recent(group: GroupView) -> tuple[float, float]:
    """Attempts and failures of a prompt in all its visits, this one included, an older attempt weighing less."""
    record, scored = group.record, group.scored
    attempts = aged(record.recent_attempts, scored) + scored
    return attempts, aged(record.recent_failures, scored) + scored - float(group.metrics_G.sum())


def relative_variance(metrics_G: NDArray[np.float64]) -> float:
    """The variance of metrics in [0, 1], as a share of the largest that so many can have.

        G Σ (m_i - mean)² / (⌊G/2⌋ ⌈G/2⌉);  of k ones and G - k zeros  k (G - k) / (⌊G/2⌋ ⌈G/2⌉)

    VCRL's p, arXiv 2509.19803. 0 of fewer than two.
    """
    count = metrics_G.size
    if count < 2:
        return 0.0
    over_G = metrics_G - metrics_G.mean()
    return count * float(over_G @ over_G) / ((count // 2) * (count - count // 2))


@dataclass(frozen=True, slots=True)
class Varied(JudgeRule):
    """Train on a complete group whose metrics vary enough, drop it otherwise; VCRL, arXiv 2509.19803.

        relative_variance ≥ `kappa`, or `kappa_first` in the first `first` updates of the weights

    Its prompt may be drawn again at once, either way.

    Attributes:
        kappa: in (0, 1]; of 4 rollouts 1 right one gives 0.75, of 8 two give 0.75 and three 0.94.
        kappa_first: in (0, 1].
        first: 0 or more.

    Raises:
        ValueError: a number out of its range.
    """

    kappa: float = 0.8
    kappa_first: float = 0.3
    first: int = 20

    def __post_init__(self) -> None:
        at_least("first", self.first, 0)
        if not (0 < self.kappa <= 1 and 0 < self.kappa_first <= 1):
            raise ValueError(f"kappa and kappa_first must be in (0, 1], got {self.kappa} and {self.kappa_first}")

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=("metrics_G",), reads_rate=True, waits_for_all=True, after_failure=NOW)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        varies = relative_variance(group.metrics_G)
        if varies >= (self.kappa_first if view.version < self.first else self.kappa) - _TINY:
            return Verdict(Act.TRAIN, until=NOW)
        return Verdict(Act.DROP, "out_of_band/low_variance" if _mixed(group) else "zero_variance", NOW)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        metrics, count = group.metrics_G.tolist(), group.scored
        most = pvariance([0.0] * (count // 2) + [1.0] * (count - count // 2)) if count > 1 else 1.0
        share = pvariance(metrics) / most if count > 1 else 0.0
        least = self.kappa_first if view.version < self.first else self.kappa
        return {
            "it decides just when all rollouts ended": (verdict is None) == (group.unfinished > 0),
            "just the groups that vary enough are trained on": (
                verdict is None or abs(share - least) < 1e-6 or (verdict.act is Act.TRAIN) == (share > least)
            ),
            "its prompt may be drawn again at once": verdict is None or verdict.until == NOW,
        }


def first_success(metrics_G: NDArray[np.float64]) -> int:
    """The place of the first success, from 1; 0 where there is none."""
    won = np.flatnonzero(metrics_G > SUCCESS_ABOVE)
    return int(won[0]) + 1 if won.size else 0


def conformal_place(places: Sequence[int], delta: float | None) -> float:
    """The place within which the first success comes in all but a share `delta` of visits like these.

    Split conformal prediction: of n visits the ⌈(n + 1)(1 - delta)⌉-th smallest place, or the largest, where those without
    a success are at infinity. C-GRPO's thresholds for its score "first_success", place / k, in one number for all k.

    Args:
        places: of the first success in each visit, from 1; 0 where there was none.
        delta: in (0, 1); None: the share of visits without a success, plus 0.05, kept in [0.05, 0.95].

    Returns:
        Infinity of no visits.
    """
    count = len(places)
    if not count:
        return inf
    if delta is None:
        delta = min(max(places.count(0) / count + 0.05, 0.05), 0.95)
    at = min(max(ceil((count + 1) * (1 - delta) - _TINY), 1), count)
    return sorted(place or inf for place in places)[at - 1]


@dataclass(frozen=True, slots=True)
class Resolved(JudgeRule):
    """Train on a complete group that has as early a success as was to be expected; until then it goes on.

        j ≤ q,  j: the place of its first success,  q: `conformal_place` of the last visits

    The places are those that the prompt rule keeps (`prompts.FirstSuccesses`); under another one any success is enough.
    C-GRPO's stop under its score "first_success"; see PAPERS.md.

    Attributes:
        delta: share of prompts whose first success may come later, in (0, 1); None: by the share without one.

    Raises:
        ValueError: a delta outside (0, 1).
    """

    delta: float | None = None

    def __post_init__(self) -> None:
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), or None, got {self.delta!r}")

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=("metrics_G",), reads_rate=True, waits_for_all=True)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        place, expected = first_success(group.metrics_G), conformal_place(view.memory.get("places", []), self.delta)
        return Verdict(Act.TRAIN if 0 < place <= expected else Act.NEXT)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        """By the scores: 1 of visits without a success among their first k, else its place over k."""
        places, k = view.memory.get("places", []), max(1, group.scored)
        scores = sorted([place / k if 0 < place <= k else 1.0 for place in places])
        delta = self.delta
        if delta is None and places:
            delta = min(max(sum(place == 0 for place in places) / len(places) + 0.05, 0.05), 0.95)
        at = min(len(scores), max(1, ceil((len(scores) + 1) * (1 - (delta or 0.0)) - _TINY)))
        threshold = scores[at - 1] if scores else 1.0
        won = [g + 1 for g, metric in enumerate(group.metrics_G.tolist()) if metric > SUCCESS_ABOVE]
        return {
            "it decides just when all rollouts ended": (verdict is None) == (group.unfinished > 0),
            "just the groups whose score is within the threshold are trained on, the others go on": (
                verdict is None or (verdict.act is Act.TRAIN) == bool(won and won[0] / k <= threshold)
            ),
        }


@dataclass(frozen=True, slots=True)
class Collected(JudgeRule):
    """Train on a complete group as soon as it has enough successes and failures for its rows; until then it goes on.

    Of m rows, as the recipe's row rule says, m // 2 successes and as many failures as are lacking to m; or one success,
    whatever the failures. Reinforce-Ada's exits, "balanced" and "positive-focused", arXiv 2510.04996.

    Attributes:
        half: whether half of the rows must be successes; else one success is enough.
        above: a metric above it is a success.

    Raises:
        ValueError: `above` outside [0, 1).
    """

    half: bool = True
    above: float = SUCCESS_ABOVE

    def __post_init__(self) -> None:
        if not 0 <= self.above < 1:
            raise ValueError(f"above must be in [0, 1), got {self.above!r}")

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=("metrics_G",), reads_rate=True, reads_rows=self.half, waits_for_all=True)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        successes, failures = self._least(view)
        won = int((group.metrics_G > self.above).sum())
        return Verdict(Act.TRAIN if won >= successes and group.scored - won >= failures else Act.NEXT)

    def _least(self, view: View) -> tuple[int, int]:
        if not self.half:
            return 1, 0
        m = rows_of(view)
        return m // 2, m - m // 2

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        won = [metric > self.above for metric in group.metrics_G.tolist()].count(True)
        m = rows_of(view) if self.half else 0
        enough = (2 * won >= m - 1 and 2 * (group.scored - won) >= m) if self.half else won > 0
        return {
            "it decides just when all rollouts ended": (verdict is None) == (group.unfinished > 0),
            "just the groups that have enough are trained on, the others go on": (
                verdict is None or verdict.act is (Act.TRAIN if enough else Act.NEXT)
            ),
        }
