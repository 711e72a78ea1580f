"""Reads a run's `run.json` and `metrics.jsonl`: the whole file, or only the newest lines.

The terminal, the page and the comparison all use this reader, so they show the same values. The fields that they use are
checked here, when a line is read, and nowhere else: a field that is wrong or null is as if it were missing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from os import SEEK_END
from pathlib import Path
from typing import Any

from rollalloc.files.names import DESCRIPTION, METRICS
from rollalloc.files.regular import LONGEST, lines_of, open_regular, why
from rollalloc.files.text import told
from rollalloc.runs.metrics import fields_of
from rollalloc.runs.recorded import Line, RecordedRun
from rollalloc.runs.trl_log import read_trl, state_in
from rollalloc.runs.values import COUNT, NUMBER, TEXT, Field, Fields, check, parsed, parsed_file
from rollalloc.runs.verl_run import read_verl_run

_NEEDED = fields_of("every line", needed=True)
_IN_A_BATCH = fields_of("every line", "batch", "end", "failed")
_IN_AN_EVALUATION = fields_of("every line", "eval")
_USED = {*_NEEDED, *_IN_A_BATCH, *_IN_AN_EVALUATION}  # the fields that the views use
# Fields of an evaluation that are set to None if they are missing.
_CURVE = ("accuracy", "optimizer_steps", "version", "standard_error")
_IN_A_DESCRIPTION: Fields = {
    **dict.fromkeys(("label", "recipe", "task", "model"), TEXT),
    "seed": Field("a whole number", lambda value: type(value) is int and abs(value) <= 2**64),
    "max_rollouts": Field("a whole number from 1", lambda value: COUNT.holds(value) and value > 0),
    "target": NUMBER,
    "prompts": Field("a list of paths", lambda value: isinstance(value, list) and all(map(TEXT.holds, value))),
    "parameters": Field("an object", lambda value: isinstance(value, dict)),
}
MOST_LINES = 1024  # when twice as many lines of a kind have been kept, every second line is dropped
_KINDS = ("batch", "eval", "end", "failed", "resume")  # all other kinds of lines are kept together
_LONGEST_DESCRIPTION = 8 << 20  # bytes
_TAIL = 1 << 18  # bytes at the end of the metrics in which `newest_lines` searches


def read_run(folder: Path) -> RecordedRun:
    """Read the run in a folder, or in a log of verl. Errors are not raised: `problem` of the result describes them."""
    try:
        if folder.is_file():
            run = read_verl_run(folder)
        elif not os.path.lexists(folder / DESCRIPTION) and state_in(folder) is not None:
            run = read_trl(folder)
        else:
            return _read_ours(folder)
        return replace(run, metrics=_thinned(run.metrics))
    except Exception as error:  # a damaged run must not hide the other runs
        return RecordedRun(folder, problem=told(error))


def _read_ours(folder: Path) -> RecordedRun:
    described, problem = _description(folder / DESCRIPTION)
    wrong: list[str] = []
    left_out = 0

    def reject(number: int, why: str, whole_line: bool) -> None:
        nonlocal left_out
        wrong.append(f":{number} {why}")
        left_out += whole_line

    metrics: list[Line] = []
    try:
        usable = _usable(folder / METRICS, reject)
        metrics = _thinned({name: line[name] for name in line if name in _USED} for line in usable)  # to save memory
    except FileNotFoundError:
        pass  # the run has not written the file yet
    except OSError as error:
        wrong = [f": {why(error)}"]
    if wrong:
        more = f"; {left_out:,} line{'s' * (left_out > 1)} left out" if left_out else ""
        problem = "; ".join(filter(None, (problem, f"{METRICS}{wrong[0]}{more}")))
    return RecordedRun(folder, described, metrics, problem)


def lines_in(path: Path) -> Iterator[Line]:
    """Yield every line of a `metrics.jsonl` with all its fields, after checking it.

    A field that the views use is left out if it is null, but not one of an evaluation's curve. An incomplete last line is
    left out: a killed run may leave such a line.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it is not a regular file, or cannot be read.
        ValueError: a line is damaged; the message names it.
    """

    def refuse(number: int, why: str, whole_line: bool) -> None:
        raise ValueError(f"{path}:{number} {why}; the file is damaged")

    return _usable(path, refuse)


def _usable(path: Path, reject: Callable[[int, str, bool], None]) -> Iterator[Line]:
    """Yield the usable lines of a `metrics.jsonl`. Blank lines and an incomplete last line are left out.

    Args:
        path: path of the file.
        reject: called with the number and the problem of each damaged line, and with whether the whole line is left out.

    Raises:
        OSError: the file cannot be opened, see `open_regular`.
    """
    newest: dict[str, int] = {}  # last value of each counter that must increase
    for number, text, complete in lines_of(path):
        if text is not None and not text.strip():
            continue
        try:
            if text is None:
                raise ValueError(f"is longer than {LONGEST:,} bytes")
            line, wrong = _parsed_line(text)
            rises = "at" if line["kind"] == "eval" else "batch"
            value, before = line.get(rises), newest.get(rises)
            if value is not None and before is not None and value <= before:
                wrote = "two runs, or one run twice, wrote this file"
                raise ValueError(f"is repeated or out of order, {rises} {value:,} after {before:,}: {wrote}")
        except ValueError as error:
            if complete or text is None:  # otherwise, it is being written, or the run was killed
                reject(number, str(error), True)
            continue
        if value is not None:
            newest[rises] = value
        if wrong is not None:
            reject(number, wrong, False)
        yield line


def _parsed_line(text: bytes) -> tuple[Line, str | None]:
    """Parse and check a line of the metrics.

    Returns:
        The line, and the problem of the first wrong field, which is left out, or None. In an evaluation, a missing `at` is
        set to `rollouts_paid`, and each missing field in `_CURVE` is set to None.

    Raises:
        ValueError: the line is not JSON, or lacks a field that every line must have.
    """
    try:
        line = parsed(text)
    except ValueError as error:
        raise ValueError(f"is not a line of JSON ({error})") from None
    if line.get("kind") != "eval":
        return line, check(line, _NEEDED, _IN_A_BATCH)
    unsaid = dict.fromkeys(_CURVE) | {"at": None if "at" in line else line.get("rollouts_paid")}
    wrong = check(line, _NEEDED, _IN_AN_EVALUATION)
    return unsaid | line, wrong


def read_metrics(path: Path) -> list[Line]:
    """The lines of a `metrics.jsonl` as a list; see `lines_in`."""
    return list(lines_in(path))


def newest_lines(folder: Path) -> list[Line]:
    """The newest line of each kind in the last 256 KiB of a run's metrics, in the order of the file.

    Raises:
        OSError: the metrics file is not a regular file, or cannot be read.
    """
    newest: dict[str, Line] = {}
    for line in _from_the_end(folder):
        newest.setdefault(line["kind"], line)
    return [*reversed(newest.values())]


def newest_line(folder: Path) -> Line | None:
    """The newest line of a run's metrics; None if there is none in the last 256 KiB of the file.

    Raises:
        OSError: the metrics file is not a regular file, or cannot be read.
    """
    return next(_from_the_end(folder), None)


def _from_the_end(folder: Path) -> Iterator[Line]:
    """Yield the usable lines in the last 256 KiB of a run's metrics, the newest first."""
    try:
        with open_regular(folder / METRICS) as file:
            file.seek(max(0, file.seek(0, SEEK_END) - _TAIL))
            complete, _, _ = file.readall().rpartition(b"\n")
    except FileNotFoundError:
        return
    for line in reversed(complete.split(b"\n")):
        with suppress(ValueError):  # a line may be damaged, and the first one is usually cut off
            yield _parsed_line(line)[0]


def _description(path: Path) -> tuple[Mapping[str, Any], str | None]:
    """Return the content of a `run.json` (empty if it cannot be read), and the problem of the file, or None.

    A field that the views use is left out if its value is wrong. Other fields are not checked.
    """
    try:
        described = parsed_file(path, _LONGEST_DESCRIPTION)
    except OSError as error:
        return {}, f"run.json: {why(error)}"
    except ValueError as error:
        return {}, f"run.json: {error}"
    wrong = check(described, {}, _IN_A_DESCRIPTION)
    return described, wrong and f"run.json: {wrong}"


def _thinned(lines: Iterable[Line]) -> list[Line]:
    """Thin out the lines of each kind to a number that the views can show: evenly, with the first and the newest line."""
    kept: dict[str, list[tuple[int, Line]]] = {kind: [] for kind in (*_KINDS, "")}
    newest: dict[str, tuple[int, Line]] = {}
    seen, each = Counter[str](), dict.fromkeys(kept, 1)  # of each kind, every `each`-th line is kept
    for at, line in enumerate(lines):
        kind = line["kind"] if line["kind"] in _KINDS else ""
        newest[kind] = at, line
        if seen[kind] % each[kind] == 0:
            kept[kind].append((at, line))
        seen[kind] += 1
        if len(kept[kind]) == 2 * MOST_LINES:
            del kept[kind][1::2]
            each[kind] *= 2
    entries = dict(entry for of_kind in (*kept.values(), newest.values()) for entry in of_kind)
    return [entries[at] for at in sorted(entries)]
