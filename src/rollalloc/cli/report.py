"""`rollalloc report`: the page and the figures of a comparison or a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from errno import ENOENT
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from rollalloc.cli.options import file_path
from rollalloc.cli.options import folder as folder_path
from rollalloc.cli.progress import say
from rollalloc.cli.reading import table

if TYPE_CHECKING:
    from rollalloc.runs.cost import Cost

_EXIT_ON_DAMAGE = 1
_EVERY_S, _TIMES_LONGER = 5, 10  # seconds between two pages, and how much longer that is than making one


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs or comparisons, finished or not, of rollalloc, TRL or verl.", parser=folder_path
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File of the page (default: report.html in the first folder).", parser=file_path)
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Write the page again while runs go on; an open page reloads itself. End: Ctrl-C."
        ),
    ] = False,
    verl: Annotated[
        str | None,
        typer.Option(help="For a folder with logs of verl's `file` logger: their validation keys, comma-separated."),
    ] = None,
    target: Annotated[float | None, typer.Option(help="With --verl: target accuracy, in (0, 1].")] = None,
    peak: Annotated[
        float | None,
        typer.Option(
            help="Instead of --target: share, e.g. 0.99, of the best accuracy of the first run with grpo in its name."
        ),
    ] = None,
) -> None:
    """Write one HTML page that needs nothing else, and its figures as PNG and CSV.

    Several folders are shown on one page. Only pages and figures of earlier reports are overwritten. If part of a run cannot
    be read, the page says so and the exit code is 1. With --verl: print the rollouts, tokens and seconds of each verl run
    until a target accuracy.
    """
    if verl is not None or target is not None or peak is not None:
        if len(folders) > 1 or follow:
            raise ValueError("--verl prints a table of one folder; give one folder, without --follow")
        _costs_of_verl(folders[0], verl, target, peak)
        return
    for folder in folders:
        if not folder.exists():
            raise FileNotFoundError(ENOENT, "there is no such folder; check the name", str(folder))
    page = out or folders[0] / "report.html"
    console = Console(stderr=True)
    problems = _follow(console, folders, page) if follow else _write(console, folders, page)
    for problem in problems:
        say(console, problem, "yellow")
    say(console, f"the report is {page}")
    if problems:
        raise typer.Exit(_EXIT_ON_DAMAGE)


def _write(console: Console, folders: Sequence[Path], page: Path) -> list[str]:
    """Write the page and its figures once. Return what could not be read."""
    from rollalloc.lab.report.page import Page, sections, write_sections
    from rollalloc.runs.discovery import comparisons  # imported here, because importing matplotlib takes a second

    with console.status("drawing"):
        made = sections(comparisons(*folders), folders[0])
        write_sections(made, page, Page(folders))
    return [problem for section in made for problem in section.problems]


def _follow(console: Console, folders: Sequence[Path], page: Path) -> list[str]:
    """Write the page again and again until every run has ended, or until Ctrl-C, and then once with its figures."""
    from rollalloc.lab.report.page import Page, sections, write_sections
    from rollalloc.runs.discovery import comparisons

    wait_s = _EVERY_S
    with suppress(KeyboardInterrupt):
        while True:
            began = time.monotonic()
            made = sections(comparisons(*folders), folders[0])
            if all(run.why is not None for section in made for run in section.runs):
                break
            write_sections(made, page, Page(folders, follow_s=wait_s), figures_too=False)
            if wait_s == _EVERY_S:
                say(console, f"open {page}; it reloads itself. Ctrl-C ends this")
            # A long log takes long to read: at most a tenth of the time is spent on it.
            wait_s = max(_EVERY_S + 1, round(_TIMES_LONGER * (time.monotonic() - began)))
            time.sleep(wait_s)
    return _write(console, folders, page)


def _costs_of_verl(folder: Path, verl: str | None, target: float | None, peak: float | None) -> None:
    """Print a table of the costs of the verl runs in a folder.

    Raises:
        ValueError: options contradict each other or are out of range, or the folder has no verl log with the named
            metrics.
    """
    from rollalloc.files.text import visible
    from rollalloc.runs.cost import cost_to_target
    from rollalloc.runs.verl_run import costs_known, is_log, read_verl_run

    metrics = [name.strip() for name in (verl or "").split(",") if name.strip()]
    if not metrics:
        raise ValueError(
            "--target and --peak apply only to runs of verl; also name a validation metric, for "
            "example --verl val-core/…/acc/mean@1"
        )
    if (target is None) == (peak is None):
        raise ValueError("--verl needs a target: give either --target ACCURACY or --peak SHARE")
    for option, value in (("--target", target), ("--peak", peak)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{option}: expected a number in (0, 1], got {value:g}")
    runs = [read_verl_run(path, metrics) for path in sorted(folder.glob("*.jsonl")) if is_log(path)]
    if not runs:
        raise ValueError(f"{folder}: no log of verl's `file` logger, STEM.jsonl with step and data in each line")
    curves = [costs_known(run) for run in runs]
    baseline = next((at for at, run in enumerate(runs) if "grpo" in run.label.lower()), 0)
    aim = target or (peak or 1.0) * max(curves[baseline].accuracy)
    if aim <= 0:
        raise ValueError(
            f"--peak: the best accuracy of {visible(runs[baseline].label)} is not above 0; give --target instead"
        )
    costs = [cost for curve in curves if (cost := cost_to_target(curve, aim)) is not None]  # no curve is empty
    names = [visible(run.label) for run in runs]
    _show_costs(names, costs, baseline, aim)
    for name, run in zip(names, runs, strict=True):
        say(Console(stderr=True), f"{name}: {run.note}")
        if run.problem:
            say(Console(stderr=True), f"{run.folder.parent}: {run.problem}", "yellow")
    if any(run.problem for run in runs):
        raise typer.Exit(_EXIT_ON_DAMAGE)


def _show_costs(runs: Sequence[str], costs: Sequence[Cost], baseline: int, target: float) -> None:
    names = ("rollouts", "tokens", "seconds")
    shown = table((f"to {target:.4g}", *(cell for name in names for cell in (name, "× less"))))
    shown.columns[0].no_wrap, shown.columns[0].overflow = False, "fold"  # file names may be long
    base = costs[baseline]
    for run, cost in zip(runs, costs, strict=True):
        cells = [Text(run)]
        for name in names:
            ratio = base.paid[name] / cost.paid[name] if cost.paid[name] else nan
            cells += [
                Text(_amount(cost.paid[name], cost.censored)),
                Text("" if cost.censored or base.censored or isnan(ratio) else f"{ratio:.2f}"),
            ]
        shown.add_row(*cells)
    console = Console()
    console.print(shown)
    console.print(
        Text(
            f"× less: the cost of {runs[baseline]} divided by this run's. The target is reached at the first of two "
            "successive validations at or above the target. Seconds are without validation and checkpoints."
        )
    )


def _amount(value: float, censored: bool) -> str:
    return "not logged" if isnan(value) else f"{'> ' if censored else ''}{value:,.0f}"
