"""What JSON that was saved must look like before it is used: one error that says which file, where in it, and what came."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from types import EllipsisType, NoneType, UnionType
from typing import Any

from rollalloc.files.stamps import STAMP_SHAPE

# A type or a union of types; {name: Shape}, just these names, or any others as well under `...`; [Shape], a list of any
# length; (Shape, ...), a list of just these.
Shape = type | UnionType | Mapping[str | EllipsisType, Any] | list[Any] | tuple[Any, ...]

_NUMBER = int | float
TRAINER: Mapping[str | EllipsisType, Any] = {
    "identity": {"prompts": str, "settings": {...: object}, ...: object},
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

# What the asynchronous engine has in flight. Of each rollout: id, number of tokens so far, whether it was stopped,
# prompt, group, stage, and the versions of its tokens.
STREAM: Mapping[str | EllipsisType, Any] = {
    "in_flight": [(int, int, bool, int, int, int, [(int, int)])],
    "straddled": int,
    "paces": (_NUMBER, _NUMBER, _NUMBER),
}


def check_shape(value: Any, shape: Shape, where: str) -> None:
    """Refuse plain data that is not of a shape.

    Args:
        value: as JSON gave it.
        shape: what it must be.
        where: the file; the place in it is added.

    Raises:
        ValueError: names the first place that is not as it must be.
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
