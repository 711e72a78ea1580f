"""How good verdicts are on tasks that they were not learned from: predicted against measured savings, a task left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rollalloc.lab.advise.choices import CHOICES, METHODS
from rollalloc.lab.advise.evidence import BASELINE, Evidence, Task
from rollalloc.lab.advise.outcomes import fit
from rollalloc.lab.advise.ranking import SIGNALS, Ranked, rank

RIVALS = ("grpo_n4", "grpo_n16", "reinforce", "raft", "foresight")  # that a recommendation is held against
_GRADED = {"raft": "graded"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A saving over GRPO n = 4, as it was; `bound`: ">" where GRPO did not reach the target, "<" where this did not."""

    saving: float
    bound: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What would have been said of a task, and what it then paid.

    Attributes:
        task: its name.
        first: the method that is ranked first without it.
        best: the one of `RIVALS` that paid least.
        over_best: rollouts to target of the first over those of the best; 1 where it is the best.
        at_least: the first did not reach the target: it paid more than that.
        ranked: as the verdict would have it, over GRPO n = 4.
        measured: method → saving over GRPO n = 4; where both did not reach the target it is left out.
    """

    task: str
    first: str
    best: str
    over_best: float
    at_least: bool
    ranked: Mapping[str, Ranked]
    measured: Mapping[str, Measured]

    @property
    def covered(self) -> tuple[int, int, int]:
        """Savings within their interval, beyond it, and bounds that cannot tell."""
        within = beyond = open_ = 0
        for method, found in self.measured.items():
            low, high = self.ranked[method].interval
            above, below = found.saving > high, found.saving < low
            if not found.bound:
                within, beyond = within + (not above and not below), beyond + (above or below)
            elif (found.bound == ">" and above) or (found.bound == "<" and below):
                beyond += 1
            else:
                open_ += 1
        return within, beyond, open_


def left_out(evidence: Evidence, signals: tuple[str, ...] = SIGNALS, *, families: bool = False) -> list[LeftOut]:
    """What the rest of the evidence says of each task, the worst recommendations first.

    Args:
        evidence: of which every task has runs of all `RIVALS` or of some.
        signals: that the model has slopes for.
        families: leave all tasks of its family out with a task.
    """
    found: list[LeftOut] = []
    for task in evidence.tasks:
        gone = [other.name for other in evidence.tasks if other is task or (families and other.family == task.family)]
        outcomes = fit(evidence.without(*gone), METHODS, signals)
        ruled_out = _GRADED if task.signals["graded"] else {}
        ranked = {row.choice.name: row for row in rank(outcomes, task.signals, CHOICES[BASELINE], ruled_out)}
        found.append(_held(task, ranked))
    return sorted(found, key=lambda one: -one.over_best)


def _held(task: Task, ranked: Mapping[str, Ranked]) -> LeftOut:
    costs = {method: cost for method in METHODS if (cost := task.cost(method)) is not None}
    best = min(
        (method for method in RIVALS if method in costs), key=lambda method: (costs[method][1], costs[method][0])
    )
    first = next(name for name in ranked if name in costs)
    baseline, of_baseline = costs[BASELINE]
    measured = {
        method: Measured(baseline / cost, ">" if of_baseline else "<" if censored else "")
        for method, (cost, censored) in costs.items()
        if method != BASELINE and not (of_baseline and censored)
    }
    over_best = costs[first][0] / costs[best][0]
    return LeftOut(task.name, first, best, max(1.0, over_best), costs[first][1], ranked, measured)


@dataclass(frozen=True, slots=True)
class Bars:
    """How the recommendations did together; shares in [0, 1]."""

    near: float
    far: float
    worst: float
    covered: float
    counted: int
    open: int


def bars(found: list[LeftOut]) -> Bars:
    """The share of tasks within 1.15 × of the best, that of tasks beyond 1.5 ×, and how many intervals held the measured."""
    over = np.array([one.over_best for one in found])
    reached = np.array([not one.at_least or one.first == one.best for one in found])
    within, beyond, open_ = np.array([one.covered for one in found]).sum(0).tolist()
    return Bars(
        near=float(((over <= 1.15) & reached).mean()),
        far=float(((over > 1.5) | ~reached).mean()),
        worst=float(over.max()),
        covered=within / max(1, within + beyond),
        counted=within + beyond,
        open=open_,
    )
