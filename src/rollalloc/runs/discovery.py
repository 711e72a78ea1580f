"""Where runs lie, ours and those of TRL and verl, and which of them are compared with one another."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollalloc.runs.reader import read_run
from rollalloc.runs.recorded import RecordedRun
from rollalloc.runs.trl_log import is_checkpoint, state_in
from rollalloc.runs.verl_run import is_log

_DEEPEST = 3  # folders below: a folder of comparisons of several tasks


def run_folders(folder: Path) -> list[Path]:
    """Every run in a folder, itself included, in order of their names.

    A run is a folder with our `run.json` or with TRL's `trainer_state.json`, or a log of verl, which writes those of one
    project into one folder. A folder that links lead to as well is found once, and by its own name where it lies in the
    folder.

    Raises:
        NotADirectoryError: not a folder.
        OSError: the folder cannot be read; one that is not there holds no runs.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting, links = deque([(folder, 0)]), deque[tuple[Path, int]]()
    while waiting or links:
        place, depth = (waiting or links).popleft()
        try:
            here = place.stat()
            if (here.st_dev, here.st_ino) in seen:
                continue
            seen.add((here.st_dev, here.st_ino))
            if os.path.lexists(place / "run.json") or (state_in(place) is not None and not _within_trl(place, folder)):
                found.append(place)
            else:
                found += [path for path in place.glob("*.jsonl") if is_log(path)]
            if depth < _DEEPEST:
                for entry in _folders_in(place):
                    (links if entry.is_symlink() else waiting).append((place / entry.name, depth + 1))
        except FileNotFoundError:
            continue
        except OSError:
            if place == folder:
                raise
    return sorted(found, key=_natural)


def _within_trl(place: Path, folder: Path) -> bool:
    """Whether it is a checkpoint within a run of TRL that is found itself."""
    return place != folder and is_checkpoint(place)


def _folders_in(place: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(place) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    yield entry
            except OSError:  # links in a circle
                continue


def comparisons(folder: Path, read: Callable[[Path], RecordedRun] = read_run) -> dict[Path, list[RecordedRun]]:
    """The runs in a folder by the folder that holds them: those of one are compared with one another.

    Args:
        folder: of a run, of a comparison, or of several.
        read: how a run is read.

    Raises:
        FileNotFoundError: there is no run in the folder.
        OSError: as `run_folders`.
    """
    found: dict[Path, list[RecordedRun]] = {}
    for place in run_folders(folder):
        found.setdefault(folder if place == folder else place.parent, []).append(read(place))
    if not found:
        raise FileNotFoundError(
            f"expected the folder of a run, or of runs, got {folder}: it has neither a run.json, which `rollalloc train` "
            "and `rollalloc compare` write, nor TRL's checkpoint-*/trainer_state.json, nor a log of verl's file logger"
        )
    return found


def is_over(folder: Path, runs: Sequence[RecordedRun]) -> bool:
    """Whether all has ended. Of a comparison some runs may not have begun: it is over when it wrote its results.

    Runs that were trained one by one have no label; they are over when each has ended.
    """
    alone = len(runs) == 1 and runs[0].folder == folder
    return all(run.why and not run.unread for run in runs) and (
        alone or all(_results_beside(run.folder) for run in runs if run.description.get("label"))
    )


def _results_beside(place: Path) -> bool:
    """A comparison's results lie in the folder of its runs, or above that of each task."""
    return any((above / "results.json").is_file() for above in (place.parent, place.parent.parent))


def _natural(path: Path) -> list[str | int]:
    """Sorts seed 2 before seed 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]
