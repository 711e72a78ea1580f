"""`rollalloc report`: the page and the figures of a comparison or a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
    from rollalloc.runs.cost import Cost, Curve
    from rollalloc.runs.recorded import RecordedRun

_EXIT_ON_DAMAGE = 1
_EVERY_S, _TIMES_LONGER = 5, 10  # seconds between two pages, and how much longer that is than making one
_ALL = "all"
_NO_BASELINE = "no log ROW-grpo... has the same row in its name and the same validation keys"


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
        typer.Option(
            help="For a folder with logs of verl's `file` logger: their validation keys, comma-separated, whose mean is the "
            "accuracy; all: every val-core/.../mean@N of a log."
        ),
    ] = None,
    target: Annotated[float | None, typer.Option(help="With --verl: target accuracy, in (0, 1].")] = None,
    peak: Annotated[
        float | None,
        typer.Option(help="Instead of --target: share, e.g. 0.99, of the best accuracy of each run's baseline."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="With --verl: name of the run that all are compared with (default: for each run the one of plain GRPO, "
            "ROW-grpo..., with the same row in its name and the same validation keys)."
        ),
    ] = None,
) -> None:
    """Write one HTML page that needs nothing else, and its figures as PNG and CSV.

    Several folders are shown on one page. Only pages and figures of earlier reports are overwritten. If part of a run cannot
    be read, the page says so and the exit code is 1. With --verl: print the rollouts, tokens and seconds of each verl run
    until a target accuracy.
    """
    if any(option is not None for option in (verl, target, peak, baseline)):
        if len(folders) > 1 or follow:
            raise ValueError("--verl prints a table of one folder; give one folder, without --follow")
        _costs_of_verl(folders[0], verl, target, peak, baseline)
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
    from rollalloc.report.page import Page, sections, write_sections
    from rollalloc.runs.discovery import comparisons  # imported here, because importing matplotlib takes a second

    with console.status("drawing"):
        made = sections(comparisons(*folders), folders[0])
        write_sections(made, page, Page(folders))
    return [problem for section in made for problem in section.problems]


def _follow(console: Console, folders: Sequence[Path], page: Path) -> list[str]:
    """Write the page again and again until every run has ended, or until Ctrl-C, and then once with its figures."""
    from rollalloc.report.page import Page, sections, write_sections
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


def _costs_of_verl(folder: Path, verl: str | None, target: float | None, peak: float | None, named: str | None) -> None:
    """Print a table of the costs of the verl runs in a folder.

    Raises:
        ValueError: options contradict each other or are out of range; the folder has no verl log with the named metrics; or
            with `peak`, no run has a baseline.
    """
    from rollalloc.files.text import visible
    from rollalloc.runs.baselines import BENCHMARKS, Arm, baselines_of
    from rollalloc.runs.cost import cost_to_target
    from rollalloc.runs.verl_run import costs_known

    keys = _keys(verl, target, peak)
    runs, left_out = _verl_runs(folder, keys)
    curves = [costs_known(run) for run in runs]
    names = [visible(run.label) for run in runs]
    tables: dict[tuple[int | None, float], dict[str, Cost]] = {}
    for at, baseline in enumerate(baselines_of([Arm(run.label, run.description[BENCHMARKS]) for run in runs], named)):
        if target is None and baseline is None:
            left_out.append(f"{names[at]} is left out, because {_NO_BASELINE}")
            continue
        aim = target or _share(peak, names[baseline or 0], curves[baseline or 0])
        cost = cost_to_target(curves[at], aim)
        assert cost is not None, "a curve is empty"
        tables.setdefault((baseline, aim), {})[names[at]] = cost
    if not tables:
        raise ValueError(f"--peak: {left_out[-1]}; add its log, name a run with --baseline, or give --target instead")
    for (baseline, aim), costs in tables.items():
        _show_costs(costs, None if baseline is None else names[baseline], aim)
    console = Console(stderr=True)
    for line in left_out:
        say(console, line, "yellow")
    for name, run in zip(names, runs, strict=True):
        say(console, f"{name}: {run.note}")
        if run.problem:
            say(console, f"{run.folder.parent}: {run.problem}", "yellow")
    if any(run.problem for run in runs):
        raise typer.Exit(_EXIT_ON_DAMAGE)


def _keys(verl: str | None, target: float | None, peak: float | None) -> list[str]:
    """The validation keys that are named; empty: all of each log."""
    keys = [name.strip() for name in (verl or "").split(",") if name.strip()]
    if not keys:
        raise ValueError(
            "--target, --peak and --baseline apply only to runs of verl; also give --verl all, or name a validation metric, "
            "for example --verl val-core/…/acc/mean@1"
        )
    if (target is None) == (peak is None):
        raise ValueError("--verl needs a target: give either --target ACCURACY or --peak SHARE")
    for option, value in (("--target", target), ("--peak", peak)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{option}: expected a number in (0, 1], got {value:g}")
    return [] if keys == [_ALL] else keys


def _verl_runs(folder: Path, keys: Sequence[str]) -> tuple[list[RecordedRun], list[str]]:
    """The runs that were validated on the keys, and for each other log why it is left out.

    Raises:
        ValueError: there is no log, or none with the keys.
    """
    from rollalloc.files.text import visible
    from rollalloc.runs.verl_run import is_log, read_verl_run

    runs: list[RecordedRun] = []
    left_out: list[str] = []
    for path in (path for path in sorted(folder.glob("*.jsonl")) if is_log(path)):
        try:
            runs.append(read_verl_run(path, keys, validated=True))
        except ValueError as error:
            left_out.append(f"left out: {visible(str(error))}")
    if left_out and not runs:
        raise ValueError(left_out[0].removeprefix("left out: "))
    if not runs:
        raise ValueError(f"{folder}: no log of verl's `file` logger, STEM.jsonl with step and data in each line")
    return runs, left_out


def _share(peak: float | None, baseline: str, curve: Curve) -> float:
    """This share of the best accuracy of a baseline.

    Raises:
        ValueError: the best accuracy is not above 0.
    """
    best = max(curve.accuracy)
    if best <= 0:
        raise ValueError(f"--peak: the best accuracy of {baseline} is not above 0; give --target instead")
    return (peak or 1.0) * best


def _show_costs(costs: Mapping[str, Cost], baseline: str | None, target: float) -> None:
    """Print a table of the runs that are compared with the same baseline, which is one of them."""
    names = ("rollouts", "tokens", "seconds")
    shown = table((f"to {target:.4g}", *(cell for name in names for cell in (name, "× less"))))
    shown.columns[0].no_wrap, shown.columns[0].overflow = False, "fold"  # file names may be long
    base = None if baseline is None else costs[baseline]
    for run, cost in costs.items():
        cells = [Text(run)]
        for name in names:
            ratio = nan if base is None or not cost.paid[name] else base.paid[name] / cost.paid[name]
            unknown = cost.censored or (base is not None and base.censored) or isnan(ratio)
            cells += [Text(_amount(cost.paid[name], cost.censored)), Text("" if unknown else f"{ratio:.2f}")]
        shown.add_row(*cells)
    console = Console()
    console.print(shown)
    less = (
        f"Nothing is compared, because {_NO_BASELINE}."
        if baseline is None
        else f"× less: the cost of {baseline} divided by this run's."
    )
    reached = "The target is reached at the first of two successive validations at or above the target."
    console.print(Text(f"{less} {reached} Seconds are without validation and checkpoints."))


def _amount(value: float, censored: bool) -> str:
    return "not logged" if isnan(value) else f"{'> ' if censored else ''}{value:,.0f}"
