"""Reads a run's `run.json` and `metrics.jsonl`: completely, only the newest line, or repeatedly while they are written.

Terminal, page, board and comparison all use this reader, so that they show the same. Every line is checked. A reader that
follows a run reads only what was appended, and keeps only as many lines as the views can show.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os import SEEK_END
from pathlib import Path
from typing import Any

from rollalloc.files.names import DESCRIPTION, METRICS
from rollalloc.runs.fields import MetricsLine, description, metrics_line
from rollalloc.runs.files import LONGEST, Growing, open_regular, stamp_of, why
from rollalloc.runs.recorded import Line, RecordedRun
from rollalloc.runs.trl_log import read_trl, state_in
from rollalloc.runs.verl_run import read_verl_run

_MOST = 1024  # lines to keep of each kind; at twice as many, pairs of neighbours are joined
_AT_LEAST = 1 << 20  # bytes of metrics that may always be read for each run
_KINDS = ("batch", "eval", "end", "failed", "resume")  # all other kinds of lines are kept together
_LONGEST_DESCRIPTION = 8 << 20  # bytes
_TAIL = 1 << 18  # bytes at the end of the metrics in which `newest_line` searches
_LATEST = 253_402_300_799  # seconds since the epoch: the end of the year 9999


class Reader:
    """Reads runs repeatedly. Each call reads only what was appended to the run's files since the last.

    Attributes:
        allowance: bytes of metrics that may still be read, so that a large run does not delay the others. At least 1 MiB of
            each run is read in any case, and later calls read the rest. None: no limit.
    """

    def __init__(self, allowance: int | None = None) -> None:
        self.allowance = allowance
        self._known: dict[Path, _Followed] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes of metrics that were read so far, of all runs."""
        return sum(followed.metrics.file.bytes_read for followed in self._known.values())

    def __call__(self, folder: Path) -> RecordedRun:
        """Read the run in a folder. Errors are not raised; the run's `problem` describes them."""
        followed = self._known.setdefault(folder, _Followed(folder))
        before = followed.metrics.file.bytes_read
        try:
            return followed.look(None if self.allowance is None else max(_AT_LEAST, self.allowance))
        except Exception as error:  # a damaged run must not prevent that others are shown
            return RecordedRun(folder, problem=f"{type(error).__name__}: {error}")
        finally:
            if self.allowance is not None:
                self.allowance = max(0, self.allowance - followed.metrics.file.bytes_read + before)

    def keep(self, folders: Iterable[Path]) -> None:
        """Forget all runs but those in these folders."""
        kept = set(folders)
        self._known = {folder: followed for folder, followed in self._known.items() if folder in kept}


def read_run(folder: Path) -> RecordedRun:
    """Read the run in a folder once. Errors are not raised; the run's `problem` describes them."""
    return Reader()(folder)


def lines_in(path: Path) -> Iterator[Line]:
    """Yield every line of a `metrics.jsonl` with all its fields, after checking it.

    An incomplete last line, which a killed run leaves, is left out.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it is not a regular file, or cannot be read.
        ValueError: a line is damaged; names it.
    """
    file, checked = Growing(path), _Checked()
    for number, line in file.look():
        if line is None or line.strip():
            try:
                parsed = checked.take(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} {error}; the file is damaged") from None
            if parsed.wrong:
                raise ValueError(f"{path}:{number} {parsed.wrong}; the file is damaged")
            yield parsed.whole
    if file.rest.strip():
        with suppress(ValueError):  # incomplete
            yield checked.take(file.rest).whole


def read_metrics(path: Path) -> list[Line]:
    """The lines of a `metrics.jsonl` as a list; see `lines_in`."""
    return list(lines_in(path))


def newest_line(folder: Path, kind: str = "") -> Line | None:
    """The newest line of a run's metrics; None if there is none in the last 256 KiB of the file.

    Args:
        folder: folder of the run.
        kind: kind of the line; "": any kind.

    Raises:
        OSError: the metrics are not a regular file, or cannot be read.
    """
    try:
        with open_regular(folder / METRICS) as file:
            file.seek(max(0, file.seek(0, SEEK_END) - _TAIL))
            complete, _, _ = file.readall().rpartition(b"\n")
    except FileNotFoundError:
        return None
    for line in reversed(complete.split(b"\n")):
        with suppress(ValueError):  # the first line may be cut off, others may be damaged
            parsed = metrics_line(line).whole
            if kind in ("", parsed["kind"]):
                return parsed
    return None


class _Followed:
    """The state of reading one run's folder repeatedly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = Metrics(folder / METRICS)
        self._stamps: tuple[tuple[int, ...], ...] | None = None
        self._run = RecordedRun(folder)

    def look(self, limit: int | None) -> RecordedRun:
        if self.folder.is_file():
            if (stamps := (stamp_of(self.folder),)) != self._stamps:
                self._run, self._stamps = _bounded(read_verl_run(self.folder)), stamps
            return self._run
        if not os.path.lexists(self.folder / DESCRIPTION) and (state := state_in(self.folder)) is not None:
            if (stamps := (stamp_of(state),)) != self._stamps:
                self._run, self._stamps = _bounded(read_trl(self.folder)), stamps
            return self._run
        stamps = tuple(stamp_of(self.folder / name) for name in (DESCRIPTION, METRICS))
        if stamps == self._stamps and not self._run.unread:
            return self._run
        self.metrics.look(limit)
        described, problem = _description(self.folder / DESCRIPTION)
        problems = "; ".join(filter(None, (problem, self.metrics.problem)))
        self._run = RecordedRun(
            self.folder,
            described,
            self.metrics.lines(),
            problems or None,
            changed=min(max(0, *(stamp[-1] for stamp in stamps)) / 1e9, _LATEST),
            unread=self.metrics.file.unread,
        )
        self._stamps = stamps
        return self._run


def _description(path: Path) -> tuple[Mapping[str, Any], str | None]:
    """The content of a `run.json`, empty if it cannot be read; and what is wrong with it, or None."""
    try:
        with open_regular(path) as file:
            content = file.read(_LONGEST_DESCRIPTION + 1)
        if len(content) > _LONGEST_DESCRIPTION:
            raise ValueError(f"it is longer than {_LONGEST_DESCRIPTION:,} bytes")
        described, wrong = description(content)
    except OSError as error:
        return {}, f"run.json: {why(error)}"
    except ValueError as error:
        return {}, f"run.json: {error}"
    return described, wrong and f"run.json: {wrong}"


class Metrics:
    """The lines of a `metrics.jsonl` that were read so far, thinned to a bounded number.

    Attributes:
        file: the file, which may still be growing.
    """

    def __init__(self, path: Path) -> None:
        self.file = Growing(path)
        self._begin()

    def _begin(self) -> None:
        self.file.begin()
        self._kept = {kind: _Thinned() for kind in (*_KINDS, "")}
        self._checked = _Checked()
        self._first_wrong = self._refused = ""
        self._left_out = 0

    @property
    def problem(self) -> str | None:
        """The first error, with its line, and the number of lines that were left out; None without errors."""
        if self._refused:
            return f"metrics.jsonl: {self._refused}"
        if not self._first_wrong and self.file.too_long:
            return f"metrics.jsonl:{self.file.number + 1} {_TOO_LONG}"
        left_out = f"; {self._left_out:,} line{'s' * (self._left_out > 1)} left out" if self._left_out else ""
        return f"metrics.jsonl:{self._first_wrong}{left_out}" if self._first_wrong else None

    def look(self, limit: int | None = None) -> None:
        """Read what was appended, but at most `limit` bytes."""
        self._refused = ""
        try:
            if not self.file.goes_on():
                self._begin()
            for number, line in self.file.look(limit):
                self._take(number, line)
        except FileNotFoundError:
            self._begin()  # the run has not written it yet
        except OSError as error:
            self._begin()
            self._refused = why(error)

    def _take(self, number: int, line: bytes | None) -> None:
        if line is not None and not line.strip():
            return
        try:
            parsed = self._checked.take(line)
        except ValueError as error:
            self._left_out += 1
            self._first_wrong = self._first_wrong or f"{number} {error}"
            return
        if parsed.wrong:
            self._first_wrong = self._first_wrong or f"{number} {parsed.wrong}"
        kind = parsed.known["kind"]
        self._kept[kind if kind in _KINDS else ""].add(number, parsed.known)

    def lines(self) -> list[Line]:
        """The lines that are kept, in the order of the file. A last line without a line break counts if it is complete."""
        kept = sorted(
            (entry for thinned in self._kept.values() for entry in thinned.entries), key=lambda entry: entry[0]
        )
        lines = [line for _, line in kept]
        if self.file.rest.strip() and not self.file.unread:
            with suppress(ValueError):  # still being written, or corrupt
                lines.append(self._checked.read(self.file.rest).known)
        return lines


_TOO_LONG = f"is longer than {LONGEST:,} bytes"


class _Checked:
    """Checks lines in order, each by itself and against the lines before it."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}  # last value of each counter that must increase

    def take(self, line: bytes | None) -> MetricsLine:
        """Check the next line. Raises what `read` raises."""
        parsed = self.read(line)
        self._newest.update(parsed.rising)
        return parsed

    def read(self, line: bytes | None) -> MetricsLine:
        """Check a line as if it were the next, but do not advance.

        Raises:
            ValueError: the line is damaged, too long, or repeats an earlier batch or evaluation.
        """
        if line is None:
            raise ValueError(_TOO_LONG)
        parsed = metrics_line(line)
        for name, value in parsed.rising.items():
            if (before := self._newest.get(name)) is not None and value <= before:
                wrote = "two runs, or one twice, wrote here"
                raise ValueError(f"comes again or too late, {name} {value:,} after {before:,}: {wrote}")
        return parsed


@dataclass
class _Thinned:
    """The lines of one kind, thinned for long runs, in which an entry stands for several successive lines.

    An entry has the values of its last line, which for running totals is right. Rows by age are not totals, so they are
    summed over the lines. The first entry is always a single line.
    """

    entries: list[tuple[int, Line]] = field(default_factory=list[tuple[int, Line]])  # number in the file, line
    _each: int = 1  # number of lines that an entry stands for
    _in_last: int = 1  # number of lines that the last entry stands for so far

    def add(self, number: int, line: Line) -> None:
        """Add the next line."""
        if len(self.entries) < 2 or self._in_last == self._each:
            self.entries.append((number, line))
            self._in_last = 1
        else:
            self.entries[-1] = _joined(self.entries[-1], (number, line))
            self._in_last += 1
        if len(self.entries) > 2 * _MOST:
            first, *rest = self.entries
            pairs = [_joined(*rest[at : at + 2]) if at + 1 < len(rest) else rest[at] for at in range(0, len(rest), 2)]
            self.entries = [first, *pairs]
            self._in_last += self._each if len(rest) % 2 == 0 else 0
            self._each *= 2


def _bounded(run: RecordedRun) -> RecordedRun:
    """The run with no more lines than the views can show."""
    if len(run.metrics) <= 2 * _MOST:
        return run
    kept: dict[str, _Thinned] = {}
    for at, line in enumerate(run.metrics):
        kept.setdefault(line["kind"], _Thinned()).add(at, line)
    entries = sorted((entry for thinned in kept.values() for entry in thinned.entries), key=lambda entry: entry[0])
    return replace(run, metrics=[line for _, line in entries])


def _joined(earlier: tuple[int, Line], later: tuple[int, Line]) -> tuple[int, Line]:
    number, line = later
    if before := earlier[1].get("ages"):
        ages = line.get("ages") or {}
        line = line | {"ages": before | {age: rows + before.get(age, 0) for age, rows in ages.items()}}
    return number, line
