"""What verl's `file` logger writes of a run: accuracy against what was paid, as of our own runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from rollalloc.data.jsonl import Unreadable, read_lines
from rollalloc.files.text import one_line
from rollalloc.runs.cost import Cost, Curve, cost_to_target
from rollalloc.runs.metrics import PREFIX

_STEP, _SAVING = "timing_s/step", "timing_s/save_checkpoint"  # the second is within the first; validation is not
_BASELINE = "grpo"
_MOST = 1e30  # beyond which a number counts as not logged, as one that is none does


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run of verl, by its log.

    Attributes:
        path: of the log.
        curve: accuracy against rollouts, tokens, seconds of training and steps; NaN where the log does not say.
        problem: what could not be read, with its line; None: nothing.
    """

    path: Path
    curve: Curve
    problem: str | None = None

    @property
    def name(self) -> str:
        """The experiment's, fit to be shown."""
        return one_line(self.path.stem, 80)


def logs_in(folder: Path) -> list[Path]:
    """The logs of verl in a folder, by name: files of lines whose first has `step` and `data`.

    Raises:
        OSError: the folder or a file cannot be read.
    """
    return [path for path in sorted(folder.glob("*.jsonl")) if path.is_file() and next(_steps(path), None) is not None]


def read_verl(path: Path, metrics: Sequence[str]) -> LoggedRun:
    """A run's curve. A last line that is broken off is left out; what else cannot be read is said in its `problem`.

    Args:
        path: of the log.
        metrics: keys of verl's validation, e.g. val-core/openai/gsm8k/acc/mean@1; the accuracy is their mean.

    Raises:
        ValueError: no validation has these keys.
        OSError: it cannot be read.
    """
    points: list[tuple[float, float, float, float, int, float, None]] = []
    seconds, paid, tokens = 0.0, 0.0, 0.0
    seen: dict[str, None] = {}
    unreadable: list[tuple[int, str]] = []
    for step, data in _steps(path, unreadable):
        seconds += _number(data, _STEP, 0.0) - _number(data, _SAVING, 0.0)
        trained = _STEP in data
        paid = _number(data, f"{PREFIX}/rollouts_paid", nan if trained else paid)
        tokens = _number(data, f"{PREFIX}/tokens_paid", nan if trained else tokens)
        seen |= {name: None for name in data if name.startswith("val-")}
        found = [_number(data, name, nan) for name in metrics]
        if all(map(isfinite, found)):
            points.append((paid, tokens, seconds, float(step), step, sum(found) / len(found), None))
    if not points:
        there = f"it has {', '.join([*seen][:6])}" if seen else "it was never validated"
        raise ValueError(f"{path}: no validation with {' and '.join(metrics)}; {there}")
    return LoggedRun(path, Curve(*map(tuple, zip(*points, strict=True))), _problem(unreadable))


def _problem(unreadable: Sequence[tuple[int, str]]) -> str | None:
    if not unreadable:
        return None
    (number, why), more = unreadable[0], len(unreadable) - 1
    return f"line {number} cannot be read ({why}){f', nor can {more:,} more' if more else ''}; left out"


def _steps(path: Path, unreadable: list[tuple[int, str]] | None = None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each step's metrics; a line that is none of verl's is left out, one that cannot be read and is not the last named."""
    torn: list[tuple[int, str]] = []  # as far as is known: a killed run leaves its last line so
    for number, row in read_lines(path):
        if unreadable is not None:
            unreadable += torn
        torn = [(number, row.why)] if isinstance(row, Unreadable) else []
        if isinstance(row, dict) and _is_step(row.get("step")) and isinstance(row.get("data"), dict):
            yield row["step"], row["data"]


def _is_step(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MOST


def _number(data: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        return otherwise
    return float(value)


def baseline_of(runs: Sequence[LoggedRun]) -> LoggedRun:
    """The run that others are held against: the first with "grpo" in its name, else the first."""
    return next((run for run in runs if _BASELINE in run.name.lower()), runs[0])


def peak(run: LoggedRun, share: float) -> float:
    """That share of a run's best accuracy: with 0.99 of plain GRPO's, PODS's target (arXiv 2504.13818).

    Raises:
        ValueError: the best is not above 0, so that a share of it is no target.
    """
    best = max(run.curve.accuracy)
    if best <= 0:
        raise ValueError(f"{run.name}: expected a best accuracy above 0 to take a share of, got {best:g}; say --target")
    return share * best


def costs(runs: Sequence[LoggedRun], target: float) -> dict[str, Cost]:
    """What each run had paid when it reached the target, as `rollalloc.runs.cost` has it, by name.

    Args:
        runs: at least one.
        target: accuracy, in (0, 1].
    """
    found = {run.name: cost_to_target(run.curve, target) for run in runs}
    return {name: cost for name, cost in found.items() if cost is not None}  # a run that is read has a point
