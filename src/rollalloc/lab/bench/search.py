"""Tuning with an equal budget for every recipe: successive halving over the settings of each.

Every recipe gets the same number of settings: learning rates × the first shapes of its `rollalloc.lab.bench.methods.GRID`.
The shape is included because it matters more than most allocators do, so GRPO's must be tuned like the others'. All
settings run on one seed with a small budget, the better half on another seed with a larger budget, and so on (Jamieson and
Talwalkar, AISTATS 2016; the new seed at each rung is ours). Each recipe therefore pays the same:

    Σ over rungs of settings × seeds × budget.

A setting is better if it was censored on fewer seeds; among equals, if it reached the target with fewer rollouts; then, if
its final accuracy is higher. For every recipe alike, the first rungs favour settings that learn fast but end low.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from rollalloc.lab.bench.pool import Job
from rollalloc.lab.bench.presets import Tuned
from rollalloc.runs.cost import Curve, cost_to_target


@dataclass(frozen=True, slots=True)
class Rung:
    """One round of a search.

    Attributes:
        settings: number that enter it.
        seeds: on which each is tried; no comparison uses them.
        share: share of the task's budget that a run may pay, in (0, 1].
    """

    settings: int
    seeds: tuple[int, ...]
    share: float

    def budget(self, rollouts: int) -> int:
        """Rollouts per run, given those of the task's final runs."""
        return round(self.share * rollouts)


class Trial(NamedTuple):
    """A finished run of a search: its curve, and its last accuracy."""

    curve: Curve
    accuracy: float


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """How good a setting is on a rung; less is better.

    Attributes:
        censored: number of seeds on which it did not reach the target.
        rollouts: to the target, mean over seeds; a censored run counts its budget. Infinite if a run diverged.
        error: 1 − final accuracy, mean over seeds.
    """

    censored: int
    rollouts: float
    error: float


def rungs(settings: int, first_seed: int, shares: Sequence[float]) -> tuple[Rung, ...]:
    """A search that halves the settings at each rung, with a new seed for each.

    Args:
        settings: number at the start.
        first_seed: seed of the first rung; later rungs use the following seeds.
        shares: shares of a task's budget, one per rung.
    """
    return tuple(Rung(settings >> at, (first_seed + at,), share) for at, share in enumerate(shares))


def search_rollouts(search: Iterable[Rung], budget: int) -> int:
    """Rollouts that a search may pay per recipe, given the `budget` of the task's final runs."""
    return sum(rung.settings * len(rung.seeds) * rung.budget(budget) for rung in search)


def settings_of(shapes: Sequence[Mapping[str, Any]], rates: Sequence[float], settings: int) -> tuple[Tuned, ...]:
    """The settings over which a recipe is searched: each learning rate with each of the first shapes of its grid.

    Args:
        shapes: the recipe's grid, with at least `settings / len(rates)` shapes.
        rates: learning rates.
        settings: number per recipe, a multiple of the number of learning rates.
    """
    return tuple(Tuned(dict(shape), rate) for rate in rates for shape in shapes[: settings // len(rates)])


def score(trials: Sequence[Trial | None], target: float, budget: int) -> Score:
    """Score of a setting from its runs on the seeds of a rung; None stands for a run that diverged."""
    known = [(trial, cost_to_target(trial.curve, target)) for trial in trials if trial is not None]
    if len(known) < len(trials) or any(cost is None for _, cost in known):
        return Score(len(trials), inf, inf)
    paid = [budget if cost is None or cost.censored else cost.paid["rollouts"] for _, cost in known]
    censored = sum(cost is None or cost.censored for _, cost in known)
    return Score(censored, fmean(paid), 1 - fmean(trial.accuracy for trial, _ in known))


def better(scores: Mapping[int, Score], keep: int) -> tuple[int, ...]:
    """The `keep` best settings, by number, best first; ties go to the one earlier in the grid."""
    return tuple(sorted(scores, key=lambda number: (scores[number], number))[:keep])


Over = Callable[[Job], bool]
TrialOf = Callable[[Job], Trial | None]  # finished run → trial; None: it diverged


@dataclass
class Search:
    """Successive halving, one rung at a time; the caller carries out the runs.

    Attributes:
        rungs: rungs of the search.
        budget: rollouts of the task's final runs.
        target: accuracy to reach.
        job: (rung, setting, seed) → its run.
        scores: scores of each finished rung, by the setting's number.
    """

    rungs: Sequence[Rung]
    budget: int
    target: float
    job: Callable[[int, int, int], Job]
    scores: list[dict[int, Score]] = field(default_factory=list[dict[int, Score]])

    @property
    def found(self) -> int | None:
        """The number of the winning setting; None: the search is not over."""
        return better(self.scores[-1], 1)[0] if len(self.scores) == len(self.rungs) else None

    def advance(self, over: Over, trial: TrialOf) -> list[Job]:
        """Score all finished rungs; returns the unfinished runs of the next rung, empty at the end."""
        while len(self.scores) < len(self.rungs):
            jobs = {setting: self._jobs(setting) for setting in self._alive()}
            if todo := [job for of_one in jobs.values() for job in of_one if not over(job)]:
                return todo
            budget = self.rungs[len(self.scores)].budget(self.budget)
            self.scores.append(
                {
                    setting: score([trial(job) for job in of_one], self.target, budget)
                    for setting, of_one in jobs.items()
                }
            )
        return []

    def costs(self, trial: TrialOf) -> list[int]:
        """Rollouts that the winner paid to the target on each seed of the last rung; its budget if it missed the target."""
        at, budget = len(self.rungs) - 1, self.rungs[-1].budget(self.budget)
        assert self.found is not None
        trials = [trial(self.job(at, self.found, seed)) for seed in self.rungs[-1].seeds]
        costs = [
            None if ended_trial is None else cost_to_target(ended_trial.curve, self.target) for ended_trial in trials
        ]
        return [budget if cost is None or cost.censored else round(cost.paid["rollouts"]) for cost in costs]

    def _alive(self) -> Sequence[int]:
        rung = self.rungs[len(self.scores)]
        return better(self.scores[-1], rung.settings) if self.scores else range(rung.settings)

    def _jobs(self, setting: int) -> list[Job]:
        at = len(self.scores)
        return [self.job(at, setting, seed) for seed in self.rungs[at].seeds]
