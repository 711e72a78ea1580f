"""`rollalloc report`: the page and the figures of a comparison or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import place
from rollalloc.cli.progress import say

_EXIT_ON_DAMAGE = 1


def page(text: str | Path) -> Path:
    """A page to write, as an option gives it.

    Raises:
        typer.BadParameter: it is empty, or a folder.
    """
    if not str(text).strip() or Path(text).is_dir():
        raise typer.BadParameter(f"expected the name of a page, e.g. report.html, got {text!r}")
    return Path(text)


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, a comparison, or several; finished or not.", parser=place)
    ],
    out: Annotated[Path | None, typer.Option(help="The page; FOLDER/report.html by default.", parser=page)] = None,
) -> None:
    """Write one HTML page that needs nothing else, and its figures as PNG.

    Only pages and figures of earlier reports are overwritten. Where something of a run could not be read the page says so,
    and the exit code is 1.
    """
    from rollalloc.lab.report.page import sections, write_sections
    from rollalloc.runs.discovery import comparisons  # matplotlib takes a second to import, `--help` should not

    console = Console(stderr=True)
    with console.status("drawing"):
        made = sections(comparisons(folder), folder)
        page = write_sections(made, out or folder / "report.html")
    problems = [problem for section in made for problem in section.problems]
    for problem in problems:
        say(console, problem, "yellow")
    say(console, f"the report is {page}")
    if problems:
        raise typer.Exit(_EXIT_ON_DAMAGE)
