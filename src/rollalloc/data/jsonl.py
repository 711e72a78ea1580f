"""JSON lines as they come: each line's value, or what is wrong with it. Nothing in a file can raise anything here."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

LONGEST = 64 << 20  # bytes of a line with its end; a longer one is passed over, never held


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that holds no value.

    Attributes:
        why: for a message.
        begins: its first bytes, as Python writes them.
    """

    why: str
    begins: str


def read_lines(path: Path, *, unique: bool = False) -> Iterator[tuple[int, Any]]:
    """Each line that is not blank with its number, from 1: its JSON value, or an `Unreadable`.

    Args:
        path: of the file.
        unique: an object that names a key twice is unreadable; otherwise the last of the two counts, as JSON has it.

    Raises:
        OSError: the file cannot be read.
    """
    decode = decode_once if unique else decoded
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST + 1):
            number += 1
            if len(line) > LONGEST:
                if not line.endswith(b"\n"):
                    _skip_line(file)
                yield number, Unreadable(f"the line is longer than {LONGEST >> 20} MiB", repr(line[:40]))
                continue
            if line.isspace():
                continue
            try:
                yield number, decode(line.removeprefix(BOM_UTF8) if number == 1 else line)
            except (ValueError, RecursionError) as error:  # bytes that are not UTF-8, numbers of 5,000 digits included
                why = "nested too deep" if isinstance(error, RecursionError) else str(error)
                yield number, Unreadable(why, repr(line[:40]))


def decoded(line: bytes) -> Any:
    """The JSON value of a line as the standard library has it, by orjson where that has the same, which is sooner done.

    Raises:
        ValueError: not UTF-8, or not JSON; what orjson refuses, the standard library takes or says what is wrong with.
        RecursionError: nested too deep.
    """
    shape = line.translate(_SHAPE)
    if shape.count(b"[") <= _SHALLOW and _BEYOND_64_BITS not in shape:
        try:
            return orjson.loads(line)
        except ValueError:  # NaN, half a surrogate or 1e400, which the standard library takes
            pass
    return json.loads(line.decode("utf-8"))


# orjson goes 1,024 levels deep, the standard library as deep as the stack, and makes floats of whole numbers beyond 64 bits.
_SHALLOW = 512
_SHAPE = bytes.maketrans(b"123456789{", b"000000000[")
_BEYOND_64_BITS = b"0" * 19


def decode_once(line: bytes) -> Any:
    """The JSON value of some bytes, of which no object names a key twice.

    Raises:
        ValueError: not UTF-8, not JSON, or a key that is there twice.
        RecursionError: nested too deep.
    """
    return _strict.decode(line.decode("utf-8"))


def _skip_line(file: Any) -> None:
    while (rest := file.readline(LONGEST)) and not rest.endswith(b"\n"):
        pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return found


_strict = json.JSONDecoder(object_pairs_hook=_once)
