"""`rollalloc-lab bench`: compare methods on tasks, and write a leaderboard."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import folder, place
from rollalloc.cli.progress import Bar, leave, say

if TYPE_CHECKING:
    from rollalloc_lab.bench.leaderboard import Progress
    from rollalloc_lab.bench.plan import Plan

_LINE_EVERY_S = 60.0  # seconds between two lines of progress, if there is no terminal
_EXIT_UNFINISHED = 1
_TIER, _TASKS = "ci", Path("runs/tasks")


def bench(
    tier: Annotated[str, typer.Option(help="Size: smoke, ci (minutes), full (hours) or ladder (a day).")] = _TIER,
    tasks: Annotated[str, typer.Option(help="Comma-separated tasks of the tier (default: all of them).")] = "",
    recipes: Annotated[
        str, typer.Option(help="Comma-separated built-in recipes; must include grpo (default: the tier's).")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Folder of the leaderboard; its finished runs are reused.", parser=folder)
    ] = Path("runs/bench"),
    task_folder: Annotated[
        Path, typer.Option(help="Folder where built-in tasks are created and kept.", parser=folder)
    ] = _TASKS,
    processes: Annotated[int | None, typer.Option(help="Parallel runs (default: one per core).", min=1)] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only print what would run and how long it takes.")] = False,
    table: Annotated[
        Path | None,
        typer.Option(help="Folder of an existing leaderboard: run nothing, and write its tables again.", parser=place),
    ] = None,
) -> None:
    """Run every method with its defaults on every task, and write tables of the costs."""
    # Imported here, so that `--help` does not import torch.
    from rollalloc_lab.bench.plan import make_plan, refuse_another

    console = Console(stderr=True)
    if table is not None:
        _written(console, table)
        return
    made = make_plan(tier, tasks=_names("--tasks", tasks), recipes=_names("--recipes", recipes))
    cores = processes or os.cpu_count() or 1
    refuse_another(made, out)
    say(console, described(made, cores))
    if not plan:
        _run(console, made, out, task_folder, cores)


def _run(console: Console, plan: Plan, out: Path, task_folder: Path, cores: int) -> None:
    from rollalloc.compare.pool import RunsFailed
    from rollalloc.processes.stopping import Stopped
    from rollalloc_lab.bench.leaderboard import run_leaderboard

    try:
        with BenchProgress(console) as shown:
            run_leaderboard(plan, out, task_folder, processes=cores, watcher=shown.show)
    except Stopped as stopped:
        _written(console, out)
        leave(console, str(stopped), stopped.by)
    except KeyboardInterrupt:
        leave(console, "stopped; run the same command again to continue from the newest checkpoint of each run", SIGINT)
    except RunsFailed:  # show the finished runs before the error
        _written(console, out)
        raise
    if _written(console, out):
        raise typer.Exit(_EXIT_UNFINISHED)


def _written(console: Console, out: Path) -> int:
    """Write the tables. Return the number of missing runs."""
    from rollalloc_lab.bench.plan import TABLE
    from rollalloc_lab.bench.tables import write_leaderboard

    board = write_leaderboard(out)
    missing = f", {board.missing} runs are missing" if board.missing else ""
    say(console, f"the leaderboard is {out / TABLE}{missing}")
    return board.missing


def described(plan: Plan, cores: int) -> str:
    """Describe the runs of a plan and the time that they would take."""
    from rollalloc_lab.bench.tiers import RATES

    what = f"{len(plan.contestants)} methods × {len(plan.tasks)} tasks"
    lines = [
        f"tier {plan.tier}: {what}, {plan.runs:,} runs, at most {plan.rollouts:,} rollouts",
        f"methods: {', '.join(each.label for each in plan.contestants)}",
        f"seeds: {', '.join(map(str, max((plan.seeds_of(task) for task in plan.tasks), key=len)))}",
    ]
    for task in plan.tasks:
        hours = _hours(plan.seconds_of(task) / 3600)
        known = f", about {hours} of a core" if task.name in RATES else " (speed not measured)"
        seeds = "" if task.seeds is None else f" × {task.seeds} seeds"
        lines.append(f"{task.name}: to {task.target:g}, {task.budget:,} rollouts per run{seeds}{known}")
    hours = _hours(plan.seconds / cores / 3600)
    lines.append(f"about {hours} on {cores} idle cores, one run per core; creating the tasks takes extra time")
    return "\n".join(lines)


def _hours(hours: float) -> str:
    minutes = round(60 * hours)
    return f"{hours:.1f} hours" if hours >= 1 else f"{minutes} minute{'s' * (minutes != 1)}"


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if text and not names:  # an empty list would mean all names
        raise ValueError(f"{option}: expected names between commas, got {text!r}; leave it out for all")
    return names


class BenchProgress(Bar):
    """Shows the progress of a leaderboard."""

    optional = ("at work", "time", "rollouts")

    def __init__(self, console: Console) -> None:
        super().__init__(console, "preparing", _LINE_EVERY_S)

    def show(self, progress: Progress) -> None:
        """Show the newest progress."""
        self.update(figures_of(progress, self.time_left(progress.share)), progress.share)


def figures_of(progress: Progress, left: str) -> dict[str, str]:
    """The finished runs, the rollouts and process time so far, the time left, and the runs in progress."""
    return {
        "over": f"{progress.over:,} of {progress.runs:,} runs",
        "rollouts": f"{progress.rollouts:,} rollouts",
        "time": f"{_hours(progress.seconds / 3600)} of process time",
        "left": left and f"{left} left",
        "at work": ", ".join(f"{run.task} {run.name} {run.seed}" for run, _ in progress.at_work),
    }
