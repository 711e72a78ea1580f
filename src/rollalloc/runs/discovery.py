"""Finds runs of rollalloc, TRL and verl in folders, and groups the runs that are compared with one another."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from rollalloc.runs.reader import read_run
from rollalloc.runs.recorded import RecordedRun
from rollalloc.runs.trl_log import is_checkpoint, state_in
from rollalloc.runs.verl_run import is_log

_DEEPEST = 3  # levels of folders to search; enough for comparisons on several tasks in one folder


def run_folders(folder: Path) -> list[Path]:
    """All runs in a folder, sorted by name. The folder itself may be a run.

    A run is a folder with our `run.json` or with TRL's `trainer_state.json`, or a log file of verl. A run that is also
    reached by symbolic links is returned once, with its real path if that is in the folder. A folder that does not exist
    has no runs.

    Raises:
        NotADirectoryError: the path is not a folder.
        OSError: the folder cannot be read.
    """
    runs: list[Path] = []
    visited: set[tuple[int, int]] = set()
    waiting, links = deque([(folder, 0)]), deque[tuple[Path, int]]()
    while waiting or links:
        place, depth = (waiting or links).popleft()
        try:
            status = place.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            if os.path.lexists(place / "run.json") or (state_in(place) is not None and not _within_trl(place, folder)):
                runs.append(place)
            else:
                runs += [path for path in place.glob("*.jsonl") if is_log(path)]
            if depth < _DEEPEST:
                for entry in _folders_in(place):
                    (links if entry.is_symlink() else waiting).append((place / entry.name, depth + 1))
        except FileNotFoundError:
            continue
        except OSError:
            if place == folder:
                raise
    return sorted(runs, key=natural)


def _within_trl(place: Path, folder: Path) -> bool:
    """Whether a folder is a checkpoint of a TRL run. The folder that the user named does not count as one."""
    return place != folder and is_checkpoint(place)


def _folders_in(place: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(place) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    yield entry
            except OSError:  # for example, symbolic links that form a circle
                continue


def comparisons(folder: Path) -> dict[Path, list[RecordedRun]]:
    """The runs in a folder, grouped by their parent folders. The runs of a group are compared with one another.

    Args:
        folder: folder of a run, of a comparison, or of several comparisons.

    Raises:
        FileNotFoundError: there is no run in the folder.
        OSError: the folder cannot be read.
    """
    groups: dict[Path, list[RecordedRun]] = {}
    for place in run_folders(folder):
        groups.setdefault(folder if place == folder else place.parent, []).append(read_run(place))
    if not groups:
        raise FileNotFoundError(
            f"expected the folder of a run, or of runs, got {folder}: it has neither a run.json, which `rollalloc train` "
            "and `rollalloc compare` write, nor TRL's checkpoint-*/trainer_state.json, nor a log of verl's file logger"
        )
    return groups


def natural(path: Path) -> list[str | int]:
    """A sort key for paths that puts seed 2 before seed 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]
