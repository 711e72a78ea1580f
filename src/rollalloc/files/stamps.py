"""A stamp is the size and SHA-256 of a file. It shows later whether the file still has the same contents.

The stamp of a file that grows, such as `metrics.jsonl`, covers its first bytes, so appending does not invalidate it.

    stamp = stamp_of(path)               # store it elsewhere, for example in a checkpoint
    if reason := why_changed(path, stamp):
        raise ValueError(f"{reason}; put it back from a copy, or start afresh")
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TypedDict

from rollalloc.files.opening import opened

_CHUNK = 1 << 20  # bytes read at a time


class Stamp(TypedDict):
    """Size and SHA-256 of a file, or of the first bytes of a file that grows."""

    bytes: int
    sha256: str


def stamp_of(path: Path, upto: int | None = None) -> Stamp:
    """The stamp of a file.

    Args:
        path: path of a regular file.
        upto: number of bytes from its beginning that the stamp covers, at most its size; None: all.

    Raises:
        OSError: it does not exist, is not a regular file, or cannot be read.
    """
    digest, size = sha256(), 0
    with opened(path) as file:
        while chunk := file.read(_CHUNK if upto is None else min(_CHUNK, upto - size)):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def why_changed(path: Path, expected: Stamp) -> str | None:
    """Check that a file begins with the bytes of a stamp. Bytes after them are ignored.

    Returns:
        What changed, as text; None if nothing did.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    if not path.exists():
        return f"{path} is gone"
    size = path.stat().st_size
    if size < expected["bytes"]:
        return f"{path} has {size:,} bytes, but had {expected['bytes']:,}"
    if stamp_of(path, expected["bytes"]) != expected:
        return f"{path} was changed within its first {expected['bytes']:,} bytes (their SHA-256 differs)"
    return None
