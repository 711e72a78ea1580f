"""`rollalloc train`: one run, with progress."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollalloc.cli.options import Given, parameters_of, with_given

_EXIT_ON_SIGTERM = 128 + 15  # as of a process that it ended


@with_given
def train(
    given: Given,
    recipe: Annotated[
        str, typer.Option(help="One that `rollalloc recipes` lists, several joined by +, or module:object.")
    ] = "pilot_commit",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of the recipe, key=value; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, sampling and mini-batches.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", rich_help_panel="Output")] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            help="Batches between two checkpoints; by default one at the end and on SIGTERM.", rich_help_panel="Output"
        ),
    ] = None,
    keep_checkpoints: Annotated[int, typer.Option(help="Newest checkpoints to keep.", rich_help_panel="Output")] = 2,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint in the run's folder; without one the run starts afresh.",
            rich_help_panel="Output",
        ),
    ] = False,
    accept_recipe: Annotated[
        bool,
        typer.Option(
            "--accept-recipe",
            help="Resume although the recipe, or its --max-rollouts, is another than the checkpoint's.",
            rich_help_panel="Output",
        ),
    ] = False,
    accept_data: Annotated[
        bool,
        typer.Option(
            "--accept-data",
            help="Resume although the prompts are others than the checkpoint's; they are found again by key.",
            rich_help_panel="Output",
        ),
    ] = False,
    log_rollouts: Annotated[
        bool,
        typer.Option(
            "--log-rollouts",
            help="Write each rollout's text and score to rollouts.jsonl.",
            rich_help_panel="Output",
        ),
    ] = False,
) -> None:
    """Train one model under one recipe."""
    from rollalloc.bench.runs import execute, one_thread  # torch takes seconds to import, `--help` should not
    from rollalloc.cli.sources import run_of
    from rollalloc.engines.stopping import Stopped

    console = Console(stderr=True)
    with console.status("preparing"):
        run = run_of(given, recipe, parameters_of(set_), seed)
    saving = {"checkpoint_every": checkpoint_every, "keep_checkpoints": keep_checkpoints, "log_rollouts": log_rollouts}
    run = replace(run, settings=replace(run.settings, **saving))
    if given.task:
        one_thread()
    folder = out or Path("runs") / f"{(given.task or 'train').replace('/', '-')}-{run.name.replace(':', '.')}-{seed}"
    _say_where_it_starts(console, folder, resume)
    console.print(f"{run.recipe} {dict(run.parameters)}, learning rate {run.settings.learning_rate:g}", markup=False)
    if run.max_rollouts is None and run.settings.target is None:
        console.print(
            "no --max-rollouts and no --target: the run goes on until nothing is left to learn", style="yellow"
        )
    if run.source.heldout is None:
        console.print("no --heldout prompts: the accuracy will not be known", style="yellow")
    try:
        with _Board(console, run.max_rollouts) as board:
            why = execute(run, folder, board.show, resume=resume, accept_recipe=accept_recipe, accept_data=accept_data)
    except Stopped as stopped:
        console.print(f"{stopped} (--resume)", highlight=False, markup=False)
        raise typer.Exit(_EXIT_ON_SIGTERM) from None
    console.print(why, highlight=False, markup=False)
    console.print(board.summary())
    console.print(f"model and metrics are in {folder}", markup=False)


def _say_where_it_starts(console: Console, folder: Path, resume: bool) -> None:
    """Say from which checkpoint a run goes on.

    Raises:
        ValueError: the run is not to be resumed, but the folder holds checkpoints of one that has not ended.
    """
    from rollalloc.bench.compare import latest
    from rollalloc.engines.checkpoint import newest

    at = newest(folder)
    if resume and at is None:
        console.print(f"no checkpoint in {folder}: the run starts afresh", style="yellow", markup=False)
    elif resume:
        console.print(f"resuming; the newest checkpoint is that after batch {at}", highlight=False)
    elif at is not None and (last := latest(folder)) is not None and last["kind"] != "end":
        raise ValueError(
            f"{folder} holds a run that has not ended, with a checkpoint after batch {at}; go on with --resume, give "
            "another --out, or remove the folder"
        )


class _Board:
    """A progress bar over rollouts paid, with the latest figures."""

    def __init__(self, console: Console, max_rollouts: int | None) -> None:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._bar = self._progress.add_task("starting", total=max_rollouts)
        self._figures: dict[str, str] = {}
        self._last: dict[str, Any] = {}

    def __enter__(self) -> _Board:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, line: dict[str, Any]) -> None:
        """Take a line of the metrics."""
        self._last = line
        if line["kind"] == "eval" and line["accuracy"] is not None:
            self._figures["accuracy"] = f"held-out {line['accuracy']:.3f}"
        if line["kind"] == "batch" and line["reward_mean"] is not None:
            self._figures["reward"] = f"reward {line['reward_mean']:.3f}"
        paid, taught = line["rollouts_paid"], line["accounts"]["trained"]
        figures = " · ".join([f"{paid:,} rollouts", f"{taught:,} taught", *self._figures.values()])
        self._progress.update(self._bar, completed=paid, description=figures)

    def summary(self) -> Table:
        """Where the rollouts went."""
        table = Table()
        table.add_column("rollouts paid")
        table.add_column("", justify="right")
        table.add_column("share", justify="right")
        paid = max(1, self._last["rollouts_paid"])
        for cause, count in self._last["accounts"].items():
            if count:
                table.add_row(cause.replace("_", " "), f"{count:,}", f"{count / paid:.0%}")
        table.add_row("all", f"{self._last['rollouts_paid']:,}", "", style="bold")
        for reason, count in self._last["unscored"].items():
            table.add_row(escape(f"unscored: {reason}"), f"{count:,}", f"{count / paid:.0%}", style="yellow")
        return table
