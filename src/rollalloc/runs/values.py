"""Checks the values in a run's files when the files are read, so that every later use can rely on their types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from rollalloc.files.regular import open_regular

MOST = 2**53  # largest number that is accepted, because larger integers are not exact as floats
_NAMES = 64  # maximum number of names in an object of counts
_SHOWN = 80  # maximum number of characters of a wrong value in a message
QUANTILES = ("min", "p10", "p25", "p50", "p75", "p90", "max")


@dataclass(frozen=True, slots=True)
class Field:
    """What the value of a field must be.

    Attributes:
        words: what is expected, for messages, such as "a whole number from 0".
        holds: whether a value is as expected.
    """

    words: str
    holds: Callable[[Any], bool]


Fields = Mapping[str, Field]


def parsed_file(path: Path, longest: int) -> dict[str, Any]:
    """Parse a file that is one JSON object, of at most `longest` bytes.

    Raises:
        OSError: the file cannot be opened, see `open_regular`.
        ValueError: it is longer, or not an object, see `parsed`.
    """
    with open_regular(path) as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise ValueError(f"it is longer than {longest:,} bytes")
    return parsed(content)


def parsed(text: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: the text is not UTF-8, not JSON, nested too deeply, or not an object.
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {_shown(value)}")
    return value


def check(entries: dict[str, Any], needed: Fields, known: Fields) -> str | None:
    """Check the fields of an object, and remove fields of `known` that are wrong or null. Other fields are not checked.

    Args:
        entries: the object.
        needed: fields that must be there.
        known: fields that may be missing.

    Returns:
        The problem of the first wrong field that was removed; None if no field was wrong.

    Raises:
        ValueError: a field of `needed` is missing or wrong.
    """
    for name, field in needed.items():
        if name not in entries:
            raise ValueError(f"expected an object with {', '.join(needed)}; {name} is missing")
        if not field.holds(entries[name]):
            raise ValueError(f"{name}: expected {field.words}, got {_shown(entries[name])}")
    problem: str | None = None
    for name, field in known.items():
        value = entries.get(name)
        if value is not None and field.holds(value):
            continue
        entries.pop(name, None)
        if value is not None:
            problem = problem or f"{name}: expected {field.words}, or no {name}, got {_shown(value)}"
    return problem


def _shown(value: Any) -> str:
    """A short description of any value."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST:
        return "a number that is too large"
    text = json.dumps(value[:_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


# -------------------------------------------------------------------------------------------------------- kinds of values


def number(value: Any) -> float | None:
    """The value, or None if it is NaN, infinite, beyond ±2^53 or not a number."""
    return value if type(value) in (int, float) and abs(value) <= MOST else None  # the comparison is False for NaN


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _is_amount(value: Any) -> bool:
    return number(value) is not None and value >= 0


def _is_measured(value: Any) -> bool:
    return type(value) is float or number(value) is not None


def _each(holds: Callable[[Any], bool], most: float = inf) -> Callable[[Any], bool]:
    """Whether a value is an object of at most this many values, and all of them are as expected."""
    return lambda value: isinstance(value, dict) and len(value) <= most and all(map(holds, value.values()))


def _are_lengths(value: Any) -> bool:
    if not (isinstance(value, dict) and _is_count(value.get("count")) and _is_count(value.get("truncated"))):
        return False
    quantiles = value.get("quantiles")
    return isinstance(quantiles, list) and len(quantiles) == len(QUANTILES) and all(map(_is_amount, quantiles))


COUNT = Field("a whole number from 0", _is_count)
AMOUNT = Field("a finite number from 0", _is_amount)
NUMBER = Field("a finite number", lambda value: number(value) is not None)
MEASURED = Field("a number", _is_measured)  # NaN or infinite, for example, if the run diverged
TEXT = Field("text", lambda value: isinstance(value, str))
COUNTS = Field(f"whole numbers from 0 under at most {_NAMES} names", _each(_is_count, _NAMES))
SHARES = Field("an object of numbers from 0", _each(_is_amount))
FIGURES = Field("an object of numbers", _each(lambda value: value is None or _is_measured(value)))
LENGTHS = Field(f"an object of count, truncated and {len(QUANTILES)} quantiles", _are_lengths)
