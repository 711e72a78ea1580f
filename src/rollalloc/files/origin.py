"""Says when and by what a file was made: the date, the command, and the commit of the code around it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import rollalloc

_PATIENCE_S = 5.0


def origin() -> dict[str, str | None]:
    """The date in UTC, this process's command, the version of rollalloc, and the commit of the working directory.

    The commit ends with "-dirty" if a tracked file differs from it. It is None outside of a git repository.
    """
    name, *arguments = sys.argv or [""]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "command": shlex.join([Path(name).name, *arguments]),
        "commit": _commit(),
        "rollalloc": rollalloc.__version__,
    }


def _commit() -> str | None:
    command = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() or None
