"""Pilot-Commit, arXiv 2605.26606: pilot rollouts estimate each prompt's success rate; useful prompts get more rollouts.

For runs in which many prompts are too easy or too hard. A group whose rewards are all alike gives no learning signal.
The pilots find such prompts with a fraction of a full group's rollouts.

How this differs from the paper and its released code:

- A prompt is evicted as solved only if all its visits together show with a given confidence that it is solved. After some
  epochs, the prompt is tried again. In the paper, one visit decides, and the eviction is permanent.
- No new pilots are generated while enough prompts wait for this batch and the next. The published schedule is
  `pilots="every_round"`.
- If rollouts stream, groups get commits in the order of their age.
- Selection reads the metric and training reads the reward.
- Committed rollouts update a prompt's record too.

PAPERS.md has the full list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, exp, floor, lgamma, log
from statistics import fmean
from typing import Literal

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import NEVER, NEXT_EPOCH, Epochs, aged
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
from rollalloc.recipes.grpo import batches_ahead, grpo
from rollalloc.recipes.shapes import Sizes, groups_of, sized
from rollalloc.rules import advantages, intake, promote, sizes
from rollalloc.rules.judges import TINY
from rollalloc.rules.rows import Chosen, MaxVariance, all_of, even, max_variance_subset

_Promote = Literal["top_variance", "expiring_first", "random", "oldest", "most_recent"]


_PROMOTE: Mapping[str, PromoteRule] = {
    "top_variance": promote.TopVariance(always=True),
    "expiring_first": promote.TopVariance(always=True, expiring_first=True),
    "random": promote.RandomOrder(),
    "oldest": promote.Oldest(),
    "most_recent": promote.MostRecent(),
}


_IN_WAVES = promote.TopVariance()


def shape(rows: int = 64, group_rows: int = 4, n_pilot: int | None = None, n_commit: int | None = None) -> Sizes:
    """A quarter of a group are pilots, as published, but at least two: the mean of one is 0 or 1, never in the window.

    Args:
        rows: rows of a batch, at least 1.
        group_rows: pilots and commits of a group, at least 3.
        n_pilot: number of pilots, if the user set it. The other rollouts of the group are commits.
        n_commit: number of commits, if the user set it. The other rollouts of the group are pilots.

    Raises:
        ValueError: there is no room for two pilots and one commit.
    """
    if n_pilot is None and n_commit is None and group_rows < 3:
        raise ValueError(
            f"pilot_commit: expected at least 3 rollouts in a group, two pilots and one more, got {group_rows}"
        )
    if n_pilot is None:
        n_pilot = max(2, group_rows // 4) if n_commit is None else group_rows - n_commit
    if n_commit is None:
        n_commit = group_rows - n_pilot
    return {"groups": groups_of(rows, group_rows), "n_pilot": n_pilot, "n_commit": n_commit}


@sized(shape)
def pilot_commit(
    groups: int = 16,
    n_pilot: int = 2,
    n_commit: int = 2,
    gen_groups: int | None = None,
    p_lower: float = 0.125,
    p_upper: float = 0.25,
    p_solve: float = 0.9,
    max_staleness: int = 4,
    promote: _Promote | None = None,
    pilots: Literal["as_needed", "every_round"] = "as_needed",
    n_effective: int | None = None,
    effective: Literal["max_variance", "first"] = "max_variance",
    max_candidates: int | None = None,
    reprobe_every: int | None = 4,
    confidence: float | None = 0.95,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Pilot-Commit: pilot rollouts find prompts with reward variance; such prompts get more rollouts. arXiv 2605.26606.

    1. Draw `gen_groups` prompts and generate `n_pilot` rollouts of each.
    2. Judge each prompt by the mean metric of its pilots. A prompt inside the window [p_lower, 1 - p_upper] passes; if
       metrics are graded, this includes prompts whose pilots are all equal, from which little is learned. Other prompts
       are dropped: a solved prompt for `reprobe_every` epochs, any other prompt until the next epoch.
    3. Up to `groups` of the prompts that passed get `n_commit` more rollouts, in the order of `promote`. The others
       wait, until their pilots are older than `max_staleness`.
    4. Train on pilots and commits of a prompt as one GRPO group of n_pilot + n_commit rollouts.

    If `max_staleness` is at least 1, the pilots for the next batch are generated at the same time as the commits for
    this one.

    Args:
        groups: prompts in a batch, at least 1.
        n_pilot: pilot rollouts of each prompt, at least 1. With one pilot and rewards of 0 and 1, no prompt is ever in the
            window.
        n_commit: further rollouts of each prompt that passes, at least 1.
        gen_groups: number of prompts with running pilots at a time, at least 1. None: three times `groups`.
        p_lower: a prompt waits for the next epoch if the mean of its pilots is below p_lower.
        p_upper: a prompt waits for the next epoch if the mean of its pilots is above 1 - p_upper.
        p_solve: success rate from which a prompt is solved. The mean of its pilots must reach this rate, and all its
            rollouts so far must show this rate with `confidence`. If p_solve is above 1, no prompt is solved. Published:
            1.0, with confidence=None and reprobe_every=None.
        max_staleness: maximum age of a rollout that is trained on, in updates of the weights; 0 or more.
        promote: order in which prompts that passed get commits: by the variance of their pilots, the newest first if
            variances are equal ("top_variance", as published); the same, but prompts whose pilots are about to be too old
            go first ("expiring_first"); by the age of their pilots ("oldest" or "most_recent"); or "random". If more
            prompts pass in a round than a batch needs, "oldest" and "expiring_first" train only on the oldest pilots, and
            with "top_variance" and "most_recent" the pilots of other prompts become too old and are lost. None:
            "top_variance", but "oldest" if rollouts stream: the highest variance is known only when all pilots have ended.
        pilots: "as_needed": generate no new pilots while enough prompts have passed for this batch and the next.
            "every_round": generate pilots of gen_groups new prompts in each round, together with the commits, as
            published. A round begins when all rollouts of the last round have ended.
        n_effective: number of pilots of each prompt to train on, in [1, n_pilot]. Advantages are then computed only over
            the trained rows. None: all pilots.
        effective: which n_effective pilots are taken. "max_variance": the subset whose metrics have the largest variance.
            "first": the pilots that were requested first.
        max_candidates: maximum number of prompts that are piloted for one batch. At this limit, the groups that are ready
            are trained on. None: no limit.
        reprobe_every: number of epochs after which a solved prompt is piloted again, at least 1. None: never.
        confidence: confidence of the test that a prompt's success rate is p_solve or more (`surely_at_least`), in (0, 1).
            With p_solve=0.9 and confidence=0.95, a prompt without a failure passes the test when the weights of its
            rollouts sum to 29.
            The weight of a rollout is 1 and halves with every 64 later rollouts of the same prompt. None: the pilots of
            one visit decide. With two pilots, a prompt with a success rate of 0.5 then counts as solved in a quarter of
            its visits.
        deviation: the kind of standard deviation, see `grpo`.

    Raises:
        ValueError: a number is out of its range, or the window is empty.
    """
    at_least("n_pilot", n_pilot, 1, "so that each prompt has an estimate")
    at_least("n_commit", n_commit, 1)
    gen_groups = batches_ahead(groups, gen_groups)
    if promote is not None:
        one_of("promote", promote, tuple(_PROMOTE))
    one_of("pilots", pilots, ("as_needed", "every_round"))
    one_of("effective", effective, ("max_variance", "first"))
    base = grpo(groups, n_pilot, deviation)
    if n_effective is not None:
        at_least("n_effective", n_effective, 1, "so that a group contains pilots")
        if n_effective > n_pilot:
            raise ValueError(f"n_effective must be at most n_pilot={n_pilot}, got {n_effective}")
        kernel = advantages.kernel_of(deviation)
        base = replace(
            base, rows=SubsampledPilots(n_effective, effective == "first"), advantage=advantages.OverChosen(kernel)
        )
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


ROUNDING = 1e-3  # rounding error of counts, which are stored as float16


def surely_at_least(rate: float, attempts: float, failures: float, confidence: float) -> bool:
    """Whether these attempts show, with this confidence, that the success rate is at least `rate`.

        Σ_{k=0}^{f} C(n, k) (1 - rate)^k rate^(n - k) ≤ 1 - confidence      f failures in n attempts

    The sum is the probability of at most f failures if the success rate were exactly `rate`. The inequality holds if and
    only if the exact one-sided lower bound of Clopper and Pearson (1934) is at least `rate`. Without a failure, the
    inequality is rate^n ≤ 1 - confidence: 29 attempts are needed for a rate of 0.9 and a confidence of 0.95.

    Fractional counts, from graded metrics or weighted attempts, are rounded: attempts down and failures up.

    Args:
        rate: above 0. No number of attempts can show a rate of 1 or more.
        attempts: 0 or more.
        failures: in [0, attempts].
        confidence: in (0, 1).
    """
    count, failures = floor(attempts + ROUNDING), ceil(failures - ROUNDING)
    if failures > count * (1 - rate):  # the observed success rate is below `rate`
        return False
    logs = (log(rate), log(1 - rate), lgamma(count + 1))
    tail = sum(
        exp(logs[2] - lgamma(k + 1) - lgamma(count - k + 1) + k * logs[1] + (count - k) * logs[0])
        for k in range(failures + 1)
    )
    return tail <= 1 - confidence + TINY


@dataclass(frozen=True, slots=True)
class Band(JudgeRule):
    """The judge of the pilot stage: a complete group passes if its mean metric lies in a window. arXiv 2605.26606.

    1. If the prompt is solved, drop the group. The prompt is not drawn for `reprobe_every` epochs, or never again.
    2. Otherwise, if mean > 1 - p_upper or mean < p_lower, drop the group. Its prompt may be drawn again in the next
       epoch.
    3. Otherwise the group goes on to the next stage.

    A prompt is solved if the mean of this visit is at least p_solve. With a `confidence`, all its visits together must
    also show that its success rate is at least p_solve (`surely_at_least`). In this test, the weight of an attempt halves
    with every `HALF_LIFE` later attempts, so that failures of the untrained policy lose their influence. Each visit is a
    separate test with this confidence.

    Attributes:
        p_lower: lower end of the window, in [0, 1].
        p_upper: distance of the window's upper end from 1, in [0, 1].
        p_solve: success rate of a solved prompt, above 0. Above 1, no prompt is solved.
        reprobe_every: number of epochs until a solved prompt is tried again, at least 1. None: never.
        confidence: confidence of the test, in (0, 1). None: the mean of this visit alone decides, as published.

    Raises:
        ValueError: a number is out of its range; the window is empty (p_lower > 1 - p_upper); or a confidence is given
            with p_solve = 1, which no number of rollouts can show.
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
                f"p_solve=1 with confidence={self.confidence:g}: no number of rollouts shows that a success rate is 1; use "
                "p_solve=0.9, for example; or confidence=None, which evicts a prompt after one visit without a failure, as "
                "published; or p_solve above 1, which evicts no prompt"
            )

    @property
    def traits(self) -> JudgeTraits:
        recent = self.confidence is not None
        return JudgeTraits(reads=("metrics_G",), reads_rate=True, waits_for_all=True, reads_recent=recent)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        mean = float(group.metrics_G.sum()) / group.scored  # NumPy's `mean` takes twice as long
        if self._solved(group, mean):
            until = NEVER if self.reprobe_every is None else Epochs(self.reprobe_every)
            return Verdict(Act.DROP, "out_of_band/solved", until)
        if mean > 1 - self.p_upper + TINY:
            return Verdict(Act.DROP, "out_of_band/too_easy")
        if mean < self.p_lower - TINY:
            return Verdict(Act.DROP, "out_of_band/too_hard")
        return Verdict(Act.NEXT)

    def doubts(self, rollouts: int | None) -> list[str]:
        upper, doubts = 1 - self.p_upper, list[str]()
        if upper < 0.5:
            doubts.append(
                f"p_upper={self.p_upper:g} is the distance of the window's end from 1: prompts pass whose pilots have a "
                f"mean in [{self.p_lower:g}, {upper:g}]. If {self.p_upper:g} should be the end, set p_upper={upper:g}"
            )
        means = [right / rollouts for right in range(rollouts + 1)] if rollouts else []
        if means and not any(self.p_lower - TINY <= mean <= upper + TINY for mean in means):
            doubts.append(
                f"no mean of {rollouts} metrics of 0 and 1 lies in the window [{self.p_lower:g}, {upper:g}], so no prompt "
                "passes unless metrics are graded: give more pilots (n_pilot) or a wider window (p_lower, p_upper)"
            )
        return doubts

    def _solved(self, group: GroupView, mean: float) -> bool:
        if mean < self.p_solve - TINY or self.confidence is None:
            return mean >= self.p_solve - TINY
        attempts, failures = _recent(group)
        return surely_at_least(self.p_solve, attempts, failures, self.confidence)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        if verdict is None or not group.scored:
            return {
                "the judge decides exactly when all rollouts have ended": (verdict is None) == (group.unfinished > 0)
            }
        mean = fmean(group.metrics_G.tolist())
        inside = self.p_lower - TINY <= mean <= 1 - self.p_upper + TINY
        solved = self._solved_promised(group, mean)
        if solved is None:
            return {"the judge decides exactly when all rollouts have ended": not group.unfinished}
        away = NEXT_EPOCH if not solved else NEVER if self.reprobe_every is None else Epochs(self.reprobe_every)
        return {
            "the judge decides exactly when all rollouts have ended": not group.unfinished,
            "exactly the groups inside the window go on": (verdict.act is not Act.DROP) == (inside and not solved),
            "a solved prompt is evicted for `reprobe_every` epochs, other dropped prompts come back in the next epoch": (
                verdict.act is not Act.DROP or verdict.until == away
            ),
        }

    def _solved_promised(self, group: GroupView, mean: float) -> bool | None:
        """Whether the prompt is solved; None if rounding might matter.

        The density of Beta(s, n - s + 1) is integrated.
        """
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
    """Attempts and failures of a prompt over all its visits, including this one. Older attempts have less weight."""
    record, scored = group.record, group.scored
    attempts = aged(record.recent_attempts, scored) + scored
    return attempts, aged(record.recent_failures, scored) + scored - float(group.metrics_G.sum())


@dataclass(frozen=True, slots=True)
class EveryRound(IntakeRule):
    """Open `groups` new groups in every round: Pilot-Commit's published schedule, arXiv 2605.26606.

    A round begins when all rollouts of the last round have ended, even if the engine could stream rollouts. The number
    of waiting groups is not limited, but groups are dropped when they are too old.

    Attributes:
        groups: new groups in a round, at least 1.
    """

    groups: int

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)

    traits = IntakeTraits(looks_ahead=True, until_stale=True)

    def __call__(self, view: View, memory: Memory) -> int:
        # Groups that are promoted in this round are not in `in_flight` yet, because their rollouts are not requested yet.
        return 0 if view.in_flight or view.running_S[0] else self.groups

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        over = view.in_flight == 0 and view.running_S[0] == 0
        return {
            "a round opens exactly `groups` new groups, and begins when the last round is over": opened
            == over * self.groups
        }


@dataclass(frozen=True, slots=True)
class SubsampledPilots(RowRule):
    """Take n of the pilots, and every rollout of later stages, all with weight 1.

    This is Pilot-Commit's `n_effective`, arXiv 2605.26606. Pilots are the rollouts of the first stage. Pilots that are
    not taken still count in the estimate of the prompt's success rate.

    Attributes:
        n: number of pilots to take, at least 1. If at most n have a score, all are taken.
        first: True: take the pilots that were requested first. False: take the subset with the largest metric variance.
    """

    n: int
    first: bool = False

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)

    traits = RowTraits(reads=("metrics_G",))

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        pilots = int((group.stages_G == 0).sum())  # pilots have the lowest ids, so they come first
        if pilots <= self.n:
            return all_of(group.scored)
        kept = np.arange(self.n) if self.first else max_variance_subset(group.metrics_G[:pilots], self.n)
        return even(np.concatenate([kept, np.arange(pilots, group.scored)]))

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        stages, metrics = group.stages_G.tolist(), group.metrics_G
        kept = [g for g in chosen[0].tolist() if stages[g] == 0]
        left = [g for g in range(group.scored) if stages[g] == 0 and g not in kept]
        later = [g for g in range(group.scored) if stages[g] > 0]
        return {
            "n different pilots, or all if there are fewer": len(set(kept))
            == len(kept)
            == min(self.n, len(kept) + len(left)),
            "all rollouts of later stages, once": [g for g in chosen[0].tolist() if stages[g] > 0] == later,
            "each with weight 1": set(chosen[1].tolist()) <= {1.0},
        } | self._right_ones(kept, left, metrics)

    def _right_ones(self, kept: list[int], left: list[int], metrics_G: np.ndarray) -> dict[str, bool]:
        """Check that the right pilots were taken."""
        if not left:
            return {}
        if self.first:
            return {"the pilots that were ordered first": max(kept) < min(left)}
        return dict(MaxVariance(self.n).compare_with_left_out(metrics_G[kept], metrics_G[left]))
