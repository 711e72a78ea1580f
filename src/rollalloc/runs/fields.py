"""What a run's files must hold under which name: nothing else of them reaches a view, and what is wrong is said in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST = 2**53  # of any number: what is exact as a float, and far beyond any run
_NAMES = 64  # in an object of counts: causes, fates, reasons, ages
_NAME, _TEXT = 120, 2000  # characters of a name, of a text
_SHOWN = 80  # characters of a wrong value in a message
_DEEPEST = 32  # nesting of a description
QUANTILES = ("min", "p10", "p25", "p50", "p75", "p90", "max")


@dataclass(frozen=True, slots=True)
class Field:
    """What is expected under a name.

    Attributes:
        words: "a whole number from 0".
        read: a value → the value fit to be used; raises ValueError, TypeError or AttributeError for any other.
    """

    words: str
    read: Callable[[Any], Any]


Fields = Mapping[str, Field]


def parsed(text: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none: not UTF-8, not JSON, nested too deeply, or another value.
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        found = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {_shown(found)}")
    return found


def take(found: Mapping[str, Any], needed: Fields, known: Fields) -> tuple[dict[str, Any], str | None]:
    """The fields of these names, fit to be used, and what is wrong with the first of `known` that is not, and is left out.

    Args:
        needed: without one of these there is nothing to be taken.
        known: those that may be missing or null.

    Raises:
        ValueError: one of `needed` is missing or wrong.
    """
    taken: dict[str, Any] = {}
    wrong: str | None = None
    for name, field in needed.items():
        try:
            taken[name] = field.read(found[name])
        except KeyError:
            raise ValueError(f"expected an object with its {', '.join(needed)}, got none with {name}") from None
        except _WRONG:
            got = f"got {name}: {_shown(found[name])}, expected {field.words}"
            raise ValueError(f"expected an object with its {', '.join(needed)}, {got}") from None
    for name, field in known.items():
        value = found.get(name)
        if value is None:
            continue
        try:
            taken[name] = field.read(value)
        except _WRONG:
            wrong = wrong or f"expected an object with its {name}, {field.words}, or without, got {_shown(value)}"
    return taken, wrong


_WRONG = (ValueError, TypeError, AttributeError, KeyError, OverflowError)


def _shown(value: Any) -> str:
    """A value in few words, whatever it is."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST:
        return "a number that is too large"
    said = json.dumps(value[:_SHOWN] if isinstance(value, str) else value)
    return said if len(said) <= _SHOWN else f"{said[: _SHOWN - 1]}…"


# -------------------------------------------------------------------------------------------------------- kinds of values


def _expect(holds: bool) -> None:
    if not holds:
        raise ValueError


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError
    return value


def _whole(value: Any) -> int:
    _expect(type(value) is int and abs(value) <= 2**64)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not -MOST <= value <= MOST:  # NaN is not between any two
        raise ValueError
    return value


def _amount(value: Any) -> float:
    if _number(value) < 0:
        raise ValueError
    return value


def _text(value: Any) -> str:
    _expect(isinstance(value, str))
    return value


def _group(value: Any) -> int | str:
    return value if isinstance(value, str) else _whole(value)


def _flag(value: Any) -> bool:
    _expect(isinstance(value, bool))
    return value


def _counts(value: Any) -> dict[str, int]:
    _expect(len(value) <= _NAMES)
    cut = False
    for name, count in value.items():  # spelt out, for most of a metrics file is counts
        if type(count) is not int or count < 0 or count > MOST:
            raise ValueError
        cut = cut or len(name) > _NAME
    return {name[:_NAME]: count for name, count in value.items()} if cut else value


def _ages(value: Any) -> dict[int, int]:
    return {_count(int(age)): count for age, count in _counts(value).items()}


def _lengths(value: Any) -> dict[str, Any]:
    quantiles = value["quantiles"]
    _expect(isinstance(quantiles, list) and len(quantiles) == len(QUANTILES))
    return {
        "count": _count(value["count"]),
        "truncated": _count(value["truncated"]),
        "quantiles": [_amount(each) for each in quantiles],
    }


def _settings(value: Any) -> dict[str, Any]:
    for name, read in (("seed", _whole), ("target", _number)):
        if value.get(name) is not None:
            read(value[name])
    return dict(value)


def _source(value: Any) -> dict[str, Any]:
    prompts = value.get("prompts")
    _expect(prompts is None or (isinstance(prompts, list) and all(isinstance(path, str) for path in prompts)))
    _expect(value.get("model") is None or isinstance(value["model"], str))
    return dict(value)


def _object(value: Any) -> dict[str, Any]:
    _expect(isinstance(value, dict))
    return value


def _positive(value: Any) -> int:
    _expect(_count(value) > 0)
    return value


COUNT = Field("a whole number from 0", _count)
AMOUNT = Field("a finite number from 0", _amount)
NUMBER = Field("a finite number", _number)
TEXT = Field("text", lambda value: _text(value)[:_TEXT])
COUNTS = Field(f"whole numbers from 0 under at most {_NAMES} names", _counts)

# ------------------------------------------------------------------------------------------------------------------ files

IN_EVERY_LINE: Fields = {
    "kind": TEXT,
    "rollouts_paid": COUNT,
    "tokens_paid": COUNT,
    "seconds": AMOUNT,
    "accounts": COUNTS,
}
_IN_ANY_LINE: Fields = {"prompts": COUNTS, "unscored": COUNTS}
_IN_A_BATCH: Fields = {
    **_IN_ANY_LINE,
    "batch": COUNT,
    "rows": COUNT,
    "groups": COUNT,
    "replayed": COUNT,
    "evicted": COUNT,
    "revived": COUNT,
    "quarantined": COUNT,
    "ages": Field("rows by a whole number of updates", _ages),
    "lengths": Field(f"an object of count, truncated and {len(QUANTILES)} quantiles", _lengths),
    "staleness_mean": AMOUNT,
    "staleness_max": COUNT,
    "why": TEXT,
}
_CURVE = ("accuracy", "optimizer_steps", "version", "standard_error")  # a curve's line has all, null or not
_IN_AN_EVALUATION: Fields = {
    **_IN_ANY_LINE,
    "at": COUNT,
    "accuracy": NUMBER,
    "optimizer_steps": COUNT,
    "version": COUNT,
    "standard_error": AMOUNT,
}
_IN_A_DESCRIPTION: Fields = {
    "label": TEXT,
    "recipe": TEXT,
    "task": TEXT,
    "settings": Field("an object whose seed is a whole number and whose target is a number", _settings),
    "source": Field("an object whose prompts are a list of paths and whose model is text", _source),
    "parameters": Field("an object", _object),
    "max_rollouts": Field("a whole number from 1", _positive),
}
_IN_A_ROLLOUT: Fields = {
    "group": Field("a whole number or text", _group),
    "key": TEXT,
    "prompt": Field("a whole number", _whole),
    "reward": NUMBER,
    "tokens": COUNT,
    "unscored": TEXT,
    "truncated": Field("true or false", _flag),
    "text": Field("text", _text),
}


class MetricsLine(NamedTuple):
    """A line of the metrics. What an evaluation does not say of its curve is None; without a grid it is at what was paid.

    Attributes:
        known: the fields that are known here, each fit to be used; those that are wrong are left out.
        whole: all that the line holds, unchecked.
        wrong: what is wrong with a field that was left out; None: nothing.
        rising: what is larger in each line than in those before it, by name, where the line says it.
    """

    known: dict[str, Any]
    whole: dict[str, Any]
    wrong: str | None
    rising: dict[str, int]


def metrics_line(line: bytes) -> MetricsLine:
    """A line of the metrics, checked.

    Raises:
        ValueError: it is no such line.
    """
    try:
        found = parsed(line)
    except ValueError as error:
        raise ValueError(f"is not a line of JSON ({error})") from None
    evaluated = found.get("kind") == "eval"
    taken, wrong = take(found, IN_EVERY_LINE, _IN_AN_EVALUATION if evaluated else _IN_A_BATCH)
    rises = "at" if evaluated else "batch"
    rising = {rises: taken[rises]} if rises in taken else {}
    if not evaluated:
        return MetricsLine(taken, found, wrong, rising)
    unsaid = dict.fromkeys(_CURVE) | {"at": None if "at" in found else taken["rollouts_paid"]}
    return MetricsLine(unsaid | taken, unsaid | found, wrong, rising)


def description(content: bytes) -> tuple[dict[str, Any], str | None]:
    """A run's description, and what is wrong with a field of it that was left out.

    Raises:
        ValueError: it is none.
    """
    found = parsed(content)
    _expect_flat(found)
    return take(found, {}, _IN_A_DESCRIPTION)


def rollout(line: bytes) -> dict[str, Any]:
    """A rollout of `rollouts.jsonl`.

    Raises:
        ValueError: it is none, or a field of it is wrong.
    """
    taken, wrong = take(parsed(line), {}, _IN_A_ROLLOUT)
    if wrong:
        raise ValueError(wrong)
    return taken


def _expect_flat(found: Any) -> None:
    level = [found]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {_DEEPEST} deep")
