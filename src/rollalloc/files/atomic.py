"""Files that are written whole or not at all: beside their place, synced, then renamed into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A new file beside the one to write, which takes its place once the disk holds it; what fails leaves the old one.

    Args:
        path: missing folders are made. The file beside has the same ending, and a name that nobody else has: two who
            write the same file do not write into each other's.

    Raises:
        OSError: it cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".partial-{token_hex(8)}{path.suffix}")
    beside.open("xb").close()  # never over a file that is there
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
        OSError: it cannot be written there.
    """
    with written(path) as beside:
        beside.write_text(text, encoding="utf-8", errors="replace")


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's names."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
