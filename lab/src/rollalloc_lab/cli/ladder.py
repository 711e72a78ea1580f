"""`rollalloc-lab ladder`: write the prompts of the ladder as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import folder
from rollalloc.cli.progress import say


def ladder(
    out: Annotated[Path, typer.Option(help="Folder for train.parquet and heldout.parquet.", parser=folder)] = Path(
        "data/ladder"
    ),
) -> None:
    """Write the prompts of the ladder benchmark: six families of generated questions, for models of any size."""
    from rollalloc_lab.tasks.ladder import FAMILIES, Mixture, questions

    made, mixture = questions(out), Mixture()
    say(
        Console(stderr=True),
        f"{mixture.train:,} training and {mixture.heldout:,} held-out prompts of {', '.join(FAMILIES)} are in {made}",
    )
