"""Regular files: opened without blocking, read line by line, and written completely or not at all.

Other kinds of files, such as FIFOs and devices, are errors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from secrets import token_hex

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


LONGEST = 1 << 20  # bytes; a longer line counts as damaged


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading. It may be a link to a file in the same folder.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file is of another kind, such as a FIFO; it is a link out of its folder; or it cannot be read.
    """
    try:
        # lstat, because it distinguishes a missing file from a broken link
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


def lines_of(path: Path) -> Iterator[tuple[int, bytes | None, bool]]:
    """Yield each line of a file: its number from 1, its bytes, and whether it ends with a line break.

    A last line without a line break may not be complete yet. For a line longer than `LONGEST`, the bytes are None.

    Raises:
        OSError: the file cannot be opened, see `open_regular`.
    """
    with BufferedReader(open_regular(path)) as file:
        number, complete = 0, True
        while complete and (line := file.readline(LONGEST + 1)):
            number, complete = number + 1, line.endswith(b"\n")
            too_long = len(line) > LONGEST and not complete
            while len(line) > LONGEST and not complete:
                line = file.readline(LONGEST + 1)
                complete = line.endswith(b"\n")
            yield number, None if too_long else line.removesuffix(b"\n"), complete


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
