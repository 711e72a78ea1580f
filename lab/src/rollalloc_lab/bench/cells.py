"""Results of a leaderboard, computed from its plan and the `run.json` and `metrics.jsonl` of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollalloc.compare.summary import EndedRun, Interval, RecipeSummary, ended, summaries_to
from rollalloc.train.config import read_config
from rollalloc_lab.bench.leaderboard import diverged_in
from rollalloc_lab.bench.plan import BASELINE, Contestant, Plan, TaskPlan, frozen_in, place_of


@dataclass(frozen=True, slots=True)
class Cell:
    """A method on a task.

    Attributes:
        label: label of the method.
        paid: costs and last evaluations of the method, with ratios to the baseline. None: no run has ended yet.
        runs: number of finished runs.
        diverged: number of runs that diverged. Such a run is censored at the cost that it had paid until then.
    """

    label: str
    paid: RecipeSummary | None
    runs: int
    diverged: int

    @property
    def budget(self) -> Mapping[str, Interval | None]:
        """Results at the end of the budget, from the last evaluations; empty if no run has ended, or if one diverged."""
        return {} if self.paid is None or self.diverged else self.paid.last


@dataclass(frozen=True, slots=True)
class TaskPart:
    """The results on a task; cells are in the plan's order."""

    task: TaskPlan
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A leaderboard: its plan, the date on which it was frozen, and a part for each task."""

    plan: Plan
    date: str
    parts: tuple[TaskPart, ...]

    @property
    def missing(self) -> int:
        """Number of runs that have not ended yet."""
        return sum(len(self.plan.seeds_of(part.task)) - cell.runs for part in self.parts for cell in part.cells)


def board_of(folder: Path) -> Board:
    """Results of the leaderboard in a folder. It need not be finished.

    Raises:
        FileNotFoundError: there is no leaderboard.
        ValueError: the plan is damaged, or a run in the folder does not belong to the plan.
    """
    plan, date = frozen_in(folder)
    diverged = diverged_in(folder)
    return Board(plan, date, tuple(_part(plan, task, folder, diverged) for task in plan.tasks))


def _part(plan: Plan, task: TaskPlan, folder: Path, diverged: Mapping[str, str]) -> TaskPart:
    over: dict[str, list[EndedRun]] = {}
    lost: dict[str, int] = {}
    for contestant in plan.contestants:
        for seed in plan.seeds_of(task):
            place = place_of(task, contestant.label, seed)
            has_diverged = place in diverged
            if ended_run := _ended(folder / place, task, contestant, seed, has_diverged):
                over.setdefault(contestant.label, []).append(ended_run)
                lost[contestant.label] = lost.get(contestant.label, 0) + has_diverged
    ended_runs = [ended_run for of_label in over.values() for ended_run in of_label]
    summaries = {summary.label: summary for summary in summaries_to(BASELINE, ended_runs)} if BASELINE in over else {}
    cells = (
        Cell(
            label=contestant.label,
            paid=summaries.get(contestant.label),
            runs=len(over.get(contestant.label, ())),
            diverged=lost.get(contestant.label, 0),
        )
        for contestant in plan.contestants
    )
    return TaskPart(task, tuple(cells))


def _ended(place: Path, task: TaskPlan, contestant: Contestant, seed: int, diverged: bool) -> EndedRun | None:
    """A run if it has ended, otherwise None.

    Raises:
        ValueError: the folder has another run.
    """
    if not (place / "run.json").exists():
        return None
    run = read_config(place)
    described = (run.task, run.recipe, run.name, run.seed, run.max_rollouts, run.eval_every)
    if described != (task.name, contestant.recipe, contestant.label, seed, task.budget, task.eval_every):
        raise ValueError(f"{place} has another run than the plan: {described}")
    return ended(run, place, target=task.target, diverged=diverged)
