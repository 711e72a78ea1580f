"""What verl's `file` logger writes of a run: accuracy against what was paid, as of our own runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

from rollalloc.data.jsonl import Unreadable, read_lines
from rollalloc.files.text import one_line
from rollalloc.runs.cost import Cost, Curve, cost_to_target
from rollalloc.runs.metrics import PREFIX

_STEP, _SAVING = "timing_s/step", "timing_s/save_checkpoint"  # the second is within the first; validation is not
_ROLLOUTS, _TOKENS = f"{PREFIX}/rollouts_paid", f"{PREFIX}/tokens_paid"  # totals of the run, resumes included
_BASELINE = "grpo"
_LONGEST_NAME = 255  # of a file
_MOST = 1e30  # beyond which a number counts as not logged, as one that is none does


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run of verl, by its log.

    Attributes:
        path: of the log; the file's name is the experiment's.
        curve: accuracy against rollouts, tokens, seconds of training and steps; NaN where the log does not say.
        problem: what could not be read, with its line; None: nothing.
        notes: what a reader of the curve should know, in sentences.
    """

    path: Path
    curve: Curve
    problem: str | None = None
    notes: tuple[str, ...] = ()


def names_of(runs: Sequence[LoggedRun]) -> list[str]:
    """Names of runs as a table shows them: the experiments', and where two are shown alike, with a number.

    Names of one folder often share a long beginning, so that they are not cut.
    """
    shown = [one_line(run.path.stem, _LONGEST_NAME) for run in runs]
    return [
        f"{name} ({shown[: at + 1].count(name)})" if shown.count(name) > 1 else name for at, name in enumerate(shown)
    ]


def logs_in(folder: Path) -> list[Path]:
    """The logs of verl in a folder, by name: files of lines whose first has `step` and `data`.

    Raises:
        OSError: the folder or a file cannot be read.
    """
    return [path for path in sorted(folder.glob("*.jsonl")) if path.is_file() and next(_steps(path), None) is not None]


@dataclass(slots=True)
class _Point:
    """A validation, and what had been paid by then."""

    step: int
    accuracy: float
    rollouts: float
    tokens: float
    seconds: float


@dataclass(slots=True)
class _Progress:
    """A log as it is read, step after step.

    verl's logger opens its file anew when a run is resumed, so that a log may begin in the midst of a run; one that was put
    together of several goes back to the step of a checkpoint. What was rolled back is forgotten, and seconds are known only
    as long as every step from the first on is there: rollouts and tokens are logged as totals of the run, seconds by step.

    Attributes:
        trained: by step, the seconds from the first step on, NaN where steps before it are not in the log.
        points: validations of what was not rolled back.
        rolled_back: steps.
        missing: the first step before which others are not in the log; None: none.
    """

    trained: dict[int, float] = field(default_factory=dict)
    points: list[_Point] = field(default_factory=list)
    paid: float = 0.0
    tokens: float = 0.0
    rolled_back: int = 0
    missing: int | None = None

    @property
    def last(self) -> int:
        """The last step that was trained; 0: none."""
        return next(reversed(self.trained), 0)

    @property
    def seconds(self) -> float:
        """Of all steps so far."""
        return self.trained[self.last] if self.trained else 0.0

    def go_back_to(self, step: int) -> None:
        """Forget the steps after this one, and their validations."""
        removed = [later for later in self.trained if later > step]
        self.rolled_back += len(removed)
        for later in removed:
            del self.trained[later]
        self.points = [point for point in self.points if point.step <= step]

    def train(self, step: int, data: Mapping[str, Any]) -> None:
        """A step of training."""
        if self.trained and step <= self.last:
            self.go_back_to(step - 1)
        seconds = self.seconds + _number(data, _STEP, 0.0) - _number(data, _SAVING, 0.0)
        if step != self.last + 1 and (self.trained or step != 0):
            seconds, self.missing = nan, self.missing or step
        self.trained[step] = seconds
        self.paid, self.tokens = _number(data, _ROLLOUTS, nan), _number(data, _TOKENS, nan)


def read_verl(path: Path, metrics: Sequence[str]) -> LoggedRun:
    """A run's curve. A last line that is broken off is left out; what else cannot be read is said in its `problem`.

    Args:
        path: of the log.
        metrics: keys of verl's validation, e.g. val-core/openai/gsm8k/acc/mean@1; the accuracy is their mean.

    Raises:
        ValueError: no validation has these keys.
        OSError: it cannot be read.
    """
    progress = _Progress()
    seen: dict[str, None] = {}
    unreadable: list[tuple[int, str]] = []
    for step, data in _steps(path, unreadable):
        if _STEP in data:
            progress.train(step, data)
        else:  # a validation before training, of a run that begins or goes on
            if step < progress.last:
                progress.go_back_to(step)
            progress.paid = _number(data, _ROLLOUTS, progress.paid)
            progress.tokens = _number(data, _TOKENS, progress.tokens)
        seen |= {name: None for name in data if name.startswith("val-")}
        values = [_number(data, name, nan) for name in metrics]
        if all(map(isfinite, values)):
            progress.points.append(
                _Point(step, sum(values) / len(values), progress.paid, progress.tokens, _seconds_at(progress, step))
            )
    if not progress.points:
        contents = f"it has {', '.join([*seen][:6])}" if seen else "it was never validated"
        raise ValueError(f"{path}: no validation with {' and '.join(metrics)}; {contents}")
    return LoggedRun(path, _curve(progress.points), _problem(unreadable), tuple(_notes(progress)))


def _seconds_at(progress: _Progress, step: int) -> float:
    """Seconds of training up to a step; not known where the log begins after the first, as it does after a resume."""
    return progress.seconds if progress.trained or step == 0 else nan


def _curve(points: Sequence[_Point]) -> Curve:
    return Curve(
        rollouts=tuple(point.rollouts for point in points),
        tokens=tuple(point.tokens for point in points),
        seconds=tuple(point.seconds for point in points),
        steps=tuple(float(point.step) for point in points),
        version=tuple(point.step for point in points),
        accuracy=tuple(point.accuracy for point in points),
        standard_error=(None,) * len(points),
    )


def _notes(progress: _Progress) -> list[str]:
    notes: list[str] = []
    if progress.missing is not None:
        notes.append(
            f"steps before step {progress.missing} are not in the log (verl opens it anew on a resume): from there on the "
            "seconds are not known"
        )
    if progress.rolled_back:
        notes.append(f"{progress.rolled_back:,} steps were rolled back by a resume and do not count")
    return notes


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
    return next((run for run in runs if _BASELINE in run.path.stem.lower()), runs[0])


def peak(run: LoggedRun, share: float) -> float:
    """That share of a run's best accuracy: with 0.99 of plain GRPO's, PODS's target (arXiv 2504.13818).

    Raises:
        ValueError: the best is not above 0, so that a share of it is no target.
    """
    best = max(run.curve.accuracy)
    if best <= 0:
        name = one_line(run.path.stem, _LONGEST_NAME)
        raise ValueError(f"{name}: expected a best accuracy above 0 to take a share of, got {best:g}; say --target")
    return share * best


def costs(runs: Sequence[LoggedRun], target: float) -> list[Cost]:
    """What each run had paid when it reached the target, as `rollalloc.runs.cost` has it, in the order of the runs.

    Args:
        runs: at least one.
        target: accuracy, in (0, 1].
    """
    paid = [cost_to_target(run.curve, target) for run in runs]
    return [cost for cost in paid if cost is not None]  # each run that is read has a point, and so a cost
