"""Checks values in a run's files, and describes what is expected of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

MOST = 2**53  # largest number that is accepted, because larger integers are not exact as floats
_NAMES = 64  # maximum number of names in an object of counts
_NAME, _TEXT = 120, 2000  # maximum number of characters of a name and of a text
_SHOWN = 80  # maximum number of characters of a wrong value in a message
QUANTILES = ("min", "p10", "p25", "p50", "p75", "p90", "max")


@dataclass(frozen=True, slots=True)
class Field:
    """The check of a field.

    Attributes:
        words: what is expected, for messages, such as "a whole number from 0".
        read: a function that returns the checked value, or raises ValueError, TypeError or AttributeError.
    """

    words: str
    read: Callable[[Any], Any]


Fields = Mapping[str, Field]


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


def take(entries: Mapping[str, Any], needed: Fields, known: Fields) -> tuple[dict[str, Any], str | None]:
    """Check the fields of an object. Fields that are neither in `needed` nor in `known` are left out.

    Args:
        entries: the object.
        needed: fields that must be there.
        known: fields that may be missing or null. A wrong value is left out.

    Returns:
        The checked fields, and the problem of the first wrong field of `known` (None if no field is wrong).

    Raises:
        ValueError: a field of `needed` is missing or wrong.
    """
    taken: dict[str, Any] = {}
    wrong: str | None = None
    for name, field in needed.items():
        try:
            taken[name] = field.read(entries[name])
        except KeyError:
            raise ValueError(f"expected an object with {', '.join(needed)}; {name} is missing") from None
        except _WRONG:
            got = f"expected {field.words}, got {_shown(entries[name])}"
            raise ValueError(f"{name}: {got}") from None
    for name, field in known.items():
        value = entries.get(name)
        if value is None:
            continue
        try:
            taken[name] = field.read(value)
        except _WRONG:
            wrong = wrong or f"{name}: expected {field.words}, or no {name}, got {_shown(value)}"
    return taken, wrong


_WRONG = (ValueError, TypeError, AttributeError, KeyError, OverflowError)


def _shown(value: Any) -> str:
    """A short description of any value."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST:
        return "a number that is too large"
    text = json.dumps(value[:_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


# -------------------------------------------------------------------------------------------------------- kinds of values


def expect(holds: bool) -> None:
    if not holds:
        raise ValueError


def count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError
    return value


def number(value: Any) -> float:
    if type(value) not in (int, float) or not -MOST <= value <= MOST:  # this also refuses NaN
        raise ValueError
    return value


def _text(value: Any) -> str:
    expect(isinstance(value, str))
    return value


def _amount(value: Any) -> float:
    if number(value) < 0:
        raise ValueError
    return value


def _measured(value: Any) -> float | None:
    """A number; None for NaN and infinity, such as the loss of a run that diverged."""
    return number(value) if type(value) is not float or isfinite(value) else None


def _counts(value: Any) -> dict[str, int]:
    expect(len(value) <= _NAMES)
    cut = False
    for name, count_ in value.items():  # `count` is inlined here for speed
        if type(count_) is not int or count_ < 0 or count_ > MOST:
            raise ValueError
        cut = cut or len(name) > _NAME
    return {name[:_NAME]: count_ for name, count_ in value.items()} if cut else value


def _figures(value: Any) -> dict[str, float]:
    """The finite numbers in an object. Other values are left out. If the value is not an object, the result is empty."""
    named = list(value.items())[:_NAMES] if isinstance(value, dict) else []
    known: dict[str, float] = {}
    for name, figure in named:
        with suppress(ValueError, TypeError, OverflowError):
            known[name[:_NAME]] = number(figure)
    return known


def _lengths(value: Any) -> dict[str, Any]:
    quantiles = value["quantiles"]
    expect(isinstance(quantiles, list) and len(quantiles) == len(QUANTILES))
    return {
        "count": count(value["count"]),
        "truncated": count(value["truncated"]),
        "quantiles": [_amount(quantile) for quantile in quantiles],
    }


COUNT = Field("a whole number from 0", count)
AMOUNT = Field("a finite number from 0", _amount)
NUMBER = Field("a finite number", number)
MEASURED = Field("a number", _measured)
TEXT = Field("text", lambda value: _text(value)[:_TEXT])
COUNTS = Field(f"whole numbers from 0 under at most {_NAMES} names", _counts)
FIGURES = Field("an object", _figures)
LENGTHS = Field(f"an object of count, truncated and {len(QUANTILES)} quantiles", _lengths)
