"""`rollalloc watch`: follow a run or a comparison in the terminal while it trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from errno import ENOENT
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollalloc.cli.options import folder_of_runs

if TYPE_CHECKING:
    from rollalloc.runs.recorded import RecordedRun

_LOOK_S = 1.0
_LINE_EVERY_S = 60.0  # between two lines when there is no terminal


def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or of a comparison.", parser=folder_of_runs)],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the folder exists.")] = False,
) -> None:
    """Show progress, accuracy, waste and prompts of a run while it trains; ends with the run, or with Ctrl-C.

    Without a terminal, it prints one line a minute, and the whole view at the end.
    """
    from rollalloc.cli.progress import Lines
    from rollalloc.files.text import visible
    from rollalloc.lab.report.terminal import view
    from rollalloc.runs.discovery import comparisons, is_over
    from rollalloc.runs.reader import Reader

    if not wait and not folder.exists():
        raise FileNotFoundError(
            ENOENT, "there is no such folder; check the name, or wait until it exists (--wait)", str(folder)
        )
    reader, console = Reader(), Console()
    lines = None if console.is_terminal else Lines(console)
    waiting = Text(visible(f"waiting for a run in {folder}; stop with Ctrl-C"), style="dim")
    with Live(waiting if lines is None else None, console=console, auto_refresh=False) as live:
        try:
            while True:
                try:
                    runs = [run for found in comparisons(folder, reader).values() for run in found]
                except FileNotFoundError:
                    runs = []
                if lines is not None:
                    lines.say(_line(runs) if runs else waiting.plain, every_s=_LINE_EVERY_S)
                if runs or lines is None:
                    live.update(view(runs) if runs else waiting, refresh=True)
                if runs and is_over(folder, runs):
                    return
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            return


def _line(runs: Sequence[RecordedRun]) -> str:
    """One line with the progress of the runs, and what could not be read."""
    from rollalloc.lab.report.wording import damage

    ended = sum(run.why is not None for run in runs)
    units = dict.fromkeys(run.unit for run in runs)
    paid = ", ".join(
        f"{sum(run.paid for run in runs if run.unit == unit):,} {unit.removesuffix(' paid')}" for unit in units
    )
    known = [run.curve.accuracy[-1] for run in runs if run.curve.accuracy]
    accuracy = f" · accuracy {sum(known) / len(known):.3f}" if known else ""
    unread = f" · {'; '.join(problems)}" if (problems := damage(runs)) else ""
    return f"{ended} of {len(runs)} runs ended · {paid}{accuracy}{unread}"
