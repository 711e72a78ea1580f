"""Reads the files of a run's folder safely, because they may come from anyone.

Reading never blocks, not even on a FIFO. It needs a bounded amount of memory. It does not follow links that lead out of
the folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path

from rollalloc.files.opening import opened

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
