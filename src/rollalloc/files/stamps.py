"""A stamp is the size and SHA-256 of a file. It shows later whether the file still has the same contents.

The stamp of a file that grows, such as `metrics.jsonl`, covers its first bytes, so appending does not invalidate it.

    stamp = stamp_of(path)               # store it elsewhere, for example in a checkpoint
    if reason := GrowingStamp(path).why_changed(stamp):
        raise ValueError(f"{reason}; put it back from a copy, or start afresh")
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TypedDict

from rollalloc.files.regular import opened

_CHUNK = 1 << 20  # bytes read at a time


class Stamp(TypedDict):
    """Size and SHA-256 of a file, or of the first bytes of a file that grows."""

    bytes: int
    sha256: str


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file.

    Args:
        path: path of a regular file.

    Raises:
        OSError: the file does not exist, is not a regular file, or cannot be read.
    """
    return GrowingStamp(path).renewed()


class GrowingStamp:
    """The stamp of a file that only grows. Each call of `renewed` reads only the bytes appended since the last call.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest, self._bytes = sha256(), 0

    def renewed(self, upto: int | None = None) -> Stamp:
        """The stamp of the whole file, or of its first `upto` bytes. `upto` must not decrease from call to call.

        Raises:
            OSError: the file does not exist, is not a regular file, or cannot be read.
        """
        with opened(self.path) as file:
            file.seek(self._bytes)
            while chunk := file.read(_CHUNK if upto is None else max(0, min(_CHUNK, upto - self._bytes))):
                self._digest.update(chunk)
                self._bytes += len(chunk)
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def why_changed(self, expected: Stamp) -> str | None:
        """Check that the file begins with the bytes of a stamp. Later bytes are ignored.

        Returns:
            The change, as text; None if nothing changed.

        Raises:
            OSError: the file is not a regular file, or cannot be read.
        """
        if not self.path.exists():
            return f"{self.path} is gone"
        size = self.path.stat().st_size
        if size < expected["bytes"]:
            return f"{self.path} has {size:,} bytes, but had {expected['bytes']:,}"
        if self.renewed(expected["bytes"]) != expected:
            return f"{self.path} was changed within its first {expected['bytes']:,} bytes (their SHA-256 differs)"
        return None
