"""Opens regular files without blocking. Other kinds of files, such as FIFOs and devices, are errors."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

_OTHER_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def opened(path: Path, flags: int = os.O_RDONLY) -> FileIO:
    """Open a regular file.

    Args:
        path: path of the file.
        flags: flags of `os.open`; by default for reading.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file is not a regular file, or cannot be opened.
    """
    if path.exists():
        _refuse_other_kinds(path, path.stat().st_mode)
    mode = "r+b" if flags & os.O_RDWR else "rb"
    file = FileIO(os.open(path, flags | os.O_NONBLOCK, 0o666), mode)
    try:
        _refuse_other_kinds(
            path, os.fstat(file.fileno()).st_mode
        )  # the file may have been replaced since the first check
    except OSError:
        file.close()
        raise
    return file


def read_text(path: Path) -> str:
    """Read a regular file as UTF-8.

    Raises:
        OSError: the file does not exist, is not a regular file, or cannot be read.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with opened(path) as file:
        return file.readall().decode("utf-8")


def _refuse_other_kinds(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for is_one, words in _OTHER_KINDS if is_one(mode)), "of another kind")
        raise OSError(errno.EINVAL, f"expected a regular file, but it is {kind}", str(path))
