"""`rollalloc verify-resume`: check that a run that is killed and resumed gives the same result as an unbroken one."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import folder_of_runs
from rollalloc.cli.progress import say


def verify_resume(
    run: Annotated[Path, typer.Argument(help="Folder of a run that `rollalloc train` wrote.", parser=folder_of_runs)],
    batches: Annotated[
        int, typer.Option(help="Batches to train, at least 2; the second training is killed half-way.", min=2)
    ] = 6,
) -> None:
    """Check that resuming is exact: train a few batches without interruption, then killed and resumed. Exit code 1 if
    they differ."""
    from rollalloc.train.run_json import read_config  # torch takes seconds to import, `--help` should not
    from rollalloc.train.verify import first_difference

    console = Console(stderr=True)
    described = read_config(run)
    with TemporaryDirectory(prefix="rollalloc-verify-") as folder, console.status("training it twice"):
        difference = first_difference(described, batches, Path(folder))
    if difference is not None:
        say(console, f"not the same after a resume: {difference}")
        raise typer.Exit(1)
    say(console, f"identical: metrics and final weights of {batches} batches, killed and resumed after {batches // 2}")
