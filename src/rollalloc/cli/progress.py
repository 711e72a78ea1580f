"""What a command shows while it works: a bar in a terminal; of a run, else a line now and then."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer
from rich.console import Console
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

from rollalloc.files.text import visible

if TYPE_CHECKING:
    from rollalloc.runs.recorded import RecordedRun

_WIDE = 110  # columns that a bar beside the figures needs
_EVERY_S = 1.0  # between two lines, where there is no terminal
_STAGE_S, _PATIENCE_S = 15.0, 3.0  # the same of what is made beforehand, and before the first


class TimeLeft:
    """How long until something is done, at the pace since it was first looked at."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None  # when, and the share that was done then

    def __call__(self, share: float) -> str:
        """In minutes and seconds, for the share that is done; empty where it is not known yet, or done."""
        now = time.monotonic()
        since, before = self._began = self._began or (now, share)
        if share <= before or share >= 1:
            return ""
        minutes, seconds = divmod(round((1 - share) / (share - before) * (now - since)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Lines:
    """Text where there is no terminal, as it comes. A reader that is gone ends nothing."""

    def __init__(self, console: Console) -> None:
        self._console, self._last, self._gone = console, float("-inf"), False

    def say(self, text: str, *, every_s: float = 0.0) -> None:
        """Write a line, unless the one before is younger than that."""
        now = time.monotonic()
        if self._gone or now - self._last < every_s:
            return
        self._last = now
        try:
            self._console.print(visible(text), markup=False, emoji=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit):  # rich leaves where a pipe is broken
            self._gone = True


class RunProgress:
    """Rollouts paid of those allowed, with the latest figures and the time left.

    Args:
        console: where to.
        max_rollouts: that the run may pay; None: no limit, so that no end is known.
    """

    def __init__(self, console: Console, max_rollouts: int | None) -> None:
        self._max = max_rollouts
        self._figures: dict[str, str] = {}
        self._left = TimeLeft()
        self._lines = None if console.is_terminal else Lines(console)
        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
        if console.width >= _WIDE:
            columns = [BarColumn(), *columns, TimeElapsedColumn()]
        elif max_rollouts is not None:
            columns = [TaskProgressColumn(), *columns]
        self._bar = Progress(*columns, console=console, disable=self._lines is not None)
        self._task = self._bar.add_task("starting", total=max_rollouts)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._bar.stop()

    def show(self, line: dict[str, Any]) -> None:
        """Take a line of the metrics."""
        if line["kind"] == "eval" and line["accuracy"] is not None:
            self._figures["accuracy"] = f"held-out {line['accuracy']:.3f}"
        if line["kind"] == "batch" and line["reward_mean"] is not None:
            self._figures["reward"] = f"reward {line['reward_mean']:.3f}"
        paid, trained = line["rollouts_paid"], line["accounts"]["trained"]
        figures = [f"{paid:,} rollouts", f"{trained:,} trained on", *self._figures.values()]
        if self._max is not None and (left := self._left(paid / self._max)):
            figures.append(f"{left} left")
        said = " · ".join(figures)
        if self._lines is None:
            self._bar.update(self._task, completed=paid, description=said)
        elif line["kind"] != "end":
            self._lines.say(said, every_s=_EVERY_S)


def paid_for(run: RecordedRun) -> Table:
    """Where a run's rollouts went."""
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
def staged() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage of some work, on stderr, which vanish when all is done: (what, how much is done, of how much).

    Where there is no terminal it is a line now and then, with the time left.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lined(Lines(console))
        return
    columns = (TextColumn("{task.description:>10}"), BarColumn(20), TextColumn("{task.completed:,}/{task.total:,}"))
    times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True) as progress:
        bars: dict[str, Any] = {}

        def shown(what: str, done: int, of: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=of)
            progress.update(bars[what], completed=done, total=of)

        yield shown


def _lined(lines: Lines) -> Callable[[str, int, int], None]:
    left: dict[str, TimeLeft] = {}
    began = time.monotonic()

    def shown(what: str, done: int, of: int) -> None:
        time_left = left.setdefault(what, TimeLeft())(done / max(of, 1))
        if time.monotonic() - began > _PATIENCE_S:  # what is quick says nothing
            lines.say(f"{what}: {done:,} of {of:,}" + (f" · {time_left} left" if time_left else ""), every_s=_STAGE_S)

    return shown


def leave(console: Console, message: str, by: signal.Signals) -> NoReturn:
    """Say why, and end as a process that the signal ended.

    Raises:
        typer.Exit: always.
    """
    Lines(console).say(message)
    raise typer.Exit(128 + by)
