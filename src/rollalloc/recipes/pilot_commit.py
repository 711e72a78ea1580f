"""Pilot-Commit: a few pilot rollouts estimate each prompt, the rest goes to prompts with reward variance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, exp, floor, lgamma, log
from statistics import fmean
from typing import Literal

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.prompt_pool import NEVER, NEXT_EPOCH, Epochs
from rollalloc.core.recipe import Recipe, Stage, at_least, one_of
from rollalloc.core.rule import (
    Act,
    IntakeRule,
    IntakeTraits,
    JudgeRule,
    JudgeTraits,
    Memory,
    PromoteRule,
    RowRule,
    RowTraits,
    Verdict,
    View,
)
from rollalloc.core.statistics import aged
from rollalloc.recipes.grpo import batches_ahead, grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, intake, promote, sizes
from rollalloc.rules.judges import TINY
from rollalloc.rules.rows import Chosen, MaxVariance, even, max_variance_subset

_Promote = Literal["top_variance", "random", "oldest", "most_recent"]


_PROMOTE: Mapping[str, PromoteRule] = {
    "top_variance": promote.TopVariance(always=True),
    "random": promote.RandomOrder(),
    "oldest": promote.Oldest(),
    "most_recent": promote.MostRecent(),
}


_IN_WAVES = promote.TopVariance()


@sized
def pilot_commit(
    groups: int = 16,
    n_pilot: int = 4,
    n_commit: int = 12,
    gen_groups: int | None = None,
    p_lower: float = 0.125,
    p_upper: float = 0.25,
    p_solve: float = 0.9,
    max_staleness: int = 4,
    promote: _Promote | None = None,
    pilots: Literal["as_needed", "every_round"] = "as_needed",
    n_effective: int | None = None,
    max_candidates: int | None = None,
    reprobe_every: int | None = 4,
    confidence: float | None = 0.95,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Pilot-Commit: a few pilots estimate each prompt, the rest goes to prompts with variance. arXiv 2605.26606.

    Pilots and commits of a prompt train as one group of n_pilot + n_commit. Where staleness is allowed, the pilots for the
    next batch are generated together with the commits for this one.

    Args:
        groups: prompts in a batch, at least 1.
        n_pilot: rollouts that estimate a prompt, at least 1.
        n_commit: rollouts for a prompt in the window, at least 1.
        gen_groups: prompts piloted at a time, at least 1; None: three times `groups`.
        p_lower: pilot means below it are deferred to the next epoch.
        p_upper: pilot means above 1 - p_upper are skipped until the next epoch.
        p_solve: a prompt is evicted whose pilots' mean is at least this and whose success rate is, with `confidence`, by all
            its rollouts so far; above 1 none is evicted. Published: 1.0, with confidence=None and reprobe_every=None.
        max_staleness: updates of the weights after which a pilot is too old to train on.
        promote: which prompts in the window get commits when there are more than needed: "top_variance", "random", "oldest"
            or "most_recent", by their pilots. The newest first let the others grow old until their pilots are stale. None:
            "top_variance" in waves; where rollouts stream "oldest", since the highest is known only when all pilots are in.
        pilots: "as_needed": none while those that passed suffice for this batch and the next; "every_round": gen_groups new
            prompts beside the commits of each round, as published, and the next round when all of it is over.
        n_effective: pilots of a prompt that are trained on, those of largest variance, in [1, n_pilot]; advantages are then
            over the rows that are. None: all.
        max_candidates: prompts piloted for one batch at most; then it is short. None: no limit.
        reprobe_every: epochs after which an evicted prompt is piloted again, at least 1; None: never.
        confidence: of the lower bound on a prompt's success rate, in (0, 1), `surely_at_least`: .9 at .95 takes 29
            rollouts that are all right, of which one weighs half after every 64 later ones of its prompt. None: the pilots
            of one visit decide, of which two out of two are all right for every fourth prompt of rate .5.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range, or an empty window.
    """
    at_least("n_pilot", n_pilot, 1, "a prompt without pilots has no estimate")
    at_least("n_commit", n_commit, 1)
    gen_groups = batches_ahead(groups, gen_groups)
    if promote is not None:
        one_of("promote", promote, tuple(_PROMOTE))
    one_of("pilots", pilots, ("as_needed", "every_round"))
    base = grpo(groups, n_pilot, deviation)
    if n_effective is not None:
        at_least("n_effective", n_effective, 1, "without pilots in it a group is the commits alone")
        if n_effective > n_pilot:
            raise ValueError(f"n_effective must be at most n_pilot={n_pilot}, got {n_effective}")
        kernel = advantages.kernel_of(deviation)
        base = replace(base, rows=SubsampledPilots(n_effective), advantage=advantages.OverChosen(kernel))
    window = Band(p_lower, p_upper, p_solve, reprobe_every, confidence)
    return replace(
        base,
        stages=(
            Stage("pilot", sizes.Fixed(n_pilot), window, None, _PROMOTE[promote] if promote else _IN_WAVES),
            replace(base.stages[0], name="commit", size=sizes.Fixed(n_commit)),
        ),
        intake=EveryRound(gen_groups) if pilots == "every_round" else intake.KeepInFlight(gen_groups, ahead=True),
        max_staleness=max_staleness,
        max_candidates=max_candidates,
    )


ROUNDING = 1e-3  # of counts that are kept in float16


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
    count, failures = floor(attempts + ROUNDING), ceil(failures - ROUNDING)
    if failures > count * (1 - rate):  # fewer successes than the rate itself gives on average
        return False
    logs = (log(rate), log(1 - rate), lgamma(count + 1))
    tail = sum(
        exp(logs[2] - lgamma(k + 1) - lgamma(count - k + 1) + k * logs[1] + (count - k) * logs[0])
        for k in range(failures + 1)
    )
    return tail <= 1 - confidence + TINY


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
        if self.p_lower > 1 - self.p_upper + TINY:
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
        if mean > 1 - self.p_upper + TINY:
            return Verdict(Act.DROP, "out_of_band/too_easy")
        if mean < self.p_lower - TINY:
            return Verdict(Act.DROP, "out_of_band/too_hard")
        return Verdict(Act.NEXT)

    def _solved(self, group: GroupView, mean: float) -> bool:
        if mean < self.p_solve - TINY or self.confidence is None:
            return mean >= self.p_solve - TINY
        attempts, failures = _recent(group)
        return surely_at_least(self.p_solve, attempts, failures, self.confidence)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        if verdict is None or not group.scored:
            return {"it decides just when all rollouts ended": (verdict is None) == (group.unfinished > 0)}
        mean = fmean(group.metrics_G.tolist())
        inside = self.p_lower - TINY <= mean <= 1 - self.p_upper + TINY
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
        if mean < self.p_solve - TINY or self.confidence is None or self.p_solve > 1:
            return mean >= self.p_solve - TINY
        attempts, failures = _recent(group)
        count, failures = floor(attempts + ROUNDING), ceil(failures - ROUNDING)
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


@dataclass(frozen=True, slots=True)
class EveryRound(IntakeRule):
    """`groups` new groups in every round, however many wait further on; Pilot-Commit's published schedule, arXiv 2605.26606.

    A round begins when everything handed out is over, also where rollouts could stream. What waits is thrown away when it is
    too old, which bounds what is held.

    Attributes:
        groups: at least 1.
    """

    groups: int

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)

    @property
    def traits(self) -> IntakeTraits:
        return IntakeTraits(looks_ahead=True, until_stale=True)

    def __call__(self, view: View, memory: Memory) -> int:
        # Groups that go on in this round were decided before, and are not handed out yet.
        return 0 if view.in_flight or view.running_S[0] else self.groups

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        over = view.in_flight == 0 and view.running_S[0] == 0
        return {"a round has just `groups` new groups, and begins when the last is over": opened == over * self.groups}


@dataclass(frozen=True, slots=True)
class SubsampledPilots(RowRule):
    """The n pilots whose metrics have the largest variance, and every rollout of later stages, with weight 1.

    Pilot-Commit's `n_effective`, arXiv 2605.26606: all pilots, the first stage's rollouts, say what a prompt's rate is.

    Attributes:
        n: at least 1; all of them where failures left n or fewer.
    """

    n: int

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=("metrics_G",))

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        pilots = int((group.stages_G == 0).sum())  # they come first, in order of id
        if pilots <= self.n:
            return even(np.arange(group.scored))
        kept = max_variance_subset(group.metrics_G[:pilots], self.n)
        return even(np.concatenate([kept, np.arange(pilots, group.scored)]))

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        stages, metrics = group.stages_G.tolist(), group.metrics_G
        kept = [g for g in chosen[0].tolist() if stages[g] == 0]
        left = [g for g in range(group.scored) if stages[g] == 0 and g not in kept]
        later = [g for g in range(group.scored) if stages[g] > 0]
        return {
            "n different pilots, or all": len(set(kept)) == len(kept) == min(self.n, len(kept) + len(left)),
            "all rollouts of later stages, once": [g for g in chosen[0].tolist() if stages[g] > 0] == later,
            "each with weight 1": set(chosen[1].tolist()) <= {1.0},
        } | (MaxVariance(self.n).best(metrics[kept], metrics[left]) if left else {})
