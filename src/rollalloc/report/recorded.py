"""A run as its folder tells it: finished, running or failed, of this version or an older one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any

from rollalloc.bench.cost import Curve, curve_of, read_metrics

Line = dict[str, Any]
_IN_EVERY_LINE = {"kind": str, "rollouts_paid": int, "tokens_paid": int, "seconds": (int, float), "accounts": dict}
_IN_A_DESCRIPTION = {"settings": (dict, NoneType), "source": (dict, NoneType), "max_rollouts": (int, NoneType)}
_DEEPEST = ("run.json", "*/run.json", "*/*/run.json", "*/*/*/run.json")  # a folder of comparisons of several tasks


@dataclass(frozen=True)
class RecordedRun:
    """What is known of a run; fields that its version did not write are just not there.

    Attributes:
        folder: of the run.
        description: what `run.json` says; empty where it cannot be read.
        metrics: the lines of `metrics.jsonl`.
        problem: what could not be read; None: nothing.
        changed: when its files were last written, in seconds since the epoch; 0: never.
    """

    folder: Path
    description: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Sequence[Line] = ()
    problem: str | None = None
    changed: float = 0.0

    @property
    def label(self) -> str:
        """What the run is called among others."""
        return str(self.description.get("label") or self.description.get("recipe") or self.folder.name)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The trainer's settings."""
        return self.description.get("settings") or {}

    @property
    def seed(self) -> int | None:
        """The run's seed, where it is known."""
        return self.settings.get("seed")

    @property
    def target(self) -> float | None:
        """Held-out accuracy at which the run ends."""
        return self.settings.get("target")

    @property
    def budget(self) -> int | None:
        """Rollouts that the run may pay; None: no limit, or none known."""
        return self.description.get("max_rollouts")

    @property
    def last(self) -> Line | None:
        """The newest line of the metrics that says what is paid by now: an evaluation's may be of weights before."""
        known = (line for line in reversed(self.metrics) if line["kind"] != "eval")
        return next(known, self.metrics[-1] if self.metrics else None)

    @property
    def why(self) -> str | None:
        """Why the run ended; None: it has not."""
        return str(self.last.get("why", "it ended")) if self.last and self.last.get("kind") == "end" else None

    @property
    def reached(self) -> bool:
        """Whether the run ended because it reached its target."""
        return (self.why or "").startswith("target")

    @property
    def paid(self) -> int:
        """Rollouts paid so far."""
        return self.last["rollouts_paid"] if self.last else 0

    @property
    def accounts(self) -> Mapping[str, int]:
        """Rollouts paid so far, by cause."""
        return self.last["accounts"] if self.last else {}

    @property
    def batches(self) -> list[Line]:
        """The lines of the batches."""
        return [line for line in self.metrics if line["kind"] == "batch"]

    @property
    def curve(self) -> Curve:
        """Held-out accuracy against what was paid."""
        return curve_of(self.metrics)


def read_run(folder: Path) -> RecordedRun:
    """The run of a folder; what cannot be read is said in its `problem`, not raised."""
    problems: list[str] = []
    description: Mapping[str, Any] = {}
    metrics: Sequence[Line] = ()
    try:
        description = _object(json.loads((folder / "run.json").read_text(encoding="utf-8")), _IN_A_DESCRIPTION)
    except (OSError, ValueError) as error:
        problems.append(f"run.json: {error}")
    try:
        if (folder / "metrics.jsonl").exists():
            metrics = [_on_grid(_object(line, _IN_EVERY_LINE)) for line in read_metrics(folder / "metrics.jsonl")]
    except (OSError, ValueError) as error:
        problems.append(f"metrics.jsonl: {error}")
    return RecordedRun(folder, description, metrics, "; ".join(problems) or None, max(_stamps(folder)) / 1e9)


def _object(parsed: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object that holds values of these kinds under these names.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(parsed, dict) or not all(isinstance(parsed.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"expected an object with its {', '.join(kinds)}, got {str(parsed)[:80]}")
    return parsed


def _on_grid(line: Line) -> Line:
    """An evaluation of an older version stands at the rollouts paid: those had no grid."""
    return {"at": line["rollouts_paid"]} | line if line["kind"] == "eval" else line


class Reader:
    """`read_run` that reads a run again only where its files have changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], RecordedRun]] = {}

    def __call__(self, folder: Path) -> RecordedRun:
        stamps = _stamps(folder)
        known = self._known.get(folder)
        if known is None or known[0] != stamps:
            known = self._known[folder] = (stamps, read_run(folder))
        return known[1]


def _stamps(folder: Path) -> tuple[int, ...]:
    """When the files of a run were written, in nanoseconds; 0 for one that is not there."""
    files = (folder / "run.json", folder / "metrics.jsonl")
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)


def run_folders(folder: Path) -> list[Path]:
    """Every run in a folder, itself included, in order of their names; finds them by their `run.json`."""
    found = (path.parent for pattern in _DEEPEST for path in folder.glob(pattern))
    return sorted(found, key=_natural)


def comparisons(folder: Path, read: Callable[[Path], RecordedRun] = read_run) -> dict[Path, list[RecordedRun]]:
    """The runs in a folder by the folder that holds them: those of one are compared with one another.

    Args:
        folder: of a run, of a comparison, or of several.
        read: how a run is read.

    Raises:
        FileNotFoundError: there is no run in the folder.
    """
    found: dict[Path, list[RecordedRun]] = {}
    for place in run_folders(folder):
        found.setdefault(folder if place == folder else place.parent, []).append(read(place))
    if not found:
        raise FileNotFoundError(
            f"expected the folder of a run, or of runs, with a run.json in it, got {folder}; `rollalloc train` and "
            "`rollalloc compare` write them"
        )
    return found


def is_over(folder: Path, runs: Sequence[RecordedRun]) -> bool:
    """Whether all has ended. Of a comparison some runs may not have begun: it is over when it wrote its results."""
    alone = len(runs) == 1 and runs[0].folder == folder
    return all(run.why for run in runs) and (alone or any(folder.glob("**/results.json")))


def remaining(run: RecordedRun) -> timedelta | None:
    """How long until the budget is spent at the pace so far; None where either is not known."""
    budget, last = run.budget, run.last
    if run.why or budget is None or last is None or not last["rollouts_paid"]:
        return None
    return timedelta(seconds=round(last["seconds"] * max(0, budget - run.paid) / run.paid))


def state(run: RecordedRun) -> str:
    """What the run is at, in a word or two."""
    if run.why:
        return "target reached" if run.reached else "ended"
    return "starting" if not run.metrics else "not ended"


def by_label(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Runs that differ in their seed only, together."""
    found: dict[str, list[RecordedRun]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def _natural(path: Path) -> list[str | int]:
    """Sorts seed 2 before seed 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]
