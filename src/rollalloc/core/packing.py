"""Convert state to JSON data and back, check loaded values, and describe recipes as nested plain data."""

from __future__ import annotations

import types
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

_LARGEST = 1 << 53  # JSON readers may round larger whole numbers; every count of a run is much smaller


class Packed(TypedDict):
    """An array as JSON data."""

    dtype: str
    shape: list[int]
    base64: str


def pack(array: NDArray[Any]) -> Packed:
    """Return the array as {dtype, shape, base64}, little-endian."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "shape": list(array.shape), "base64": b64encode(little.data).decode("ascii")}


def unpack(packed: Packed) -> NDArray[Any]:
    """Return the array that was packed, as a new writable copy.

    Raises:
        ValueError: the data is corrupt, for example because the bytes do not fill the shape.
    """
    exact_keys(packed, ("dtype", "shape", "base64"), "packed array")
    try:
        dtype = np.dtype(packed["dtype"])
    except TypeError as error:
        raise ValueError(f"packed array of dtype {packed['dtype']!r}: {error}") from None
    if dtype.hasobject:
        raise ValueError(f"a packed array must contain plain numbers, got dtype {packed['dtype']!r}")
    try:
        flat = np.frombuffer(b64decode(packed["base64"]), dtype=dtype)
    except (ValueError, TypeError) as error:
        raise ValueError(f"packed array of {packed['dtype']} cannot be read, {error}; the state is corrupt") from None
    if flat.size != int(np.prod(packed["shape"])):
        raise ValueError(f"packed array has {flat.size} entries for shape {packed['shape']}; the state is corrupt")
    # `astype` copies, because `frombuffer` gives an array that cannot be written.
    return flat.reshape(packed["shape"]).astype(dtype.newbyteorder("="))


def move_in(target_N: NDArray[Any], packed: Packed, source_N: NDArray[np.int64] | None, where: str) -> None:
    """Write a saved array with one entry for each prompt into `target_N`.

    Args:
        target_N: the array to change, shape (..., N), with the prompts on the last axis.
        packed: the saved array, with the same dtype and leading shape. Its last axis has the prompts of the saved data
            set.
        source_N: index of each prompt in the saved array. -1: the entry in `target_N` is kept. None: the data set is
            the same.
        where: name for the error message.

    Raises:
        ValueError: the dtype or the shape is not the expected one.
    """
    with reading(where):
        saved_N = unpack(packed)
        needed = target_N.shape[-1] if source_N is None else int(source_N.max(initial=-1)) + 1
        fits = saved_N.ndim == target_N.ndim and saved_N.shape[:-1] == target_N.shape[:-1]
        fits = fits and (saved_N.shape[-1] == needed if source_N is None else saved_N.shape[-1] >= needed)
        if not fits or saved_N.dtype != target_N.dtype:
            raise ValueError(
                f"expected {target_N.dtype} for {needed} prompts, got {saved_N.dtype} of shape {saved_N.shape}; the state "
                "is corrupt"
            )
    if source_N is None:
        target_N[...] = saved_N
    else:
        known_N = source_N >= 0
        target_N[..., known_N] = saved_N[..., source_N[known_N]]


def follow(memory: dict[str, Any], saved: Mapping[str, Any], source_N: NDArray[np.int64]) -> None:
    """Copy saved arrays into the memory of another data set. Only arrays whose name ends in `N` are copied.

    Args:
        memory: the memory for the new data set; changed in place. Prompts are on the last axis of its arrays.
        saved: the memory of the saved data set, with arrays of the same names.
        source_N: index of each prompt in the saved data set, or -1 for a new prompt.

    Raises:
        ValueError: a saved array has another dtype or shape than the array in `memory`.
    """
    for name, value in saved.items():
        if name.endswith("N") and isinstance(value, np.ndarray):
            move_in(memory[name], pack(cast("NDArray[Any]", value)), source_N, name)


@contextmanager
def reading(where: str) -> Generator[None]:
    """Turn any exception from reading a part of a saved state into a ValueError that names the part.

    Raises:
        ValueError: the part cannot be read; the message begins with `where`.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # the state comes from a file and may contain anything
        raise ValueError(
            f"{where} cannot be read ({type(error).__name__}: {error}); the state is corrupt, or another program saved it"
        ) from error


def natural(value: Any, where: str) -> int:
    """Return a saved count; raise a ValueError if it is not a whole number of 0 or more."""
    # Not `isinstance`, which takes True for 1.
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{where}: expected a whole number of 0 or more, got {value!r}; the state is corrupt")
    return value


def number(value: Any, where: str, expected: str = "finite", holds: Callable[[float], bool] = isfinite) -> float:
    """Check a saved number and return it.

    Args:
        value: the saved value.
        where: name of the value in the error message.
        expected: the condition `holds` in words, for the error message.
        holds: returns whether a number is allowed.

    Raises:
        ValueError: the value is not a number, or the number is not allowed.
    """
    if type(value) in (int, float) and holds(value):
        return value
    raise ValueError(f"{where}: expected a number that is {expected}, got {value!r}; the state is corrupt")


def amount(value: Any, where: str, expected: str = "finite", holds: Callable[[float], bool] = isfinite) -> float | None:
    """Like `number`, but the saved value may be None."""
    return None if value is None else number(value, where, f"{expected}, or null", holds)


def is_rate(value: float) -> bool:
    """Whether a number is in [0, 1]."""
    return 0 <= value <= 1


def naturals(values: Any, where: str) -> list[int]:
    """Return a saved list of counts or ids. Raise a ValueError if it is not a list of whole numbers of 0 or more."""
    if not isinstance(values, list):
        raise ValueError(f"{where}: expected a list, got {type(values).__name__}; the state is corrupt")
    return [natural(value, where) for value in cast("list[Any]", values)]


def pack_tree(value: Any) -> Any:
    """Return a copy of nested dictionaries and lists in which every array is packed."""
    if isinstance(value, np.ndarray):
        return pack(cast("NDArray[Any]", value))
    if isinstance(value, dict):
        return {key: pack_tree(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [pack_tree(item) for item in cast("list[Any]", value)]
    return value


def unpack_tree(value: Any) -> Any:
    """The inverse of `pack_tree`."""
    if isinstance(value, dict):
        mapping = cast("dict[str, Any]", value)
        if mapping.keys() == {"dtype", "shape", "base64"}:
            return unpack(cast("Packed", mapping))
        return {key: unpack_tree(item) for key, item in mapping.items()}
    if isinstance(value, list):
        return [unpack_tree(item) for item in cast("list[Any]", value)]
    return value


def exact_keys(state: Mapping[str, Any], expected: Iterable[str], where: str) -> None:
    """Raise a ValueError that names the missing and the unknown keys, unless the mapping has exactly these keys."""
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{where}: expected a dictionary, got {type(state).__name__}; not a state of this version")
    # Unknown keys are refused too: whatever they mean to the program that wrote them would be lost.
    missing, unknown = set(expected) - set(state), set(state) - set(expected)
    if missing or unknown:
        raise ValueError(
            f"{where}: missing keys {sorted(missing)}, unknown keys {sorted(map(str, unknown))}; not a state of this version"
        )


def describe(value: Any) -> Any:
    """Return a frozen value as nested plain data. Two recipes are the same if their descriptions are equal.

    A dataclass becomes {"is": type, field: value, ...}. A function becomes its import path.

    Raises:
        TypeError: the value contains a lambda, a closure or another object without a stable description.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        strict = not isinstance(value, float) or isfinite(value)
        return value if strict else str(value)  # JSON has no infinity or NaN
    if isinstance(value, np.generic):
        return cast("np.generic[Any]", value).item()
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        described = {field.name: describe(getattr(value, field.name)) for field in fields(value)}
        return {"is": f"{kind.__module__}:{kind.__qualname__}"} | described
    # Closures and lambdas have no name under which two runs could find that they are the same.
    if isinstance(value, types.FunctionType) and value.__closure__ is None and "<lambda>" not in value.__qualname__:
        return f"{value.__module__}:{value.__qualname__}"
    raise TypeError(
        f"{value!r} has no stable description, so its recipe cannot be compared with the recipe in a checkpoint; "
        "write rules as frozen dataclasses, and kernels as functions of a module"
    )


def differences(saved: Any, given: Any, path: str = "recipe") -> Iterator[str]:
    """List the places where two described values differ, one line for each."""
    if isinstance(saved, dict) and isinstance(given, dict):
        left, right = cast("dict[str, Any]", saved), cast("dict[str, Any]", given)
        for key in dict.fromkeys([*left, *right]):
            yield from differences(left.get(key), right.get(key), f"{path}.{key}")
    elif (
        isinstance(saved, list)
        and isinstance(given, list)
        and len(cast("list[Any]", saved)) == len(cast("list[Any]", given))
    ):
        for index, (one, other) in enumerate(zip(cast("list[Any]", saved), cast("list[Any]", given), strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif saved != given:
        yield f"{path}: saved {saved!r}, given {given!r}"
