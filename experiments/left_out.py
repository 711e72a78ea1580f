"""How good verdicts are on tasks that they were not learned from: predicted against measured savings, a task left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rollalloc.lab.advise.choices import CHOICES, METHODS
from rollalloc.lab.advise.evidence import BASELINE, Evidence, Task
from rollalloc.lab.advise.outcomes import Outcomes, fit
from rollalloc.lab.advise.ranking import SIGNALS, Ranked, rank

RIVALS = ("grpo_n4", "grpo_n16", "reinforce", "raft", "foresight")  # that a recommendation is held against
BEGIN, END = "<!-- left out: begin -->", "<!-- left out: end -->"  # of the table in the guide
LEGEND = """\
Each task is predicted by the others, over GRPO n = 4: the saving with its 80% interval, then what was measured.
Bold is outside of the interval; ">": GRPO did not reach the target, "<": the method did not, "–": neither, or not run.
†: fewer than two methods came to the target fixed before, so that half of the largest gain stands for it.
A run that did not get there is taken to have cost up to twice what it paid. Groups of 8 were not run."""
_GRADED = {"raft": "graded"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A saving over GRPO n = 4, as it was; `bound`: ">" where GRPO did not reach the target, "<" where this did not."""

    saving: float
    bound: str = ""

    def is_beyond(self, interval: tuple[float, float]) -> bool:
        """Whether it is outside of an interval; a bound is where all that it leaves open is."""
        low, high = interval
        return (self.bound != "<" and self.saving > high) or (self.bound != ">" and self.saving < low)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What would have been said of a task, and what it then paid.

    Attributes:
        task: its name.
        milestone: costs are to half of the largest gain.
        first: the method that is ranked first without it.
        best: the one of `RIVALS` that paid least.
        over_best: rollouts to target of the first over those of the best; 1 where it is the best.
        at_least: the first did not reach the target: it paid more than that.
        ranked: as the verdict would have it, over GRPO n = 4.
        measured: method → saving over GRPO n = 4; where both did not reach the target it is left out.
        firsts: what is ranked first by each of the task's profiles alone.
    """

    task: str
    milestone: bool
    first: str
    best: str
    over_best: float
    at_least: bool
    ranked: Mapping[str, Ranked]
    measured: Mapping[str, Measured]
    firsts: tuple[str, ...] = ()

    @property
    def changed(self) -> int:
        """Profiles by which another method comes first than by most."""
        return len(self.firsts) - max(map(self.firsts.count, self.firsts), default=0)


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
        found.append(_held(task, fit(evidence.without(*gone), METHODS, signals)))
    return sorted(found, key=lambda one: (-one.over_best, one.task))


def _held(task: Task, outcomes: Outcomes) -> LeftOut:
    costs = {method: cost for method in METHODS if (cost := task.cost(method)) is not None}
    best = min(
        (method for method in RIVALS if method in costs), key=lambda method: (costs[method][1], costs[method][0])
    )
    ranked = _ranked(task.signals, outcomes)
    firsts = [next(name for name in ranks if name in costs) for ranks in (ranked, *_by_profile(task, outcomes))]
    first = firsts.pop(0)
    baseline, of_baseline = costs[BASELINE]
    measured = {
        method: Measured(baseline / cost, ">" if of_baseline else "<" if censored else "")
        for method, (cost, censored) in costs.items()
        if method != BASELINE and not (of_baseline and censored)
    }
    over_best = costs[first][0] / costs[best][0]
    return LeftOut(
        task.name, task.milestone, first, best, max(1.0, over_best), costs[first][1], ranked, measured, tuple(firsts)
    )


def _ranked(signals: Mapping[str, float], outcomes: Outcomes) -> dict[str, Ranked]:
    ruled_out = _GRADED if signals["graded"] else {}
    return {row.choice.name: row for row in rank(outcomes, signals, CHOICES[BASELINE], ruled_out)}


def _by_profile(task: Task, outcomes: Outcomes) -> Iterator[dict[str, Ranked]]:
    return (_ranked(signals, outcomes) for signals in task.profiles)


@dataclass(frozen=True, slots=True)
class Bars:
    """How the recommendations did together.

    Attributes:
        near: share of tasks whose first paid at most 1.15 × what the best did.
        far: share of tasks on which it paid more than 1.5 ×, or did not reach the target and was not the best.
        worst: the largest such ratio.
        covered: share of exact savings within their interval.
        counted: exact savings.
        bounds: savings that are bounds only.
        contradicted: of these, those all of which is outside of the interval.
        steady: share of tasks whose first choice is another by at most one of their profiles.
    """

    near: float
    far: float
    worst: float
    covered: float
    counted: int
    bounds: int
    contradicted: int
    steady: float


def bars(found: list[LeftOut]) -> Bars:
    """How the recommendations did together."""
    over_T = np.array([one.over_best for one in found])
    lost_T = np.array([one.at_least and one.first != one.best for one in found])
    judged = [(saving, one.ranked[method].interval) for one in found for method, saving in one.measured.items()]
    exact = [saving.is_beyond(interval) for saving, interval in judged if not saving.bound]
    bounds = [saving.is_beyond(interval) for saving, interval in judged if saving.bound]
    return Bars(
        near=float(((over_T <= 1.15) & ~lost_T).mean()),
        far=float(((over_T > 1.5) | lost_T).mean()),
        worst=float(over_T.max()),
        covered=1 - sum(exact) / max(1, len(exact)),
        counted=len(exact),
        bounds=len(bounds),
        contradicted=sum(bounds),
        steady=sum(one.changed <= 1 for one in found) / len(found),
    )


def always(evidence: Evidence, method: str) -> str:
    """What the same method on all tasks would be, in a sentence: what a model has to beat."""
    near, count = 0, 0
    for costs in ({rival: cost for rival in RIVALS if (cost := task.cost(rival))} for task in evidence.tasks):
        paid, censored = costs[method]
        least = min(costs.values(), key=lambda cost: (cost[1], cost[0]))[0]
        near, count = near + (not censored and paid <= 1.15 * least), count + 1
    return f"Always {CHOICES[method].words}, without any model, is within 1.15 × of the best on {near / count:.0%}."


def markdown(found: list[LeftOut]) -> str:
    """The table of a guide, a line a task: what is ranked first, and savings over GRPO n = 4, predicted and measured."""
    methods = [method for method in METHODS if method != BASELINE]
    heads = ["left out", "ranked first", "best of five", "first / best", *(CHOICES[method].words for method in methods)]
    lines = [heads, ["---"] * len(heads)]
    for one in found:
        first, best = CHOICES[one.first].words, CHOICES[one.best].words
        over = f"{'>' if one.at_least and one.first != one.best else ''}{one.over_best:.2f}"
        name = f"{one.task}{' †' if one.milestone else ''}"
        lines.append([name, first, best, over, *(_cell(one, method) for method in methods)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(one: LeftOut, method: str) -> str:
    """Predicted with its interval, then measured: in bold where it is beyond the interval."""
    row, found = one.ranked[method], one.measured.get(method)
    low, high = row.interval
    said = f"{row.saving:.2f} [{low:.2f}–{high:.2f}]"
    if found is None:
        return f"{said}; –"
    was = f"{found.bound}{found.saving:.2f}"
    return f"{said}; {f'**{was}**' if found.is_beyond(row.interval) else was}"


def summary(found: list[LeftOut]) -> str:
    """The bars, a sentence a line."""
    of = bars(found)
    return (
        f"Within 1.15 × of the best on {of.near:.0%} of {len(found)} tasks, beyond 1.5 × or not at the target on "
        f"{of.far:.0%}, {of.worst:.2f} × at worst.\n"
        f"{of.covered:.0%} of {of.counted} measured savings are within their 80% interval, and {of.contradicted} of "
        f"{of.bounds} bounds contradict theirs.\n"
        "Another profile of 1,024 rollouts changes the first choice in at most one of five repeats on "
        f"{of.steady:.0%} of the tasks."
    )
