"""One method's search on one task: which settings are tried now, and which one was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollalloc.lab.bench.pool import Job
from rollalloc.lab.bench.sweep import Rung, Score, Trial, better, score
from rollalloc.runs.cost import cost_to_target

Over = Callable[[Job], bool]
TrialOf = Callable[[Job], Trial | None]  # of a run that is over; None: it diverged


@dataclass
class Search:
    """Successive halving, a rung at a time, over runs that others carry out.

    Attributes:
        rungs: of the search.
        budget: rollouts of the task's final runs.
        target: accuracy to reach.
        job: (rung, setting, seed) → its run.
        scores: of each rung that is over, by the setting's number.
    """

    rungs: Sequence[Rung]
    budget: int
    target: float
    job: Callable[[int, int, int], Job]
    scores: list[dict[int, Score]] = field(default_factory=list[dict[int, Score]])

    @property
    def found(self) -> int | None:
        """The number of the setting that came out of it; None: it is not over."""
        return better(self.scores[-1], 1)[0] if len(self.scores) == len(self.rungs) else None

    def advance(self, over: Over, trial: TrialOf) -> list[Job]:
        """Score the rungs of which all runs are over; returns the runs of the next that are not, none at the end."""
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
        """What the setting that was found paid for the target on each seed of the last rung; its budget where it did not."""
        at, budget = len(self.rungs) - 1, self.rungs[-1].budget(self.budget)
        assert self.found is not None
        trials = [trial(self.job(at, self.found, seed)) for seed in self.rungs[-1].seeds]
        costs = [None if each is None else cost_to_target(each.curve, self.target) for each in trials]
        return [budget if cost is None or cost.censored else round(cost.paid["rollouts"]) for cost in costs]

    def _alive(self) -> Sequence[int]:
        rung = self.rungs[len(self.scores)]
        return better(self.scores[-1], rung.settings) if self.scores else range(rung.settings)

    def _jobs(self, setting: int) -> list[Job]:
        at = len(self.scores)
        return [self.job(at, setting, seed) for seed in self.rungs[at].seeds]
