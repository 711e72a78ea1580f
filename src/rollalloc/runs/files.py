"""Reads the files of a run's folder safely, since anyone may have put them there.

Reading never blocks, as it would on a FIFO, holds a bounded amount of memory, and never follows links out of the folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from rollalloc.files.opening import opened

_CHUNK = 1 << 20  # bytes read at a time
LONGEST = 1 << 20  # bytes; longer lines count as damaged
_COMPARED = 1 << 12  # bytes before the current position; if they changed, the file was replaced


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading. It may be a link, if that does not lead out of the file's folder.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it is of another kind, such as a FIFO; it is a link out of its folder; or it cannot be read.
    """
    try:
        # lstat distinguishes a missing file from a broken link.
        link, real = stat.S_ISLNK(path.lstat().st_mode), Path(os.path.realpath(path, strict=True))
        if link and not real.is_relative_to(os.path.realpath(path.parent)):
            raise OSError("it is a link that leads out of its folder; put the file itself there")
        return opened(real, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise OSError("it is a link to a file that is not there") from error
        raise


def why(error: OSError) -> str:
    """The text of an error, without the file's path."""
    return error.strerror or str(error)


def stamp_of(path: Path) -> tuple[int, ...]:
    """Values that change when a file is written: device, inode, size, time in nanoseconds. Zeros if it cannot be read."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return (0, 0, 0, 0)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Growing:
    """Follows a file of lines that is being written. Each call of `look` reads what was appended since the last.

    If the file was replaced, or cut and continued as by a resumed run, call `begin` to read it from the start; `goes_on`
    tells. Memory is bounded by the longest line.

    Attributes:
        number: number of the last complete line that was read, from 1.
        rest: the bytes after it: a line that is still being written, or corrupt.
        too_long: whether `rest` is longer than `LONGEST`; it is dropped then.
        unread: number of bytes that the last `look` left unread because of its limit.
        bytes_read: number of bytes read so far.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        self.begin()

    def begin(self) -> None:
        """Start over: the next `look` reads from the beginning."""
        self._at, self._before = 0, b""
        self.number, self.rest, self.unread = 0, b"", 0
        self.too_long = False

    def goes_on(self) -> bool:
        """Whether the file still has the bytes that were read last, so that reading can continue.

        Raises:
            OSError: the file cannot be opened, see `open_regular`.
        """
        with open_regular(self._path) as file:
            file.seek(self._at - len(self._before))
            before = _read(file, len(self._before))
        self.bytes_read += len(before)
        return before == self._before

    def look(self, limit: int | None = None) -> Iterator[tuple[int, bytes | None]]:
        """Yield each complete line that was appended, with its number; None in place of lines that are too long.

        Args:
            limit: maximum number of bytes to read; None: no limit.

        Raises:
            OSError: the file cannot be opened, see `open_regular`.
        """
        with open_regular(self._path) as file:
            end = os.fstat(file.fileno()).st_size
            upto = end if limit is None else min(end, self._at + limit)
            file.seek(self._at)
            while self._at < upto and (chunk := _read(file, min(_CHUNK, upto - self._at))):
                self._at += len(chunk)
                self.bytes_read += len(chunk)
                self._before = (self._before + chunk)[-_COMPARED:]
                yield from self._lines(chunk)
            self.unread = max(0, end - self._at)

    def _lines(self, chunk: bytes) -> Iterator[tuple[int, bytes | None]]:
        *complete, self.rest = (self.rest + chunk).split(b"\n")
        for line in complete:
            self.number += 1
            yield self.number, None if self.too_long or len(line) > LONGEST else line
            self.too_long = False
        if len(self.rest) > LONGEST:
            self.too_long, self.rest = True, b""


def _read(file: FileIO, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the file."""
    data = bytearray()
    while len(data) < size and (more := file.read(size - len(data))):
        data += more
    return bytes(data)
