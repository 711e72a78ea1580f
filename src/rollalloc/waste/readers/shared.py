"""Code that the readers share: the definition of a format, and access to fields that may have any value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from rollalloc.data.jsonl import PACKED, Unreadable, read_lines
from rollalloc.files.text import visible
from rollalloc.waste.groups import NO_STEP, Log

Fields = Mapping[str, Any]
Progress = Callable[[str, int, int], None]  # (stage, number done, total number)
_WORDS = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True, slots=True)
class Options:
    """Information that a log does not contain.

    Attributes:
        reward: name of the reward. For verl and rollalloc, one field (default for verl: `acc`, or `score` if there is none).
            For TRL and prime-rl, one or several names, comma-separated (default: the sum of all).
        weights: weights of TRL's reward columns, in the trainer's order; finite, not all 0. Default: 1 for each.
        group_size: number of rollouts per prompt in TRL's files, at least 1. Default: the length of the shortest series of
            rows with the same prompt.
        rows: "all": evaluation rows are counted like training rows. "training" (the default): they are left out.

    Raises:
        ValueError: an option is invalid.
    """

    reward: str | None = None
    weights: tuple[float, ...] | None = None
    group_size: int | None = None
    rows: str | None = None

    @property
    def rewards(self) -> tuple[str, ...]:
        """The reward names that the user chose; empty if none."""
        return () if self.reward is None else tuple(name.strip() for name in self.reward.split(","))

    @property
    def all_rows(self) -> bool:
        """Whether evaluation rows are counted."""
        return self.rows == "all"

    def __post_init__(self) -> None:
        if self.reward is not None and not all(self.rewards):
            raise ValueError("--reward: expected the name of a field or column, got an empty one; leave it out")
        if self.weights is not None and (not any(self.weights) or not all(map(math.isfinite, self.weights))):
            weights = ", ".join(f"{weight:g}" for weight in self.weights) or "none"
            raise ValueError(f"--weights: expected finite numbers that are not all 0, got {weights}; e.g. 1,0.2")
        if self.rows not in (None, "training", "all"):
            raise ValueError(f"--rows: expected training or all, got {self.rows!r}")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"--group-size: expected a whole number of at least 1, got {self.group_size}")


@dataclass(frozen=True, slots=True)
class Files:
    """Files to read, in this order. `progress` is called before each file."""

    paths: Sequence[Path]
    progress: Progress | None = None

    def __iter__(self) -> Iterator[Path]:
        for number, file in enumerate(self.paths):
            if self.progress is not None:
                self.progress("reading", number, len(self.paths))
            yield file


@dataclass(frozen=True, slots=True)
class Format:
    """A log format.

    Attributes:
        expects: description of the format's files, for messages.
        choose: selects the format's files among those found.
        read: reads the files into a log.
        marks: tells whether a line looks like this format. None: the format is recognised by the file's name.
        options: names of the options that apply to the format.
    """

    expects: str
    choose: Callable[[Sequence[Path]], list[Path]]
    read: Callable[[Files, Log, Options], None]
    marks: Callable[[Fields], bool] | None
    options: tuple[str, ...] = ("reward",)


def by_suffix(files: Sequence[Path], suffix: str) -> list[Path]:
    """The files with this suffix. Files of JSON lines may be compressed."""
    suffixes = (suffix, *(f".jsonl{packed}" for packed in PACKED)) if suffix == ".jsonl" else suffix
    return [file for file in files if file.name.endswith(suffixes)]


def objects(file: Path, log: Log) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON object of a file with its place. Other lines are counted as unusable."""
    place = visible(str(file))
    try:
        for number, row in read_lines(file):
            if isinstance(row, dict):
                yield f"{place}:{number}", row
            elif isinstance(row, Unreadable):
                log.reject(f"{place}:{number}", "not JSON" if "longer" not in row.why else row.why)
            else:
                log.reject(f"{place}:{number}", f"expected a JSON object, got {short(row)}")
    except OSError as error:
        if file.suffix not in PACKED:
            raise
        log.reject(place, f"the packed file is damaged or cut off ({error})")


# ------------------------------------------------------------------------------------------------------- single fields


def number(value: Any, log: Log, where: str, name: str) -> float | None:
    """A finite number as a float. Anything else becomes None: no score. It is counted as invalid, unless it is null.

    Text of a number, "True" or "False" is read as a number, because `json.dumps(default=str)` writes NumPy's numbers so.
    """
    try:
        read = float(_WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value)
        if isinstance(value, (float, int, str)) and math.isfinite(read):
            return read
    except (TypeError, ValueError, OverflowError):  # OverflowError: an integer too large for a float
        pass
    if value is not None:
        log.doubt(where, f"{name} is {short(value)}, expected a finite number")
    return None


def whole(value: Any, log: Log, where: str, name: str) -> int | None:
    """An integer, which may be written as text. Anything else becomes None. It is counted as invalid, unless it is null."""
    try:
        number = int(value)
        if abs(number) < -NO_STEP:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    if value is not None:
        log.doubt(where, f"{name} is {short(value)}, expected a whole number")
    return None


def count(value: Any, log: Log, where: str, name: str) -> int | None:
    """An integer of 0 or more. Anything else becomes None. It is counted as invalid, unless it is null."""
    number = whole(value, log, where, name)
    if number is not None and number < 0:
        log.doubt(where, f"{name} is {number}, expected 0 or more")
        return None
    return number


def text(value: Any) -> str:
    """Text unchanged, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def message_text(value: Any, role: str | None = None) -> str:
    """The text of a prompt or completion: text, or a list of chat messages. Anything else is converted to JSON.

    Args:
        value: text, or messages whose content is text or a list of parts.
        role: use only messages of this role. If there are none, use all messages.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) and "content" in message for message in value):
        return text(value)
    of_role = [message for message in value if role is not None and message.get("role") == role]
    return "\n".join(_content(message["content"]) for message in of_role or value)


def _content(content: Any) -> str:
    """The text of a message, or of its text parts."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def said(value: Any) -> str | None:
    """Text unchanged; None for anything else."""
    return value if isinstance(value, str) else None


def inside(record: Fields, *keys: str) -> dict[str, Any]:
    """A nested dictionary; empty if there is none."""
    node: Any = record
    for key in keys:
        node = node.get(key)
        if not isinstance(node, dict):
            return {}
    return node


def names(texts: Iterable[str], joint: str = ", ") -> str:
    """Names from a file, safe to print: only some of them, shortened, and without control characters."""
    shown = [re.sub(r"[^\x20-\x7e]", "?", name)[:40] for name in texts]
    return joint.join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
