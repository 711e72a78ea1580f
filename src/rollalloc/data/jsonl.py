"""Reads JSON lines. An invalid line becomes an `Unreadable` and does not raise an error."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

PACKED = {".zst": "zstd", ".gz": "gzip"}  # suffixes of packed files that can be read without unpacking
LONGEST = 64 << 20  # bytes of a line, with its end; longer lines are skipped and never held in memory


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that is not valid.

    Attributes:
        why: the reason, for a message.
        begins: the first bytes of the line, as a Python literal.
    """

    why: str
    begins: str


def read_lines(path: Path, *, unique: bool = False) -> Iterator[tuple[int, Any]]:
    """Read the lines that are not blank.

    Args:
        path: path of the file, which may be packed.
        unique: True: a line in which an object repeats a key is `Unreadable`. False: the last value counts, as in `json`.

    Yields:
        The number of the line, from 1, and its JSON value or an `Unreadable`.

    Raises:
        OSError: the file cannot be read, or a packed file is damaged or cut off.
    """
    decode = decode_once if unique else decoded
    with _opened(path) as file:
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
            except (ValueError, RecursionError) as error:  # also raised for integers of 5,000 digits
                why = "nested too deep" if isinstance(error, RecursionError) else str(error)
                yield number, Unreadable(why, repr(line[:40]))


def _opened(path: Path) -> Any:
    if path.suffix not in PACKED:
        return path.open("rb")
    import pyarrow

    return BufferedReader(pyarrow.input_stream(str(path), compression=PACKED[path.suffix]))


def decoded(line: bytes) -> Any:
    """Parse a line of JSON. The result is the same as with Python's `json`.

    orjson, which is faster, parses the line if both parsers give the same result for such lines.

    Raises:
        ValueError: not UTF-8, or not JSON.
        RecursionError: nested too deeply.
    """
    shape = line.translate(_SHAPE)
    if shape.count(b"[") <= _SHALLOW and _BEYOND_64_BITS not in shape:
        try:
            return orjson.loads(line)
        except ValueError:  # `json` accepts more: NaN, lone surrogates and 1e400
            pass
    return json.loads(line.decode("utf-8"))


# orjson differs in two ways: it stops at 1,024 levels of nesting, and it converts integers beyond 64 bits to floats.
_SHALLOW = 512
_SHAPE = bytes.maketrans(b"123456789{", b"000000000[")
_BEYOND_64_BITS = b"0" * 19


def decode_once(line: bytes) -> Any:
    """Parse JSON in which no object has a repeated key.

    Raises:
        ValueError: not UTF-8, not JSON, or with a repeated key.
        RecursionError: nested too deeply.
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
