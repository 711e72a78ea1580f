"""Finds runs of rollalloc, TRL and verl in folders, and groups the runs that are compared with one another."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rollalloc.runs.reader import read_run
from rollalloc.runs.recorded import RecordedRun
from rollalloc.runs.trl_log import is_checkpoint, state_in
from rollalloc.runs.verl_run import is_log

_DEEPEST = 3  # levels of folders to search; enough for comparisons on several tasks in one folder


def run_folders(folder: Path) -> list[Path]:
    """All runs in a folder, sorted by name. The folder itself may be a run.

    A run is a folder with our `run.json`, a folder with TRL's `trainer_state.json`, or a log file of verl. (verl writes all
    logs of a project into one folder.) Symbolic links are followed, and a folder that is reached twice counts once. A folder
    that does not exist has no runs.

    Raises:
        NotADirectoryError: the path is not a folder.
        OSError: the folder cannot be read.
    """
    runs: list[Path] = []
    # Follow links last: even if a link elsewhere points to a run, the run must be found in its own folder, together with the
    # runs that it is compared with.
    waiting, links, visited = [(folder, 0)] if folder.exists() else [], list[tuple[Path, int]](), set[Path]()
    while waiting or links:
        place, depth = (waiting or links).pop(0)
        if (real := place.resolve()) in visited:
            continue
        visited.add(real)
        # A checkpoint of TRL is a run only if the user names it.
        of_trl = state_in(place) is not None and (place == folder or not is_checkpoint(place))
        if os.path.lexists(place / "run.json") or of_trl:
            runs.append(place)
        else:
            runs += [path for path in place.glob("*.jsonl") if is_log(path)]
        if depth < _DEEPEST:
            for below in _folders_in(place, may_fail=place != folder):
                (links if below.is_symlink() else waiting).append((below, depth + 1))
    return sorted(runs, key=natural)


def _folders_in(place: Path, *, may_fail: bool) -> list[Path]:
    try:
        return [path for path in place.iterdir() if path.is_dir()]
    except OSError:
        if may_fail:
            return []
        raise


def comparisons(*folders: Path) -> dict[Path, list[RecordedRun]]:
    """The runs in some folders, grouped by their parent folders. The runs of a group are compared with one another.

    Several folders that are each a run form one group, because somebody asked to see them together.

    Args:
        folders: folders of a run, of a comparison, or of several comparisons. A run in two of them counts once.

    Raises:
        FileNotFoundError: there is no run in one of the folders.
        OSError: a folder cannot be read.
    """
    groups: dict[Path, list[RecordedRun]] = {}
    seen: set[Path] = set()
    for folder in folders:
        places = run_folders(folder)
        if not places:
            raise FileNotFoundError(
                f"expected the folder of one or several runs, got {folder}: it has no run.json (of `rollalloc train` or "
                "`rollalloc compare`), no checkpoint-*/trainer_state.json (of TRL) and no log of verl's file logger"
            )
        for place in places:
            if (real := place.resolve()) not in seen:
                seen.add(real)
                groups.setdefault(folders[0] if place == folder else place.parent, []).append(read_run(place))
    return groups


def natural(path: Path) -> list[str | int]:
    """A sort key for paths that puts seed 2 before seed 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]
