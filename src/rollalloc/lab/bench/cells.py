"""Results of a leaderboard, computed from its plan and the `run.json` and `metrics.jsonl` of its runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollalloc.lab.bench.contestants import BASELINE, PLAIN, Contestant
from rollalloc.lab.bench.leaderboard import diverged_in
from rollalloc.lab.bench.plan import Plan, TaskPlan, frozen_in, place_of
from rollalloc.lab.bench.presets import PRESETS
from rollalloc.lab.bench.summary import EndedRun, Interval, RecipeSummary, ended, summaries_to
from rollalloc.runs.cost import COSTS
from rollalloc.train.run_json import read_config


@dataclass(frozen=True, slots=True)
class Cell:
    """A method on a task.

    Attributes:
        label: label of the method.
        paid: what it paid and how good its policy was, with ratios to the baseline; None until its first run has ended.
        plain: the best plain estimator's cost over this method's, paired by seed, by `COSTS`.
        runs: number of finished runs.
        diverged: how many of them diverged; these are censored at what they had paid.
        command: a command that repeats its runs up to the target.
    """

    label: str
    paid: RecipeSummary | None
    plain: Mapping[str, Interval | None]
    runs: int
    diverged: int
    command: str

    @property
    def budget(self) -> Mapping[str, Interval | None]:
        """Results of the last evaluations, at the same budget for all methods; empty if a run diverged."""
        return {} if self.paid is None or self.diverged else self.paid.last


@dataclass(frozen=True, slots=True)
class TaskPart:
    """The results on a task; cells are in the plan's order.

    `plain` is the label of the estimator in `PLAIN` that reached the target with the fewest rollouts; it is missing if
    no such estimator was run, or none reached the target.
    """

    task: TaskPlan
    plain: str | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A leaderboard: its plan, the date on which it was frozen, and a part for each task."""

    plan: Plan
    date: str
    parts: tuple[TaskPart, ...]

    @property
    def missing(self) -> int:
        """Number of runs that have not ended."""
        return sum(len(self.plan.seeds_of(part.task)) - cell.runs for part in self.parts for cell in part.cells)


def board_of(folder: Path) -> Board:
    """Results of the leaderboard in a folder, finished or not.

    Raises:
        FileNotFoundError: there is none.
        ValueError: its plan is damaged, or a run in it does not belong to the plan.
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
    plain = _best_plain(list(summaries.values()))
    to_plain = {summary.label: summary.ratios for summary in summaries_to(plain, ended_runs)} if plain else {}
    cells = (
        Cell(
            label=contestant.label,
            paid=summaries.get(contestant.label),
            plain=to_plain.get(contestant.label, dict.fromkeys(COSTS)),
            runs=len(over.get(contestant.label, ())),
            diverged=lost.get(contestant.label, 0),
            command=_command(plan.seeds_of(task), task, over.get(contestant.label, ())),
        )
        for contestant in plan.contestants
    )
    return TaskPart(task, plain, tuple(cells))


def _ended(place: Path, task: TaskPlan, contestant: Contestant, seed: int, diverged: bool) -> EndedRun | None:
    """A run if it has ended, else None.

    Raises:
        ValueError: the folder holds another run.
    """
    if not (place / "run.json").exists():
        return None
    run = read_config(place)
    described = (run.task, run.recipe, run.name, run.seed, run.max_rollouts, run.eval_every)
    if described != (task.name, contestant.recipe, contestant.label, seed, task.budget, task.eval_every):
        raise ValueError(f"{place} holds another run than the plan expects there; it says {described}")
    return ended(run, place, target=task.target, diverged=diverged)


def _best_plain(summaries: Sequence[RecipeSummary]) -> str | None:
    """The plain estimator that reached the target on most seeds; in a tie, the one with the fewest rollouts."""
    plain = [
        (summary, cost)
        for summary in summaries
        if summary.recipe in PLAIN and summary.reached and (cost := summary.costs["rollouts"])
    ]
    best = min(plain, key=lambda candidate: (-candidate[0].reached, candidate[1].point), default=None)
    return best[0].label if best else None


def _command(seeds: Sequence[int], task: TaskPlan, over: Sequence[EndedRun]) -> str:
    """A command that repeats the runs of a cell on a built-in task, in a folder of its own."""
    if not over or task.name not in PRESETS:
        return ""
    run = over[0].run
    options = {
        "--task": task.name,
        "--recipes": run.recipe if run.name == run.recipe else f"{run.name}={run.recipe}",
        "--seeds": ",".join(map(str, seeds)),
        "--learning-rate": f"{run.learning_rate:g}",
        "--adam-beta2": f"{run.betas[1]:g}",
        "--averaging": str(run.averaging),
        "--max-rollouts": str(task.budget),
        "--eval-every": str(task.eval_every),
        "--target": f"{task.target:g}",
    }
    words = [word for option in options.items() for word in option]
    for name, value in run.parameters.items():
        words += ["--set", f"{run.name}.{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(["rollalloc", "compare", *words])
