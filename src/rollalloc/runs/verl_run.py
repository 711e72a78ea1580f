"""A run of verl as the log of its `file` logger tells it, brought into the lines of `metrics.jsonl` that every view reads.

Under our trainer the log has everything under `rollalloc/`: rollouts, accounts, states of prompts. verl's own trainer does
not log how many rollouts a step takes, so such a run is drawn over training steps. The log is written after each step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollalloc.runs.files import LONGEST, Growing, open_regular, stamp_of, why
from rollalloc.runs.logged import ROLLOUTS, LoggedSteps, figures_in, lengths_in, number
from rollalloc.runs.recorded import RecordedRun
from rollalloc.runs.values import parsed

_UNIT = "training steps"
_SECONDS, _SAVING = "timing_s/step", "timing_s/save_checkpoint"  # the second is within the first; validation is not
_NAMES = {  # of a line's figures, and verl's key of each
    "reward_mean": "critic/score/mean",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
}
_LENGTHS = tuple(f"response_length/{name}" for name in ("min", "mean", "max"))
_TOKENS = "perf/total_num_tokens"  # of prompts and responses of a step
_ACCURACY = re.compile(r"val-core/.+/mean@\d+")


def is_log(path: Path) -> bool:
    """Whether the first line of a file is one of verl's `file` logger: a step and its data."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    try:
        with open_regular(path) as file:
            first = file.read(LONGEST).partition(b"\n")[0]
        return _entry(first) is not None
    except (OSError, ValueError):
        return False


def read_verl_run(path: Path) -> RecordedRun:
    """The run of a log; what cannot be read is said in its `problem`, not raised."""
    changed = stamp_of(path)[-1] / 1e9
    entries: list[tuple[int, Mapping[str, Any]]] = []
    wrong: list[str] = []
    file = Growing(path)
    try:
        for at, line in file.look():
            try:
                entry = None if line is None else _entry(line)
            except ValueError as error:
                wrong.append(f"{path.name}:{at} cannot be read ({error})")
            else:
                if entry is not None:
                    entries.append(entry)
                elif line is None or line.strip():
                    wrong.append(f"{path.name}:{at} is no line of verl's file logger")
        with suppress(ValueError):  # a killed run leaves its last line broken off
            if (entry := _entry(file.rest)) is not None:
                entries.append(entry)
    except OSError as error:
        return RecordedRun(path, {"label": path.stem}, problem=f"{path.name}: {why(error)}", changed=changed)
    is_ours = any(ROLLOUTS in data for _, data in entries)
    keys = [*dict.fromkeys(key for _, data in entries for key in data if _ACCURACY.fullmatch(key))]
    steps = _steps(entries, is_ours, keys)
    more = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
    return RecordedRun(
        path,
        {"label": path.stem, "recipe": "rollalloc under verl" if is_ours else "verl's own trainer"},
        steps.lines,
        problem=f"{wrong[0]}{more}; left out" if wrong else None,
        changed=changed,
        unit="rollouts paid" if is_ours else _UNIT,
        note="; ".join([*_notes(path.name, is_ours, keys, entries), *steps.notes]),
    )


def _entry(line: bytes) -> tuple[int, Mapping[str, Any]] | None:
    """A step and its data; None: something else.

    Raises:
        ValueError: it is no JSON object.
    """
    entry = parsed(line)
    step, data = entry.get("step"), entry.get("data")
    whole_step = number(step) if type(step) is int else None
    return (int(whole_step), data) if whole_step is not None and whole_step >= 0 and isinstance(data, dict) else None


def _steps(entries: list[tuple[int, Mapping[str, Any]]], is_ours: bool, keys: list[str]) -> LoggedSteps:
    steps = LoggedSteps(is_ours)
    for step, data in entries:
        if _SECONDS in data:  # without it: a validation before the first step, or after a resume
            seconds = (number(data[_SECONDS]) or 0.0) - (number(data.get(_SAVING)) or 0.0)
            steps.go_back_to(step - 1)
            tokens = steps.paid["tokens_paid"] + (number(data.get(_TOKENS)) or 0)
            figures = figures_in(data, _NAMES) | lengths_in(data, _LENGTHS)
            steps.train(step, data, figures, seconds, tokens)
        values = [value for key in keys if (value := number(data.get(key))) is not None]
        if keys and len(values) == len(keys):
            steps.evaluate(step, data, sum(values) / len(values), {})
    return steps


def _notes(name: str, is_ours: bool, keys: list[str], entries: list[tuple[int, Mapping[str, Any]]]) -> list[str]:
    """What the figures of a run are, which is not what they are of a run of this trainer."""
    notes = [f"its figures are those of {name}, which does not say when a run ends"]
    if not is_ours:
        notes.append("verl's own trainer logs no number of rollouts, so training steps stand in their place")
    if keys:
        more = f" and {len(keys) - 3:,} more" if len(keys) > 3 else ""
        notes.append(f"accuracy is {'the mean of ' if len(keys) > 1 else ''}{', '.join(keys[:3])}{more}")
    elif any(key.startswith("val-") for _, data in entries for key in data):
        notes.append("no accuracy is drawn, for its validation has no val-core/…/mean@N")
    first = next((step for step, data in entries if _SECONDS in data), 1)
    if first > 1:
        notes.append(
            f"steps before step {first:,} are not in the log (verl opens it anew on a resume): its seconds begin there"
        )
    return notes
