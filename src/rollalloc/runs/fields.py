"""Checks the lines and objects in a run's files, keeps the fields that the views need, and describes the problems."""

from __future__ import annotations

from typing import Any, NamedTuple

from rollalloc.runs.metrics import fields_of
from rollalloc.runs.values import NUMBER, TEXT, Field, Fields, count, expect, parsed, take


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
