"""Atomic writes: a file, or a text appended to a file, is written completely or not at all.

A new file is written under a temporary name in the same folder, synced to the disk, and then renamed.
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
    """A context that yields the path of a temporary file. If the context ends without an error, this file replaces `path`.

    At the beginning, temporary files of killed processes are removed from the same folder.

    Args:
        path: the file to write. Missing folders are created. The temporary file has the same suffix and a random name, so
            two processes may write the same `path`.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. The message names the file.
    """
    with naming(path):
        # The path is itself the temporary file of an outer `written`, which renames it later.
        if _PARTIAL.fullmatch(path.name) and path.is_file():
            yield path
            sync(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(path.parent)
        beside = path.with_name(f"{_PREFIX}{token_hex(8)}{path.suffix}")
        with beside.open("xb") as mine:  # "x": never overwrite a file
            with suppress(OSError):  # a file system without locks
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that `remove_partials` does not remove it
            try:
                yield beside
                sync(beside)
                beside.replace(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Lone surrogates are written as question marks.

    Raises:
        OSError: the file cannot be written. The message names the file.
    """
    with written(path) as beside:
        beside.write_text(text, encoding="utf-8", errors="replace")


def append_text(path: Path, text: str) -> None:
    """Append to a text file: all of the text, or nothing. The file is created if it does not exist.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. The message names the file.
    """
    with naming(path), path.open("ab", buffering=0) as file:
        size, left = os.fstat(file.fileno()).st_size, memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(size)  # otherwise the next line would follow the incomplete text
            raise


def remove_partials(folder: Path) -> None:
    """Remove temporary files of processes that were killed. Files that are still being written are kept."""
    with suppress(OSError):  # if the folder cannot be read, a later write will raise the error
        for entry in [entry for entry in os.scandir(folder) if _PARTIAL.fullmatch(entry.name)]:
            if entry.is_file(follow_symlinks=False):
                with suppress(OSError), open(entry.path, "rb") as left:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context that adds the file's name to an OSError that lacks it, such as the error for a full disk.

    Raises:
        OSError: the error that was raised in the context, with the file's name. For a full disk, it also says what to do.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        reason = os.strerror(error.errno)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += "; free some space, then repeat or resume"
        raise OSError(error.errno, reason, str(path)) from error


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
