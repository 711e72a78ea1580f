"""Reads a TRL run from its `trainer_state.json`, and converts it into lines of `metrics.jsonl`.

`AllocatedGRPOTrainer` logs all metrics under `rollalloc/`: rollouts, accounts, states of prompts. TRL's own trainer does
not log the number of rollouts of a step, so its runs are plotted over optimizer steps. TRL writes the file with each
checkpoint, so a run is shown up to its newest checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollalloc.files.regular import why
from rollalloc.runs.logged import ROLLOUTS, LoggedSteps, figures_in, lengths_in
from rollalloc.runs.recorded import RecordedRun
from rollalloc.runs.values import number, parsed_file

STATE = "trainer_state.json"
# Our column in TRL's table of completions: "GROUP/ROLLOUT", the ids in the core; null in the rows of an evaluation.
ROLLOUT = "rollalloc/rollout"
_CHECKPOINT = "checkpoint-"
_LONGEST = 256 << 20  # bytes
_SHOWN = 3  # maximum number of problems to show
_STEPS = "optimizer steps"
_NAMES = {  # TRL's key for each name in a line of `metrics.jsonl`
    "reward_mean": "reward",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "alike": "frac_reward_zero_std",
}
_LENGTHS = tuple(f"completions/{name}_length" for name in ("min", "mean", "max"))


def state_in(folder: Path) -> Path | None:
    """The newest `trainer_state.json` in a folder of TRL or in one of its checkpoints; None if there is none."""
    return next(iter(_states(folder)), None)


def _states(folder: Path) -> list[Path]:
    """Every `trainer_state.json` in the folder and its checkpoints, newest first.

    The file that `trainer.save_state()` wrote comes first, unless a checkpoint is newer because the run was resumed.
    """
    numbered = [
        (int(place.name.removeprefix(_CHECKPOINT)), place / STATE)
        for place in folder.glob(f"{_CHECKPOINT}*")
        if place.name.removeprefix(_CHECKPOINT).isdecimal() and (place / STATE).is_file()
    ]
    states = [path for _, path in sorted(numbered, reverse=True)]
    if (last_state := folder / STATE).is_file():
        is_newest = not states or last_state.stat().st_mtime_ns >= states[0].stat().st_mtime_ns
        states.insert(0 if is_newest else 1, last_state)
    return states


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint inside the folder of a TRL run."""
    return folder.name.startswith(_CHECKPOINT) and (folder / STATE).is_file()


def read_trl(folder: Path) -> RecordedRun:
    """Read the run in an output folder of TRL. Errors are not raised: `problem` of the result describes them."""
    states = _states(folder)
    if not states:
        return RecordedRun(folder, problem=f"no {STATE} in the folder or in its checkpoints")
    problems: list[str] = []
    for path in states:
        name = str(path.relative_to(folder))
        try:
            return _run_of(folder, name, _parsed(path), problems)
        except OSError as error:
            problems.append(f"{name}: {why(error)}")
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return RecordedRun(folder, problem="; ".join(problems[:_SHOWN]))


def _parsed(path: Path) -> dict[str, Any]:
    """Parse a state of TRL's trainer.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too long, or does not contain a state as JSON.
    """
    state = parsed_file(path, _LONGEST)
    if not isinstance(state.get("log_history") or [], list):
        raise ValueError("its log_history is not a list")
    return state


def _run_of(folder: Path, name: str, state: dict[str, Any], problems: list[str]) -> RecordedRun:
    """The run that a state describes. `problems` are the errors of newer states that cannot be read."""
    history = [entry for entry in state.get("log_history") or () if isinstance(entry, dict)]
    is_ours = any(ROLLOUTS in entry for entry in history)
    steps = _steps(history, is_ours)
    lines = steps.lines
    last, most = number(state.get("global_step")), number(state.get("max_steps"))
    if lines and last is not None and most is not None and last >= most > 0:
        lines.append({**steps.newest, "kind": "end", "why": f"TRL: all of {most:,.0f} steps are done"})
    budget = None if is_ours or not most else int(most)
    return RecordedRun(
        folder,
        {
            "label": folder.name,
            "recipe": "rollalloc under TRL" if is_ours else "TRL's own trainer",
            "max_rollouts": budget,
            "trainer_state": name,
        },
        lines,
        problem="; ".join(problems[:_SHOWN]) + f"; {name} is shown instead" if problems else None,
        unit="rollouts paid" if is_ours else _STEPS,
        note="; ".join([_note(name, is_ours, any(line["kind"] == "eval" for line in lines)), *steps.notes]),
    )


def _note(name: str, is_ours: bool, evaluated: bool) -> str:
    """A note that says how the metrics differ from those of rollalloc's own trainer."""
    remarks = [f"the figures are from {name}, and TRL writes this file with each checkpoint"]
    remarks += (
        []
        if is_ours
        else ["TRL's own trainer logs neither rollouts, so optimizer steps are shown instead, nor the tokens generated"]
    )
    remarks += ["accuracy is TRL's eval_reward, the mean reward of the evaluation set"] if evaluated else []
    return "; ".join(remarks)


def _steps(history: list[dict[str, Any]], is_ours: bool) -> LoggedSteps:
    steps = LoggedSteps(is_ours)
    for entry in history:
        at = number(entry.get("step"))
        if at is None or at < 0:
            continue
        if (accuracy := number(entry.get("eval_reward"))) is not None:
            entropy = number(entry.get("eval_entropy"))
            steps.evaluate(int(at), entry, accuracy, {} if entropy is None else {"entropy": entropy})
        elif "reward" in entry or "loss" in entry:
            steps.begin(int(at))
            taken = int(at) - steps.paid["version"]
            seconds = max(taken, 0) * (number(entry.get("step_time")) or 0.0)
            figures = figures_in(entry, _NAMES) | lengths_in(entry, _LENGTHS)
            steps.train(int(at), entry, figures, seconds)
    return steps
