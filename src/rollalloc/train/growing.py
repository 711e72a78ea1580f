"""The files of a run that get line after line: stamped at each checkpoint, checked and cut back when a run resumes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rollalloc.files.atomic import sync
from rollalloc.files.names import METRICS, ROLLOUTS
from rollalloc.files.stamps import GrowingStamp, Stamp

_GROWING = (METRICS, ROLLOUTS)


class GrowingFiles:
    """The metrics and the log of rollouts in a run's folder.

    A resumed run goes on from figures that these files hold, so what stands in them before a checkpoint must be what the
    run wrote: the checkpoint has a stamp of it (see `rollalloc.files.stamps`).

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._growing = {name: GrowingStamp(folder / name) for name in _GROWING}

    def stamps(self) -> dict[str, Stamp]:
        """A stamp of each file that is there, once the disk holds it.

        Raises:
            OSError: one cannot be read or synced.
        """
        there = [name for name in _GROWING if (self._folder / name).exists()]
        for name in there:
            sync(self._folder / name)
        return {name: self._growing[name].renewed() for name in there}

    def why_changed(self, saved: Mapping[str, Stamp]) -> str | None:
        """Why the files do not begin with what a checkpoint says, in words; None where they do."""
        growing = {name: GrowingStamp(self._folder / name) for name in saved}
        reason = next(filter(None, (growing[name].why_changed(stamp) for name, stamp in saved.items())), None)
        if reason is None:
            self._growing |= growing  # what is stamped next begins with what was just found to be right
        return reason

    def cut(self, saved: Mapping[str, Stamp]) -> None:
        """Remove from the files what was written after a checkpoint."""
        for name in _GROWING:
            if (self._folder / name).exists():
                os.truncate(self._folder / name, saved[name]["bytes"] if name in saved else 0)
