"""`rollalloc report`: the page and the figures of a comparison or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, a comparison, or several; finished or not.")],
    out: Annotated[Path | None, typer.Option(help="The page; FOLDER/report.html by default.")] = None,
) -> None:
    """Write one HTML page that needs nothing else, and its figures as PNG."""
    from rollalloc.report.page import write_page  # matplotlib takes a second to import, `--help` should not

    console = Console(stderr=True)
    with console.status("drawing"):
        page = write_page(folder, out)
    console.print(f"the report is {page}", markup=False, highlight=False)
