"""Checks the structure of saved JSON before it is used. Errors name the file, the place in it, and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from types import EllipsisType, NoneType, UnionType
from typing import Any

from rollalloc.files.stamps import STAMP_SHAPE

# A shape is a type or a union of types; {name: Shape}, an object with exactly these names, or with any other names too if
# `...` is a key; [Shape], a list of any length; or (Shape, Shape), a list of exactly these entries.
Shape = type | UnionType | Mapping[str | EllipsisType, Any] | list[Any] | tuple[Any, ...]

_NUMBER = int | float
TRAINER: Mapping[str | EllipsisType, Any] = {
    "identity": {"prompts": str, "config": {...: object}, ...: object},
    "allocator": {"recipe": object, "batch": object, "prompts": {"count": int, ...: object}, ...: object},
    "counters": {
        "batches": int,
        "seconds": _NUMBER,
        "next_at": int,
        "made": {...: object},
        "accuracies": [(int, _NUMBER)],
        "barren_groups": int,
        "watched": {...: _NUMBER},
    },
    "optimizer_steps": int,
    "rollouts": {
        "generations": [(int, int, int)],
        "stream": dict | NoneType,
        "waves": [(_NUMBER, _NUMBER, bool, int)],
        "unscored": {...: int},
    },
    "written": {...: STAMP_SHAPE},
}

# The running rollouts of the asynchronous engine. For each: id, number of tokens so far, whether it was stopped, prompt,
# group, stage, and the versions of its tokens.
STREAM: Mapping[str | EllipsisType, Any] = {
    "in_flight": [(int, int, bool, int, int, int, [(int, int)])],
    "straddled": int,
    "paces": (_NUMBER, _NUMBER, _NUMBER),
}


def check_shape(value: Any, shape: Shape, where: str) -> None:
    """Raise an error if plain data does not have a shape.

    Args:
        value: the parsed JSON.
        shape: the expected shape.
        where: name of the file, for the error; the place in it is added.

    Raises:
        ValueError: names the first place that differs from the shape.
    """
    if isinstance(shape, Mapping):
        _check_keys(value, shape, where)
    elif isinstance(shape, (list, tuple)):
        if not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
            raise _misfit(value, "a list" if isinstance(shape, list) else f"a list of {len(shape)}", where)
        entries = shape * len(value) if isinstance(shape, list) else shape
        for at, (entry, expected) in enumerate(zip(value, entries, strict=True)):
            check_shape(entry, expected, f"{where}[{at}]")
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape not in (bool, object)):
        raise _misfit(value, getattr(shape, "__name__", str(shape)), where)


def _check_keys(value: Any, shape: Mapping[str | EllipsisType, Any], where: str) -> None:
    if not isinstance(value, dict):
        raise _misfit(value, "names with values", where)
    named = {name for name in shape if name is not ...}
    missing, unknown = named - value.keys(), set() if ... in shape else value.keys() - named
    if missing or unknown:
        raise ValueError(
            f"{where}: missing keys {sorted(map(str, missing))}, unknown keys {short(sorted(unknown))}; not a state of "
            "this version"
        )
    for name, entry in value.items():
        check_shape(
            entry, shape[name] if name in named else shape[...], f"{where}{'.' if ': ' in where else ': '}{name}"
        )


def _misfit(value: Any, expected: str, where: str) -> ValueError:
    came = "null" if isinstance(value, NoneType) else f"{short(value)} of type {type(value).__name__}"
    return ValueError(f"{where}: expected {expected}, got {came}; the file was changed, or is of another version")
