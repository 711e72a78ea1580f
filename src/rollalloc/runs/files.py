"""Files of a run's folder, which anyone may have put there: read without waiting, without end, and not from elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from hashlib import sha256
from io import FileIO
from pathlib import Path

from rollalloc.files.names import DESCRIPTION, METRICS
from rollalloc.files.opening import opened

_CHUNK = 1 << 20  # bytes read at a time
LONGEST = 1 << 20  # bytes of a line; a longer one is damage
_COMPARED = 1 << 12  # bytes before the place read up to that tell whether the file is still the one that was read


def open_regular(path: Path) -> FileIO:
    """Open a file to read it, where it is a regular one and lies in its folder; a link may lead within that folder only.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is of another kind, as a FIFO, which would be waited for; a link out of its folder; not readable.
    """
    try:
        # lstat tells a file that is not there from a link to nowhere.
        link, real = stat.S_ISLNK(path.lstat().st_mode), Path(os.path.realpath(path, strict=True))
        if link and not real.is_relative_to(os.path.realpath(path.parent)):
            raise OSError("it is a link that leads out of its folder; put the file itself there")
        return opened(real, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise OSError("it is a link to a file that is not there") from error
        raise


def why(error: OSError) -> str:
    """What went wrong with a file, without its path."""
    return error.strerror or str(error)


def stamp_of(path: Path) -> tuple[int, ...]:
    """What changes when a file is written: device, inode, size, nanoseconds; zeros where there is none that can be asked."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return (0, 0, 0, 0)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def digest_of(folder: Path, upto: int | None = None) -> str:
    """SHA-256 of what a run was told to do and of what it wrote: its `run.json`, where it has one, and its metrics.

    A run's last line holds that of all lines before it.

    Args:
        folder: of the run.
        upto: bytes of the metrics; None: all.

    Raises:
        OSError: as `open_regular`; it has no metrics.
    """
    digest = sha256()
    if os.path.lexists(folder / DESCRIPTION):
        with open_regular(folder / DESCRIPTION) as file:
            digest.update(file.readall())
    digest.update(b"\0")
    with open_regular(folder / METRICS) as file:
        left = os.fstat(file.fileno()).st_size if upto is None else upto
        while left > 0 and (chunk := _read(file, min(_CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


class Growing:
    """A file of lines that is being written: each look reads what was added since the one before.

    A file that was replaced, or cut and written on, as a resumed run does, is read anew. Memory is bounded by the longest
    line.

    Attributes:
        number: of the last whole line that was read, from 1.
        rest: what follows it: the line being written, or corrupt.
        too_long: whether that is longer than a line may be; then it is not kept.
        unread: bytes that the last look left unread, for its limit.
        bytes_read: by all looks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        self.begin()

    def begin(self) -> None:
        """Read from the beginning at the next look."""
        self._at, self._before = 0, b""
        self.number, self.rest, self.unread = 0, b"", 0
        self.too_long = False

    def goes_on(self) -> bool:
        """Whether the file still begins with what was read of it.

        Raises:
            OSError: as `open_regular`.
        """
        with open_regular(self._path) as file:
            file.seek(self._at - len(self._before))
            before = _read(file, len(self._before))
        self.bytes_read += len(before)
        return before == self._before

    def look(self, limit: int | None = None) -> Iterator[tuple[int, bytes | None]]:
        """Each whole line that was added, with its number, of about so many bytes; None: one too long to be read.

        Raises:
            OSError: as `open_regular`.
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
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        for line in whole:
            self.number += 1
            yield self.number, None if self.too_long or len(line) > LONGEST else line
            self.too_long = False
        if len(self.rest) > LONGEST:
            self.too_long, self.rest = True, b""


def _read(file: FileIO, size: int) -> bytes:
    """So many bytes, or fewer at the end of the file."""
    found = bytearray()
    while len(found) < size and (more := file.read(size - len(found))):
        found += more
    return bytes(found)
