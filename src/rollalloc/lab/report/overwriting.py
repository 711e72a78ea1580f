"""What a report may overwrite: the pages and figures of reports before it, which say so. All else is the user's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rollalloc.runs.files import open_regular

MADE_BY = "rollalloc report"  # in a page's generator, and in a figure's Software
_MARKS = (
    (b"<!doctype html>", f'<meta name="generator" content="{MADE_BY}'.encode()),
    (b"\x89PNG\r\n\x1a\n", f"tEXtSoftware\0{MADE_BY}".encode()),
)
_HEAD = 4096  # bytes in which the mark stands


def refuse_others(files: Sequence[Path]) -> None:
    """Let nothing be overwritten that is not of an earlier report.

    Raises:
        FileExistsError: these are not; they stay as they are.
    """
    if others := [file for file in files if os.path.lexists(file) and not is_own(file)]:
        raise FileExistsError(
            f"the report would overwrite {', '.join(map(str, others))}, which no report of this version wrote; move "
            f"{'it' if len(others) == 1 else 'them'} away, or give the page another folder with --out"
        )


def is_own(file: Path) -> bool:
    """Whether a report wrote the file."""
    try:
        with open_regular(file) as opened:
            head = opened.read(_HEAD)
    except OSError:
        return False
    return not file.is_symlink() and any(head.startswith(begin) and mark in head for begin, mark in _MARKS)
