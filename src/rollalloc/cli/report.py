"""`rollalloc report`: the page and the figures of a comparison or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def page(text: str | Path) -> Path:
    """A page to write, as an option gives it.

    Raises:
        typer.BadParameter: it is empty, or a folder.
    """
    if not str(text).strip() or Path(text).is_dir():
        raise typer.BadParameter(f"expected the name of a page, e.g. report.html, got {text!r}")
    return Path(text)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, a comparison, or several; finished or not.")],
    out: Annotated[Path | None, typer.Option(help="The page; FOLDER/report.html by default.", parser=page)] = None,
) -> None:
    """Write one HTML page that needs nothing else, and its figures as PNG."""
    from rollalloc.report.page import write_page  # matplotlib takes a second to import, `--help` should not

    console = Console(stderr=True)
    with console.status("drawing"):
        page = write_page(folder, out)
    console.print(f"the report is {page}", markup=False, highlight=False)
