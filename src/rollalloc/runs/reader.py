"""Reads a run's `run.json` and `metrics.jsonl`: the whole file, or only the newest lines.

The terminal, the page and the comparison all use this reader, so they show the same values. Every line is checked.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from os import SEEK_END
from pathlib import Path
from typing import Any, NamedTuple

from rollalloc.files.names import DESCRIPTION, METRICS
from rollalloc.files.regular import LONGEST, lines_of, open_regular, why
from rollalloc.files.text import told
from rollalloc.runs.metrics import fields_of
from rollalloc.runs.recorded import Line, RecordedRun
from rollalloc.runs.trl_log import read_trl, state_in
from rollalloc.runs.values import NUMBER, TEXT, Field, Fields, count, expect, parsed, take
from rollalloc.runs.verl_run import read_verl_run


def _whole(value: Any) -> int:
    expect(type(value) is int and abs(value) <= 2**64)
    return value


def _positive(value: Any) -> int:
    expect(count(value) > 0)
    return value


def _object(value: Any) -> dict[str, Any]:
    expect(isinstance(value, dict))
    return value


def _paths(value: Any) -> list[str]:
    expect(isinstance(value, list) and all(isinstance(path, str) for path in value))
    return value


_NEEDED = fields_of("every line", needed=True)
_IN_A_BATCH = fields_of("every line", "batch", "end", "failed")
_IN_AN_EVALUATION = fields_of("every line", "eval")
# Fields of an evaluation that are set to None if they are missing.
_CURVE = ("accuracy", "optimizer_steps", "version", "standard_error")
_IN_A_DESCRIPTION: Fields = {
    **dict.fromkeys(("label", "recipe", "task", "model"), TEXT),
    "seed": Field("a whole number", _whole),
    "max_rollouts": Field("a whole number from 1", _positive),
    "target": NUMBER,
    "prompts": Field("a list of paths", _paths),
    "parameters": Field("an object", _object),
}


class MetricsLine(NamedTuple):
    """A line of the metrics.

    In an evaluation, a missing `at` is set to `rollouts_paid`, and each missing field in `_CURVE` is set to None.

    Attributes:
        known: the fields that the views use, checked. Wrong fields are left out.
        whole: all fields of the line, unchecked.
        wrong: the problem of the first field that was left out; None if no field was left out.
        rising: name and value of the counter that must increase from line to line; empty if the line does not have it.
    """

    known: dict[str, Any]
    whole: dict[str, Any]
    wrong: str | None
    rising: dict[str, int]


def metrics_line(line: bytes) -> MetricsLine:
    """Parse and check a line of the metrics.

    Raises:
        ValueError: the line is not JSON, or lacks a field that every line must have.
    """
    try:
        fields = parsed(line)
    except ValueError as error:
        raise ValueError(f"is not a line of JSON ({error})") from None
    evaluated = fields.get("kind") == "eval"
    taken, wrong = take(fields, _NEEDED, _IN_AN_EVALUATION if evaluated else _IN_A_BATCH)
    rises = "at" if evaluated else "batch"
    rising = {rises: taken[rises]} if rises in taken else {}
    if not evaluated:
        return MetricsLine(taken, fields, wrong, rising)
    unsaid = dict.fromkeys(_CURVE) | {"at": None if "at" in fields else taken["rollouts_paid"]}
    return MetricsLine(unsaid | taken, unsaid | fields, wrong, rising)


def description(content: bytes) -> tuple[dict[str, Any], str | None]:
    """Parse and check a `run.json`.

    Returns:
        The fields, and the problem of the first field that was left out, or None. A field that the views use is left out if
        its value is wrong. Other fields are not checked.

    Raises:
        ValueError: the content is not a JSON object, or is nested too deeply.
    """
    fields = parsed(content)
    checked, wrong = take(fields, {}, _IN_A_DESCRIPTION)
    return {name: value for name, value in fields.items() if name not in _IN_A_DESCRIPTION} | checked, wrong


MOST_LINES = 1024  # when twice as many lines of a kind have been kept, every second line is dropped
_KINDS = ("batch", "eval", "end", "failed", "resume")  # all other kinds of lines are kept together
_LONGEST_DESCRIPTION = 8 << 20  # bytes
_TAIL = 1 << 18  # bytes at the end of the metrics in which `newest_lines` searches
_TOO_LONG = f"is longer than {LONGEST:,} bytes"


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
    wrong, left_out = list[str](), list[int]()
    metrics: list[Line] = []
    try:
        metrics = _thinned(_known_lines(folder / METRICS, wrong, left_out))
    except FileNotFoundError:
        pass  # the run has not written the file yet
    except OSError as error:
        wrong = [f": {why(error)}"]
    if wrong:
        more = f"; {len(left_out):,} line{'s' * (len(left_out) > 1)} left out" if left_out else ""
        problem = "; ".join(filter(None, (problem, f"{METRICS}{wrong[0]}{more}")))
    return RecordedRun(folder, described, metrics, problem)


def _known_lines(path: Path, wrong: list[str], left_out: list[int]) -> Iterator[Line]:
    """Yield each usable line with the fields that the views need.

    Args:
        path: path of a `metrics.jsonl`.
        wrong: list to which a description of each damaged line is appended, with the line's number.
        left_out: list to which the number of each line that is left out is appended.

    Raises:
        OSError: the file cannot be opened, see `open_regular`.
    """
    for number, checked, problem, complete in _checked_lines(path):
        if checked is None and not complete and problem != _TOO_LONG:
            continue  # the line is incomplete: it is being written, or the run was killed
        if problem is not None:
            wrong.append(f":{number} {problem}")
        if checked is None:
            left_out.append(number)
        else:
            yield checked.known


def lines_in(path: Path) -> Iterator[Line]:
    """Yield every line of a `metrics.jsonl` with all its fields, after checking it.

    An incomplete last line is left out: a killed run may leave such a line.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it is not a regular file, or cannot be read.
        ValueError: a line is damaged; the message names it.
    """
    for number, checked, problem, complete in _checked_lines(path):
        if problem is not None and complete:
            raise ValueError(f"{path}:{number} {problem}; the file is damaged")
        if checked is None:
            return
        yield checked.whole


def _checked_lines(path: Path) -> Iterator[tuple[int, MetricsLine | None, str | None, bool]]:
    """Yield each line that is not blank: its number, the parsed line or None, its problem or None, and whether it ends with
    a line break.
    """
    newest: dict[str, int] = {}  # last value of each counter that must increase
    for number, line, complete in lines_of(path):
        if line is not None and not line.strip():
            continue
        try:
            if line is None:
                raise ValueError(_TOO_LONG)
            checked = metrics_line(line)
            for name, value in checked.rising.items():
                if (before := newest.get(name)) is not None and value <= before:
                    wrote = "two runs, or one run twice, wrote this file"
                    raise ValueError(f"is repeated or out of order, {name} {value:,} after {before:,}: {wrote}")
        except ValueError as error:
            yield number, None, str(error), complete
        else:
            newest |= checked.rising
            yield number, checked, checked.wrong, complete


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
            yield metrics_line(line).whole


def _description(path: Path) -> tuple[Mapping[str, Any], str | None]:
    """Return the content of a `run.json` (empty if it cannot be read), and the problem of the file, or None."""
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
