"""Where the runs of a comparison stand: a live table in a terminal, else a line for each run that ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live

from rollalloc.cli.progress import Lines, TimeLeft
from rollalloc.lab.report.fitting import Fitting
from rollalloc.runs.recorded import share_taught

if TYPE_CHECKING:
    from rollalloc.lab.bench.compare import Standing
    from rollalloc.train.description import Run

_NOW_AND_THEN_S = 60.0  # between two lines on runs that have not ended, where there is no terminal
_PROSE = ("task", "recipe", "wasted on")
_OPTIONAL = ("wasted on", "taught", "left, at most")  # columns that a narrow terminal does without


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
            self._live.update(table(self._rows(standings)))
        if self._lines is not None:
            self._say(self._lines, standings)

    def _rows(self, standings: Sequence[tuple[Run, Standing]]) -> list[dict[str, str]]:
        rows: dict[tuple[str, str], list[Standing]] = {}
        for run, standing in standings:
            rows.setdefault((run.task, run.name), []).append(standing)
        return [self._row(task, label, of_row) for (task, label), of_row in rows.items()]

    def _row(self, task: str, label: str, standings: Sequence[Standing]) -> dict[str, str]:
        known = [standing.accuracy for standing in standings if standing.accuracy is not None]
        grouped = any(standing.grouped for standing in standings)
        taught, waste = uses([standing.accounts for standing in standings], grouped=grouped)
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


def table(rows: Sequence[Mapping[str, str]]) -> Fitting:
    """Rows of tasks and recipes, as far as the terminal has room.

    Args:
        rows: each with its values by column, "task" and "recipe" among them.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    title = tasks[0] if len(tasks) == 1 else ""
    if len(tasks) < 2:
        rows = [{heading: value for heading, value in row.items() if heading != "task"} for row in rows]
    return Fitting(rows, prose=_PROSE, optional=_OPTIONAL, title=title)


def uses(accounts: Sequence[Mapping[str, int]], *, grouped: bool = True) -> tuple[str, str]:
    """The share of rollouts that taught, where they are compared within groups, and the two largest causes of waste."""
    total = {cause: sum(one.get(cause, 0) for one in accounts) for cause in {c for one in accounts for c in one}}
    paid = sum(total.values())
    if not paid:
        return "", ""
    waste = sorted(((n, cause) for cause, n in total.items() if n >= paid / 100 and cause != "trained"), reverse=True)
    return share_taught(total, grouped), ", ".join(f"{c.replace('_', ' ')} {n / paid:.0%}" for n, c in waste[:2])
