"""Reads a verl run from the log of its `file` logger, and converts it into lines of `metrics.jsonl`.

Our trainer for verl logs all metrics under `rollalloc/`: rollouts, accounts, states of prompts. verl's own trainer does
not log the number of rollouts of a step, so its runs are plotted over training steps. The log is written after each step.

verl starts a new log when a run is resumed, so a log may begin in the middle of a run. Rollouts and tokens are logged as
totals of the run, but seconds only per step. So the total of the seconds is unknown after a missing step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

from rollalloc.files.regular import LONGEST, lines_of, open_regular, why
from rollalloc.runs.baselines import BENCHMARKS
from rollalloc.runs.cost import Curve, curve_of
from rollalloc.runs.logged import ROLLOUTS, LoggedSteps, figures_in, lengths_in
from rollalloc.runs.recorded import RecordedRun
from rollalloc.runs.values import number, parsed

_UNIT, _OUR_UNIT = "training steps", "rollouts paid"
_FIRST = "first_step"  # key of the description: the step after the first gap in the log
_SECONDS, _SAVING = "timing_s/step", "timing_s/save_checkpoint"  # the step's time includes saving, but not validation
_NAMES = {  # verl's key for each name in a line of `metrics.jsonl`
    "reward_mean": "critic/score/mean",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
}
_LENGTHS = tuple(f"response_length/{name}" for name in ("min", "mean", "max"))
_ACCURACY = re.compile(r"val-core/.+/mean@\d+")


def is_log(path: Path) -> bool:
    """Whether the first line of a file was written by verl's `file` logger: a step and its data."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    try:
        with open_regular(path) as file:
            first = file.read(LONGEST).partition(b"\n")[0]
        return _entry(first) is not None
    except (OSError, ValueError):
        return False


def read_verl_run(path: Path, metrics: Sequence[str] = (), *, validated: bool = False) -> RecordedRun:
    """Read the run in a log. Errors are not raised: `problem` of the result describes them.

    Args:
        path: path of the log.
        metrics: keys of verl's validation metrics; their mean is the accuracy. Default: all val-core/…/mean@N.
        validated: True: the run must have an accuracy.

    Raises:
        ValueError: no validation has all of `metrics`; or the run has no accuracy, and `validated` is True.
    """
    entries: list[tuple[int, Mapping[str, Any]]] = []
    wrong: list[str] = []
    try:
        for at, line, complete in lines_of(path):
            try:
                entry = None if line is None else _entry(line)
            except ValueError as error:
                if complete:  # a killed run may leave an incomplete last line
                    wrong.append(f"{path.name}:{at} cannot be read ({error})")
            else:
                if entry is not None:
                    entries.append(entry)
                elif line is None or (complete and line.strip()):
                    wrong.append(f"{path.name}:{at} is no line of verl's file logger")
    except OSError as error:
        return RecordedRun(path, {"label": path.stem}, problem=f"{path.name}: {why(error)}")
    is_ours = any(ROLLOUTS in data for _, data in entries)
    logged = [*dict.fromkeys(key for _, data in entries for key in data if key.startswith("val-"))]
    keys = [*(metrics or (key for key in logged if _ACCURACY.fullmatch(key)))]
    steps = _steps(entries, is_ours, keys)
    if (metrics or validated) and not any(line["kind"] == "eval" for line in steps.lines):
        contents = f"it has {', '.join(logged[:6])}" if logged else "it was never validated"
        raise ValueError(f"{path}: no validation with {' and '.join(keys) or 'val-core/…/mean@N'}; {contents}")
    first = _first_missing(entries)
    more = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
    return RecordedRun(
        path,
        {
            "label": path.stem,
            "recipe": "rollalloc under verl" if is_ours else "verl's own trainer",
            BENCHMARKS: keys,
            **({} if first is None else {_FIRST: first}),
        },
        steps.lines,
        problem=f"{wrong[0]}{more}; left out" if wrong else None,
        unit=_OUR_UNIT if is_ours else _UNIT,
        note="; ".join([*_notes(path.name, is_ours, keys, logged), *_gaps(first), *steps.notes]),
    )


def _entry(line: bytes) -> tuple[int, Mapping[str, Any]] | None:
    """A step and its data; None if the line is not of a step.

    Raises:
        ValueError: the line is not a JSON object.
    """
    entry = parsed(line)
    step, data = entry.get("step"), entry.get("data")
    whole_step = number(step) if type(step) is int else None
    return (int(whole_step), data) if whole_step is not None and whole_step >= 0 and isinstance(data, dict) else None


def costs_known(run: RecordedRun) -> Curve:
    """The curve of accuracy against rollouts, tokens, seconds of training and steps; NaN where the log has no value."""
    curve, first = curve_of(run.metrics), run.description.get(_FIRST)
    if first is not None:
        known = zip(curve.version, curve.seconds, strict=True)
        curve = replace(curve, seconds=tuple(nan if (step or 0) >= first - 1 else taken for step, taken in known))
    if run.unit == _OUR_UNIT:
        return curve
    unknown = (nan,) * len(curve.accuracy)
    return replace(curve, rollouts=unknown, tokens=unknown)


def _first_missing(entries: Sequence[tuple[int, Mapping[str, Any]]]) -> int | None:
    """The step after the first gap in the log; None if no step is missing."""
    last = 0
    for step, data in entries:
        if _SECONDS in data:
            if step > last + 1:
                return step
            last = step
    return None


def _gaps(first: int | None) -> list[str]:
    why = "verl starts a new log on a resume"
    return (
        [] if first is None else [f"the log lacks steps before step {first:,} ({why}); their seconds are not counted"]
    )


def _steps(entries: list[tuple[int, Mapping[str, Any]]], is_ours: bool, keys: Sequence[str]) -> LoggedSteps:
    steps = LoggedSteps(is_ours)
    for step, data in entries:
        if _SECONDS in data:  # missing if the log begins with a validation, before the first step or after a resume
            seconds = (number(data[_SECONDS]) or 0.0) - (number(data.get(_SAVING)) or 0.0)
            steps.go_back_to(step - 1)
            figures = figures_in(data, _NAMES) | lengths_in(data, _LENGTHS)
            steps.train(step, data, figures, seconds)
        values = [value for key in keys if (value := number(data.get(key))) is not None]
        if keys and len(values) == len(keys):
            steps.evaluate(step, data, sum(values) / len(values), {})
    return steps


def _notes(name: str, is_ours: bool, keys: Sequence[str], logged: Sequence[str]) -> list[str]:
    """Notes that say how the metrics differ from those of rollalloc's own trainer."""
    notes = [f"the figures are from {name}, and such a log does not say when a run ends"]
    if not is_ours:
        notes.append(
            "verl's own trainer logs neither rollouts, so training steps are shown instead, nor the tokens generated"
        )
    if keys:
        more = f" and {len(keys) - 3:,} more" if len(keys) > 3 else ""
        notes.append(f"accuracy is {'the mean of ' if len(keys) > 1 else ''}{', '.join(keys[:3])}{more}")
    elif logged:
        notes.append("no accuracy is shown, because the validation has no val-core/…/mean@N")
    return notes
