"""What a run of rollalloc recorded of itself: what it paid, its recipe, its batches, and how often each prompt was solved.

A framework's log of rollouts lacks the rollouts that the recipe left out, so commands that read such a log also read this.
Every driver saves the core's state with its checkpoints, and this module reads the newest state of any driver.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from rollalloc.core.packing import unpack
from rollalloc.files.names import ALLOCATOR, CHECKPOINTS
from rollalloc.files.regular import opened
from rollalloc.named import name_of
from rollalloc.runs.reader import read_run
from rollalloc.runs.recorded import RecordedRun
from rollalloc.runs.values import parsed

_LONGEST = 1 << 30  # bytes of a state
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError, zlib.error, RecursionError)


@dataclass(frozen=True, eq=False)
class OwnRun:
    """A run of rollalloc, by its own records.

    Attributes:
        folder: the run's folder.
        accounts: number of rollouts by cause.
        source: the file with the newest state, or the folder if only the metrics were read.
        step: updates of the weights that the accounts cover; None if unknown.
        recipe: its name; "" for a recipe that has none.
        parameters: parameters of the recipe, as far as they were recorded.
        groups: usual number of groups in a batch; 0 if unknown.
        rows: usual number of rows in a batch; 0 if unknown.
        rows_at: number of rows of each batch, by the step at which the framework logged it.
        attempts_N: number of scored rollouts of each prompt; None if no state was found.
        successes_N: sum of their metrics; None if no state was found.
    """

    folder: Path
    accounts: Mapping[str, int]
    source: str
    step: int | None = None
    recipe: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    groups: int = 0
    rows: int = 0
    rows_at: Mapping[int, int] = field(default_factory=dict[int, int])
    attempts_N: NDArray[np.int64] | None = None
    successes_N: NDArray[np.float64] | None = None

    @property
    def paid(self) -> int:
        """Number of rollouts that have ended."""
        return sum(self.accounts.values()) - self.accounts.get("open", 0)

    @property
    def each(self) -> int:
        """Usual number of rows per group, at least 1; 0 if unknown."""
        return max(1, round(self.rows / self.groups)) if self.groups else 0


def own_run(folder: Path, log: Path | None = None) -> OwnRun | None:
    """What the run in a folder recorded of itself; None if it is not a run of rollalloc.

    Args:
        folder: the folder of a native run, of Tinker's or TRL's, or of verl's checkpoints.
        log: the file of verl's `file` logger; None: there is none.
    """
    run = read_run(folder if log is None else log)
    own = next(_saved(folder), OwnRun(folder, {}, ""))
    if sum(run.accounts.values()) > sum(own.accounts.values()):
        own = replace(own, accounts=run.accounts, source=(log or folder).name, step=run.last.get("version"))
    if not own.accounts:
        return None
    if "parameters" in run.description:
        recipe = str(run.description.get("recipe") or own.recipe)
        own = replace(own, recipe=recipe, parameters=run.description["parameters"])
    return replace(own, **_batches(run))


def _batches(run: RecordedRun) -> dict[str, Any]:
    fresh = [
        (batch["version"], batch["groups"], batch["rows"] - batch.get("replayed", 0))
        for batch in run.batches
        if {"version", "groups", "rows"} <= batch.keys()
    ]
    if not fresh:
        return {}
    _, groups, rows = zip(*fresh, strict=True)
    return {"groups": round(median(groups)), "rows": round(median(rows)), "rows_at": {at: n for at, _, n in fresh}}


# -------------------------------------------------------------------------------------------------------------- states


def _saved(folder: Path) -> Iterator[OwnRun]:
    """Yield the run as each readable state of the core in a folder describes it, the newest first."""
    places: list[tuple[Path, Callable[[dict[str, Any]], Any]]] = [
        (folder / ALLOCATOR, lambda state: state),
        *((place / "state.json", lambda state: state["allocator"]) for place in _numbered(folder / CHECKPOINTS, "")),
        *(
            (inner / "allocator.safetensors", lambda state: state["state"])
            for place in _numbered(folder, "checkpoint-")
            for inner in _numbered(place / "rollalloc" / CHECKPOINTS, "")
        ),
        *(
            (place / "rollalloc.json", lambda state: state["rounds"]["allocator"])
            for place in _numbered(folder, "global_step_")
        ),
    ]
    for path, inside in places:
        named = path.relative_to(folder)
        try:
            state = inside(_read(path))
            accounts, statistics = state["accounts"], state["statistics"]
            own = OwnRun(
                folder=folder,
                accounts=accounts | {"open": state["budgets"]["paid"] - sum(accounts.values())},
                source=named.parts[0] if path.suffix == ".safetensors" else str(named),  # TRL: the checkpoint is enough
                step=state.get("version"),
                recipe=name_of(state.get("recipe")) or "",
                attempts_N=unpack(statistics["attempts_N"]).astype(np.int64),
                successes_N=unpack(statistics["successes_N"]),
            )
        except _UNREADABLE:  # it is not there, incomplete, or of another version
            continue
        yield own


def _numbered(folder: Path, prefix: str) -> list[Path]:
    """The folders that are named by a prefix and a number, the highest number first."""
    places = [place for place in folder.glob(f"{prefix}*") if place.name.removeprefix(prefix).isdecimal()]
    return sorted(places, key=lambda place: -int(place.name.removeprefix(prefix)))


def _read(path: Path) -> dict[str, Any]:
    """Read a state: JSON, or with TRL, compressed JSON in a tensor.

    Raises:
        OSError, ValueError, KeyError, SafetensorError, zlib.error: there is none, or it cannot be read.
    """
    with opened(path) as file:
        content = file.read(_LONGEST + 1)
    if path.suffix == ".safetensors":
        content = zlib.decompressobj().decompress(load_tensors(content)["json"].tobytes(), _LONGEST + 1)
    if len(content) > _LONGEST:
        raise ValueError(f"the state is longer than {_LONGEST:,} bytes")
    return parsed(content)
