"""Files that are written whole or not at all, and lines that are appended whole or not at all.

A new file is written beside its place, synced to the disk, and then renamed into it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

_PREFIX = ".partial-"
_PARTIAL = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{16}(\.\w+)?")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its place once the disk holds it; on an error the old file stays.

    Files that earlier writers left half written in the same folder, because they were killed, are removed.

    Args:
        path: missing folders are made. The file beside it has the same ending and a name of its own, so that two
            processes that write the same file do not write into each other's.

    Raises:
        OSError: it cannot be written there, e.g. because the disk is full; names the file.
    """
    with naming(path):
        if _PARTIAL.fullmatch(path.name) and path.is_file():  # within another `written`, which renames it
            yield path
            sync(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(path.parent)
        beside = path.with_name(f"{_PREFIX}{token_hex(8)}{path.suffix}")
        with beside.open("xb") as mine:  # never over a file that is there
            with suppress(OSError):  # a file system without locks
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says that it is being written
            try:
                yield beside
                sync(beside)
                beside.replace(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all; half surrogates as question marks.

    Raises:
        OSError: as `written`.
    """
    with written(path) as beside:
        beside.write_text(text, encoding="utf-8", errors="replace")


def append_text(path: Path, text: str) -> None:
    """Append to a text file, all of it or nothing; the file is made where there is none.

    Raises:
        OSError: it cannot be appended to, e.g. because the disk is full; names the file.
    """
    with naming(path), path.open("ab", buffering=0) as file:
        size, left = os.fstat(file.fileno()).st_size, memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(size)  # half a line would spoil the next one
            raise


def remove_partials(folder: Path) -> None:
    """Remove files that `written` left in a folder because its process was killed; none that is being written now."""
    with suppress(OSError):  # a folder that cannot be listed is said where something is written
        for entry in [entry for entry in os.scandir(folder) if _PARTIAL.fullmatch(entry.name)]:
            if entry.is_file(follow_symlinks=False):
                with suppress(OSError), open(entry.path, "rb") as left:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in the errors of writing it: the operating system names none when the disk is full.

    Raises:
        OSError: of the same number, with the file and, for a full disk, what to do.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        what = os.strerror(error.errno)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what += "; free some space, then repeat or resume"
        raise OSError(error.errno, what, str(path)) from error


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's names."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
