"""Whether a run that somebody else carried out came to its end, and whether its files are what it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from os import SEEK_END
from pathlib import Path
from typing import Any

from rollalloc.files.names import METRICS
from rollalloc.runs.files import LONGEST, digest_of, open_regular
from rollalloc.runs.reader import lines_in
from rollalloc.runs.recorded import Line

_ROUNDING = 1e-6  # a mean of float32 scores may lie beyond 1 by as much
_SPENT = ("rollouts_paid", "tokens_paid", "seconds")
_MADE = (*_SPENT, "optimizer_steps", "version")  # an evaluation has those of the batch that made its weights
_EARLIER = ("barren:", "prompts:", "failed:")  # why a run may end before its budget is spent


def refuse_unfinished(folder: Path, *, budget: int, every: int, diverged: bool = False) -> list[Line]:
    """The lines of a run's metrics, which say that it came to its end, and are those that it wrote.

    An edit is found by the digest in the last line. Somebody who computes that anew is not.

    Args:
        folder: of the run.
        budget: rollouts that it had to pay.
        every: rollouts between two points of its grid.
        diverged: its weights did, so that it ends earlier, with a line that says so.

    Raises:
        ValueError: names what is missing, comes twice, cannot be or was changed.
        OSError: its files are not regular, or cannot be read.
    """
    lines = list(lines_in(folder / METRICS))
    ends = "failed" if diverged else "end"
    if not lines or lines[-1]["kind"] != ends or not _is_closed(folder / METRICS):
        raise ValueError(f"its last line is not {ends!r}: it goes on, was stopped, or was cut")
    for found in (*_in_a_row(lines), *_grid(lines, every, diverged), *_spent(lines, budget, diverged)):
        raise ValueError(found)
    said, whole = lines[-1].get("digest"), digest_of(folder, _last_begins(folder / METRICS))
    if said is None:
        raise ValueError("its last line has no digest: it is of an older version of rollalloc, or was changed")
    if said != whole:
        raise ValueError(f"run.json or metrics.jsonl was changed since it ended: the digest is {whole}, not as it says")
    return lines


def _in_a_row(lines: list[Line]) -> Iterator[str]:
    """What is wrong with the order of the lines."""
    for at, line in enumerate(lines[:-1], start=1):
        if line["kind"] in ("end", "failed"):
            yield f"line {at} is its end, and more follows"
    batches = [line.get("batch") for line in lines if line["kind"] == "batch"]
    for expected, batch in enumerate(batches, start=1):
        if batch != expected:
            yield f"after batch {expected - 1:,} comes {batch!r}, expected {expected:,}"
    for kind in ("batch", "eval"):
        of_kind = [line for line in lines if line["kind"] == kind] + lines[-1:]
        for one, other in pairwise(of_kind):
            for name in _SPENT:
                if other[name] < one[name]:
                    yield f"{name} falls from {one[name]:,} to {other[name]:,}"


def _grid(lines: list[Line], every: int, diverged: bool) -> Iterator[str]:
    """What is wrong with the evaluations."""
    made: Any = None
    points = 0
    final = False
    for line in lines:
        if line["kind"] == "batch":
            made = {name: line.get(name) for name in _MADE}
        if line["kind"] != "eval":
            continue
        at, accuracy = line["at"], line["accuracy"]
        if final or (at is not None and at != points * every):
            yield f"an evaluation at {at!r}, expected one at {points * every:,}, and the final weights last"
        if accuracy is None or not -_ROUNDING <= accuracy <= 1 + _ROUNDING:
            yield f"the accuracy at {at!r} is {accuracy!r}, expected a number in [0, 1]"
        if at is not None and line["rollouts_paid"] > at:
            yield f"the weights evaluated at {at:,} are of {line['rollouts_paid']:,} rollouts"
        if made is not None and any(line.get(name) != value for name, value in made.items()):
            yield f"the evaluation at {at!r} does not say what the batch before it had paid"
        final, points = at is None, points + (at is not None)
    if not diverged and (not final or points != lines[-1]["rollouts_paid"] // every + 1):
        yield f"it has {points:,} points of the grid up to {lines[-1]['rollouts_paid']:,} rollouts, one each {every:,}"


def _spent(lines: list[Line], budget: int, diverged: bool) -> Iterator[str]:
    """What is wrong with what was paid."""
    for at, line in enumerate(lines, start=1):
        if sum(line["accounts"].values()) != line["rollouts_paid"]:
            yield f"line {at}: the accounts do not sum to the {line['rollouts_paid']:,} rollouts paid"
    paid, why = lines[-1]["rollouts_paid"], str(lines[-1].get("why"))
    steps = [line["rollouts_paid"] for line in lines if line["kind"] == "batch"]
    most = max((other - one for one, other in pairwise([0, *steps])), default=0)
    if paid > budget:
        yield f"it paid {paid:,} rollouts of a budget of {budget:,}"
    if not diverged and paid < budget - most and not why.startswith(_EARLIER):
        yield f"it ended after {paid:,} rollouts of {budget:,}, and does not say why"


def _is_closed(path: Path) -> bool:
    """Whether the last line has its end."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, SEEK_END) - 1))
        return file.readall() == b"\n"


def _last_begins(path: Path) -> int:
    """Where the last line of a file begins, which has its end."""
    with open_regular(path) as file:
        size = file.seek(0, SEEK_END)
        begin = max(0, size - LONGEST - 1)
        file.seek(begin)
        return begin + file.readall().rfind(b"\n", 0, -1) + 1
