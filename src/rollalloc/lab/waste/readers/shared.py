"""What the readers of all formats share: what a format is, and fields that may hold anything."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from rollalloc.data.jsonl import Unreadable, read_lines
from rollalloc.lab.waste.groups import NO_STEP, Log

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What a log does not say itself.

    Attributes:
        reward: field that holds the reward, for verl (by default `acc`, else `score`) and ours; for TRL one reward column
            instead of their sum.
        weights: of TRL's reward columns, in the trainer's order, 1 each by default; finite, not all 0.
        group_size: rollouts per prompt, for TRL's files, at least 1; by default the shortest run of rows with one prompt.

    Raises:
        ValueError: one that means nothing.
    """

    reward: str | None = None
    weights: tuple[float, ...] | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and not self.reward.strip():
            raise ValueError("--reward: expected the name of a field or column, got an empty one; leave it out")
        if self.weights is not None and (not any(self.weights) or not all(map(math.isfinite, self.weights))):
            given = ", ".join(f"{weight:g}" for weight in self.weights) or "none"
            raise ValueError(f"--weights: expected finite numbers that are not all 0, got {given}; e.g. 1,0.2")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"--group-size: expected a whole number of at least 1, got {self.group_size}")


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of log.

    Attributes:
        expects: what its files are, for a message.
        choose: those among the files found.
        read: them into a log.
        marks: whether a line is one of it; None: told by the file's name.
        options: that mean something for it.
    """

    expects: str
    choose: Callable[[Sequence[Path]], list[Path]]
    read: Callable[[Iterable[Path], Log, Options], None]
    marks: Callable[[Fields], bool] | None
    options: tuple[str, ...] = ("reward",)


def by_suffix(files: Sequence[Path], suffix: str) -> list[Path]:
    """The files that end so."""
    return [file for file in files if file.suffix == suffix]


def objects(file: Path, log: Log) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each JSON object of a file with its place; lines that are none are counted."""
    place = shown(file)
    for number, row in read_lines(file):
        if isinstance(row, dict):
            yield f"{place}:{number}", row
        elif isinstance(row, Unreadable):
            log.reject(f"{place}:{number}", "not JSON" if "longer" not in row.why else row.why)
        else:
            log.reject(f"{place}:{number}", f"expected a JSON object, got {short(row)}")


# ------------------------------------------------------------------------------------------------------- single fields


def number(value: Any, log: Log, where: str, name: str) -> float | None:
    """A finite number as a float; None for whatever else, which is unscored, and counted unless it is null."""
    try:
        if isinstance(value, (float, int)) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond any float
        pass
    if value is not None:
        log.doubt(where, f"{name} is {short(value)}, expected a finite number")
    return None


def whole(value: Any, log: Log, where: str, name: str) -> int | None:
    """A whole number, or one as text; None for whatever else, counted unless it is null."""
    try:
        found = int(value)
        if abs(found) < -NO_STEP:
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    if value is not None:
        log.doubt(where, f"{name} is {short(value)}, expected a whole number")
    return None


def count(value: Any, log: Log, where: str, name: str) -> int | None:
    """A whole number of 0 or more; None for whatever else, counted unless it is null."""
    found = whole(value, log, where, name)
    if found is not None and found < 0:
        log.doubt(where, f"{name} is {found}, expected 0 or more")
        return None
    return found


def text(value: Any) -> str:
    """Text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def said(value: Any) -> str | None:
    """Text as it is; None for whatever else."""
    return value if isinstance(value, str) else None


def inside(record: Fields, *keys: str) -> dict[str, Any]:
    """A dictionary within dictionaries; empty where there is none."""
    found: Any = record
    for key in keys:
        found = found.get(key)
        if not isinstance(found, dict):
            return {}
    return found


def shown(file: Path) -> str:
    """A path as it may be shown: a file's name may hold anything."""
    return "".join(character if character.isprintable() else "?" for character in str(file))


def names(found: Iterable[str], joint: str = ", ") -> str:
    """Names out of a file as they may be shown: a few, short, and nothing that moves a terminal's cursor."""
    shown = [re.sub(r"[^\x20-\x7e]", "?", name)[:40] for name in found]
    return joint.join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
