"""`rollalloc watch`: a run, or a comparison, in the terminal while it trains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollalloc.cli.options import place, seconds


def watch(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run or of a comparison; it may not be there yet.", parser=place)
    ],
    every: Annotated[float, typer.Option(help="Seconds between two looks, 0.1 to 86400.", parser=seconds)] = 1.0,
) -> None:
    """Show progress, accuracy, waste and prompts while a run trains; leaves when it ends, or with Ctrl-C."""
    from rollalloc.report.found import comparisons, is_over
    from rollalloc.report.terminal import view
    from rollalloc.report.text import visible
    from rollalloc.runs.reader import Reader

    reader, console = Reader(), Console()
    waiting = Text(visible(f"waiting for a run in {folder}; Ctrl-C leaves"), style="dim")
    with Live(waiting, console=console, auto_refresh=False) as live:
        try:
            while True:
                try:
                    runs = [run for found in comparisons(folder, reader).values() for run in found]
                except FileNotFoundError:
                    runs = []
                live.update(view(runs) if runs else waiting, refresh=True)
                if runs and is_over(folder, runs):
                    return
                time.sleep(every)
        except KeyboardInterrupt:
            return
