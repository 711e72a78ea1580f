"""Where the runs of a comparison stand: a live table in a terminal, else a line for each run that ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rollalloc.cli.progress import Lines, TimeLeft

if TYPE_CHECKING:
    from rollalloc.bench.compare import Standing
    from rollalloc.bench.runs import Run

_NOW_AND_THEN_S = 60.0  # between two lines on runs that have not ended, where there is no terminal
_OPTIONAL = (
    "wasted on",
    "taught",
    "left, at most",
)  # columns that are left out where the terminal is narrow, in this order

Row = dict[str, str]


class Standings:
    """Shows where runs stand, a row for each task and recipe.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._lines = None if console.is_terminal else Lines(console)
        self._live = Live(console=console, refresh_per_second=2) if self._lines is None else None
        self._left: dict[tuple[str, str], TimeLeft] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # the terminal may be gone
                self._live.stop()

    def show(self, standings: Sequence[tuple[Run, Standing]]) -> None:
        """Take where each run stands."""
        if self._live is not None:
            self._live.update(Rows(self._rows(standings)))
        if self._lines is not None:
            self._say(self._lines, standings)

    def _rows(self, standings: Sequence[tuple[Run, Standing]]) -> list[Row]:
        rows: dict[tuple[str, str], list[Standing]] = {}
        for run, standing in standings:
            rows.setdefault((run.task, run.name), []).append(standing)
        return [self._row(task, label, of_row) for (task, label), of_row in rows.items()]

    def _row(self, task: str, label: str, standings: Sequence[Standing]) -> Row:
        known = [standing.accuracy for standing in standings if standing.accuracy is not None]
        taught, waste = uses([standing.accounts for standing in standings])
        return {
            "task": task,
            "recipe": label,
            "done": f"{sum(standing.ended for standing in standings)}/{len(standings)}",
            "accuracy": f"{fmean(known):.3f}" if known else "",
            "rollouts": f"{sum(standing.rollouts for standing in standings):,}",
            "left, at most": self._time_left((task, label), [standing.share for standing in standings]),
            "taught": taught,
            "wasted on": waste,
        }

    def _time_left(self, row: tuple[str, str], shares: Sequence[float | None]) -> str:
        """Time until the budgets of a row's runs are spent, at its pace so far."""
        known = [share for share in shares if share is not None]
        if len(known) < len(shares):
            return "no budget"
        share = fmean(known)
        left = self._left.setdefault(row, TimeLeft())(share) if share else ""
        return left or ("" if share == 1 else "–")

    def _say(self, lines: Lines, standings: Sequence[tuple[Run, Standing]]) -> None:
        """A line for each run that has ended since the last call, and now and then one on all."""
        ended = {f"{run.name} with seed {run.settings.seed} {run.task}": one for run, one in standings if one.ended}
        for name, one in ended.items():
            if name not in self._ended:
                accuracy = "" if one.accuracy is None else f", accuracy {one.accuracy:.3f}"
                lines.say(f"{name}: ended after {one.rollouts:,} rollouts{accuracy} · {len(ended)} of {len(standings)}")
        self._ended.update(ended)
        paid = sum(one.rollouts for _, one in standings)
        lines.say(f"{len(ended)} of {len(standings)} runs ended · {paid:,} rollouts", every_s=_NOW_AND_THEN_S)


class Rows:
    """A table of rows with as many of its columns as the terminal has room for.

    Args:
        rows: each with its values by column, "task" and "recipe" among them.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        tasks = {row["task"] for row in rows}
        self._left_out = () if len(tasks) > 1 else ("task",)
        self._title = next(iter(tasks)) if len(tasks) == 1 else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tables = [self._table((*self._left_out, *_OPTIONAL[:count])) for count in range(len(_OPTIONAL) + 1)]
        unbounded = options.update(width=1000)
        fitting = (each for each in tables if Measurement.get(console, unbounded, each).maximum <= options.max_width)
        yield next(fitting, tables[-1])

    def _table(self, left_out: Collection[str]) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=Text(self._title) or None)
        table.title_justify = "left"
        headings = [name for name in (self.rows[0] if self.rows else ()) if name not in left_out]
        for heading in headings:
            prose = heading in ("task", "recipe", "wasted on")
            table.add_column(heading, justify="left" if prose else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(row[heading]) for heading in headings))
        return table


def uses(accounts: Sequence[Mapping[str, int]]) -> tuple[str, str]:
    """The share of rollouts that taught, and the two largest causes of waste."""
    total = {cause: sum(one.get(cause, 0) for one in accounts) for cause in {c for one in accounts for c in one}}
    paid = sum(total.values())
    if not paid:
        return "", ""
    waste = sorted(((n, cause) for cause, n in total.items() if n >= paid / 100 and cause != "trained"), reverse=True)
    return f"{total['trained'] / paid:.0%}", ", ".join(f"{c.replace('_', ' ')} {n / paid:.0%}" for n, c in waste[:2])
