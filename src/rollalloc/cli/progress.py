"""Progress of a command: a bar or a live table in a terminal, otherwise a line from time to time."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from rollalloc.cli.began import BEGAN
from rollalloc.files.terminal_table import FittingTable, sparkline
from rollalloc.files.text import visible
from rollalloc.runs.learning_signal import share_taught
from rollalloc.runs.recorded import share_done

if TYPE_CHECKING:
    from rollalloc.runs.recorded import RecordedRun
    from rollalloc.train.config import Config

_FILE_WIDTH = 120  # columns when output goes to a file
_WIDE, _BESIDE = (
    130,
    50,
)  # columns that the bar and the figures need; columns of the bar and of the time that has passed
_SHARE = 5  # columns of the share that is done, which stands in place of the bar
_EVERY_S = 1.0  # seconds between two lines when there is no terminal
_STAGE_S, _PATIENCE_S = 15.0, 3.0  # seconds between two lines of a stage; seconds before the first line
_STANDINGS_S = 60.0  # seconds between two printed summaries of a comparison
_CURVE = 12  # columns of a run's accuracies
_PROSE = ("task", "recipe", "curve", "wasted on")
_OPTIONAL = ("wasted on", "taught", "left, at most", "curve")  # columns that a narrow terminal leaves out


def say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence. Control characters and markup are escaped, because names from files may contain them."""
    console.print(visible(text), style=style or None, markup=False, emoji=False, highlight=False)


def result_console() -> Console:
    """Standard output for a command's result. A file or pipe gets 120 columns, or the number in COLUMNS."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_FILE_WIDTH)


def leave(console: Console, message: str, by: signal.Signals) -> NoReturn:
    """Print why the command stops, and exit with the code of a process that was ended by this signal.

    Raises:
        typer.Exit: always.
    """
    Lines(console).say(message)
    raise typer.Exit(128 + by)


def took() -> str:
    """Say how long the command took by the clock on the wall, its imports included, and on which machine."""
    minutes, seconds = divmod(round(max(0.0, time.time() - BEGAN)), 60)
    return f"this took {minutes} min {seconds} s, with {os.cpu_count()} cores ({platform.machine()})"


class TimeLeft:
    """Estimates the time left from the pace since the first call."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None  # time of the first call, and the share done then

    def __call__(self, share: float) -> str:
        """The time left, in h:mm:ss, if this share is done; empty if the time is unknown, or if everything is done."""
        now = time.monotonic()
        since, before = self._began = self._began or (now, share)
        if share <= before or share >= 1:
            return ""
        minutes, seconds = divmod(round((1 - share) / (share - before) * (now - since)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Lines:
    """Prints lines if there is no terminal. If the reader of a pipe disappears, printing stops and the command continues."""

    def __init__(self, console: Console) -> None:
        self._console, self._last, self._gone = console, float("-inf"), False

    def say(self, text: str, *, every_s: float = 0.0) -> None:
        """Print a line, unless the last one is less than `every_s` seconds old."""
        now = time.monotonic()
        if self._gone or now - self._last < every_s:
            return
        self._last = now
        try:
            self._console.print(visible(text), markup=False, emoji=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit):  # rich exits the process on a broken pipe
            self._gone = True


class Bar:
    """A progress bar.

    Args:
        console: where to draw it.
        text: text beside the bar at the start.
        every_s: seconds between two lines when there is no terminal.
        endless: the end is unknown, so neither share nor time left is shown.
    """

    optional: Sequence[str] = ()  # names of figures that a narrow terminal leaves out; the first is left out first

    def __init__(self, console: Console, text: str, every_s: float, *, endless: bool = False) -> None:
        self.time_left = TimeLeft()
        self._every_s = every_s
        self._lines = None if console.is_terminal else Lines(console)
        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
        if console.width >= _WIDE:
            columns = [BarColumn(), *columns, TimeElapsedColumn()]
        elif not endless:
            columns = [TaskProgressColumn(), *columns]
        self._bar = Progress(*columns, console=console, disable=self._lines is not None)
        self._task = self._bar.add_task(text, total=None if endless else 1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._bar.stop()

    def update(self, figures: Mapping[str, str], share: float, *, is_last: bool = False) -> None:
        """Show figures and the share that is done, in [0, 1]. Without a terminal, the last update prints no line.

        Args:
            figures: texts by name, in the order in which they are shown. A narrow terminal leaves those in `optional` out.
            share: the share that is done.
            is_last: whether this is the last update.
        """
        if self._lines is None:
            width = self._bar.console.width
            text = _fitting(figures, self.optional, width - (_BESIDE if width >= _WIDE else _SHARE))
            self._bar.update(self._task, completed=share, description=text)
        elif not is_last:
            self._lines.say(_fitting(figures), every_s=self._every_s)


def _fitting(figures: Mapping[str, str], optional: Sequence[str] = (), room: float = float("inf")) -> str:
    """The figures in one line. If there is too little room, optional ones are left out, the first one first."""
    texts = [
        " · ".join(text for name, text in figures.items() if text and name not in optional[:count])
        for count in range(len(optional) + 1)
    ]
    return next((text for text in texts if len(text) <= room), texts[-1])


class RunProgress(Bar):
    """Shows the rollouts paid so far, the latest figures and, unless `max_rollouts` is None, the time left."""

    optional = ("trained", "reward")

    def __init__(self, console: Console, max_rollouts: int | None) -> None:
        super().__init__(console, "starting", _EVERY_S, endless=max_rollouts is None)
        self._max = max_rollouts
        self._figures: dict[str, str] = {}

    def show(self, line: dict[str, Any]) -> None:
        """Show a line of the metrics."""
        if line["kind"] == "eval" and line["accuracy"] is not None:
            self._figures["accuracy"] = f"held-out {line['accuracy']:.3f}"
        if line["kind"] == "batch" and line["reward_mean"] is not None:
            self._figures["reward"] = f"reward {line['reward_mean']:.3f}"
        paid = line["rollouts_paid"]
        share = 0.0 if self._max is None else paid / self._max
        figures = {
            "paid": f"{paid:,} rollouts",
            "trained": f"{line['accounts']['trained']:,} trained on",
            **self._figures,
        }
        if self._max is not None and (left := self.time_left(share)):
            figures["left"] = f"{left} left"
        self.update(figures, share, is_last=line["kind"] == "end")


def paid_for(run: RecordedRun) -> Table:
    """Table of a run's rollouts by cause."""
    table = Table()
    table.add_column("rollouts paid")
    table.add_column("", justify="right")
    table.add_column("share", justify="right")
    paid = max(1, run.paid)
    for cause, count in run.accounts.items():
        if count:
            table.add_row(cause.replace("_", " "), f"{count:,}", f"{count / paid:.0%}")
    table.add_row("all", f"{run.paid:,}", "", style="bold")
    for reason, count in run.unscored.items():
        table.add_row(escape(visible(f"unscored: {reason}")), f"{count:,}", f"{count / paid:.0%}", style="yellow")
    return table


@contextmanager
def staged() -> Iterator[Callable[..., None]]:
    """Show a bar on stderr for each stage of a command. Yields a callback.

    The callback has the type `rollalloc.tasks.files.Shown`.

    If a stage trains a model, the bar has a curve of the expected share of right tokens. The bars disappear at the end.
    Without a terminal, a line with the time left is printed from time to time.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _stages_in_lines(Lines(console))
        return
    columns = (TextColumn("{task.description:>10}"), BarColumn(20), TextColumn("{task.completed:,}/{task.total:,}"))
    times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True) as progress:
        bars: dict[str, Any] = {}
        curves: defaultdict[str, list[float]] = defaultdict(list)

        def shown(what: str, done: int, of: int, right: float | None = None, /) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=of)
            curve = ""
            if right is not None:
                curves[what].append(right)
                curve = f" {sparkline(curves[what], _CURVE)} {right:.0%} of tokens right"
            progress.update(bars[what], completed=done, total=of, description=what + curve)

        yield shown


def _stages_in_lines(lines: Lines) -> Callable[..., None]:
    left: dict[str, TimeLeft] = {}
    began = time.monotonic()

    def shown(what: str, done: int, of: int, right: float | None = None, /) -> None:
        time_left = left.setdefault(what, TimeLeft())(done / max(of, 1))
        if time.monotonic() - began > _PATIENCE_S:  # quick stages print nothing
            figure = "" if right is None else f", {right:.0%} of tokens right"
            lines.say(
                f"{what}{figure}: {done:,} of {of:,}" + (f" · {time_left} left" if time_left else ""), every_s=_STAGE_S
            )

    return shown


class Standings:
    """Shows the progress of a comparison, one row for each task and recipe."""

    def __init__(self, console: Console) -> None:
        self._lines = None if console.is_terminal else Lines(console)
        self._live = Live(console=console, refresh_per_second=2) if self._lines is None else None
        self._left: dict[tuple[str, str], TimeLeft] = {}
        self._accuracy: defaultdict[Path, dict[float, float]] = defaultdict(
            dict
        )  # for each run: its accuracy, by the number of rollouts paid so far
        self._ended: set[str] = set()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # the terminal may be gone
                self._live.stop()

    def show(self, standings: Sequence[tuple[Config, RecordedRun]]) -> None:
        """Show the newest state of each run."""
        if self._lines is not None:
            self._say(self._lines, standings)
        if self._live is not None:
            rows: dict[tuple[str, str], list[RecordedRun]] = {}
            for run, recorded in standings:
                rows.setdefault((run.task, run.name), []).append(recorded)
                # Each call reads only the newest evaluation of a run in progress, so earlier evaluations are remembered
                # here.
                self._accuracy[recorded.folder].update(
                    zip(recorded.curve.rollouts, recorded.curve.accuracy, strict=True)
                )
            self._live.update(table([self._row(task, label, runs) for (task, label), runs in rows.items()]))

    def _row(self, task: str, label: str, runs: Sequence[RecordedRun]) -> dict[str, str]:
        known = [run.curve.accuracy[-1] for run in runs if run.curve.accuracy]
        longest = max((self._accuracy[run.folder] for run in runs), key=len)
        taught, waste = uses([run.accounts for run in runs])
        return {
            "task": task,
            "recipe": label,
            "done": f"{sum(run.ended for run in runs)}/{len(runs)}",
            "curve": sparkline([*longest.values()], _CURVE),
            "accuracy": f"{fmean(known):.3f}" if known else "",
            "rollouts": f"{sum(run.paid for run in runs):,}",
            "left, at most": self._time_left((task, label), runs),
            "taught": taught,
            "wasted on": waste,
        }

    def _time_left(self, row: tuple[str, str], runs: Sequence[RecordedRun]) -> str:
        """Estimated time until the runs of a row have spent their budgets."""
        known = [share for run in runs if (share := share_done(run)) is not None]
        if len(known) < len(runs):
            return "no budget"
        share = fmean(known)
        left = self._left.setdefault(row, TimeLeft())(share) if share else ""
        return left or ("" if share == 1 else "–")

    def _say(self, lines: Lines, standings: Sequence[tuple[Config, RecordedRun]]) -> None:
        """Print a line for each run that ended since the last call and, from time to time, one for all runs."""
        ended = {
            " on ".join(filter(None, (f"{run.name} with seed {run.seed}", run.task))): one
            for run, one in standings
            if one.ended
        }
        for name, one in ended.items():
            if name not in self._ended:
                accuracy = f", accuracy {one.curve.accuracy[-1]:.3f}" if one.curve.accuracy else ""
                lines.say(f"{name}: ended after {one.paid:,} rollouts{accuracy} · {len(ended)} of {len(standings)}")
        self._ended.update(ended)
        paid = sum(one.paid for _, one in standings)
        lines.say(f"{len(ended)} of {len(standings)} runs ended · {paid:,} rollouts", every_s=_STANDINGS_S)


def table(rows: Sequence[Mapping[str, str]]) -> FittingTable:
    """A table of tasks and recipes, as wide as the terminal allows. A single task becomes the title instead of a column."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if len(tasks) > 1:
        return FittingTable(rows, prose=_PROSE, optional=_OPTIONAL)
    rows = [{heading: value for heading, value in row.items() if heading != "task"} for row in rows]
    return FittingTable(rows, prose=_PROSE, optional=_OPTIONAL, title="".join(tasks))


def uses(accounts: Sequence[Mapping[str, int]]) -> tuple[str, str]:
    """The share of rollouts that taught something (`share_taught`), and the two largest causes of waste."""
    total = {
        cause: sum(one.get(cause, 0) for one in accounts)
        for cause in {c for one in accounts for c in one}
        if cause != "open"
    }
    paid, taught = sum(total.values()), share_taught(total)
    if taught is None:
        return "", ""
    waste = sorted(((n, cause) for cause, n in total.items() if n >= paid / 100 and cause != "trained"), reverse=True)
    return f"{taught:.0%}", ", ".join(f"{c.replace('_', ' ')} {n / paid:.0%}" for n, c in waste[:2])
