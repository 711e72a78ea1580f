"""A run of TRL as its `trainer_state.json` tells it, brought into the lines of `metrics.jsonl` that every view reads.

Under `AllocatedGRPOTrainer` the log has everything under `rollalloc/`: rollouts, accounts, states of prompts. TRL's own
trainer does not log how many rollouts a step takes, so such a run is drawn over optimizer steps. The file is written with
each checkpoint: a run is seen as far as its newest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from rollalloc.runs.files import open_regular, stamp_of, why
from rollalloc.runs.metrics import PREFIX
from rollalloc.runs.recorded import Line, RecordedRun
from rollalloc.runs.values import MOST, parsed

STATE = "trainer_state.json"
_CHECKPOINT = "checkpoint-"
_LONGEST = 256 << 20  # bytes
_STEPS = "optimizer steps"
_OURS = f"{PREFIX}/rollouts_paid"
_COUNTED = ("accounts", "prompts")  # of ours, nested in a line
_FIGURES = ("selection", "teaching")
_PLAIN = {  # of ours, under the same name in a line
    **dict.fromkeys(("rows", "groups", "replayed", "staleness_max", "evicted", "revived", "quarantined"), int),
    **dict.fromkeys(("staleness_mean", "entropy"), float),
}


def state_in(folder: Path) -> Path | None:
    """The newest `trainer_state.json` of TRL's output folder, or of one of its checkpoints; None where it is neither."""
    numbered = [
        (int(place.name.removeprefix(_CHECKPOINT)), place / STATE)
        for place in folder.glob(f"{_CHECKPOINT}*")
        if place.name.removeprefix(_CHECKPOINT).isdecimal() and (place / STATE).is_file()
    ]
    own = [folder / STATE] if (folder / STATE).is_file() else []  # of `trainer.save_state()`, at the end
    return next(iter(own), max(numbered)[1] if numbered else None)


def is_checkpoint(folder: Path) -> bool:
    """Whether it is a checkpoint of a run of TRL whose folder lies around it."""
    return folder.name.startswith(_CHECKPOINT) and (folder / STATE).is_file()


def read_trl(folder: Path) -> RecordedRun:
    """The run of an output folder of TRL; what cannot be read is said in its `problem`, not raised."""
    path = state_in(folder)
    if path is None:
        return RecordedRun(folder, problem=f"no {STATE} in it, nor in a checkpoint of it")
    name = str(path.relative_to(folder))
    try:
        with open_regular(path) as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"it is longer than {_LONGEST:,} bytes")
        state = parsed(content)
        history = [entry for entry in state.get("log_history") or () if isinstance(entry, dict)]
    except OSError as error:
        return RecordedRun(folder, problem=f"{name}: {why(error)}")
    except ValueError as error:
        return RecordedRun(folder, problem=f"{name}: {error}")
    is_ours = any(_OURS in entry for entry in history)
    lines = list(_lines(history, is_ours))
    last, most = _number(state.get("global_step")), _number(state.get("max_steps"))
    if lines and last is not None and most is not None and last >= most > 0:
        newest = next((line for line in reversed(lines) if line["kind"] != "eval"), lines[-1])
        lines.append({**_spent(newest), "kind": "end", "why": f"TRL: all of {most:,.0f} steps are done"})
    budget = None if is_ours or not most else int(most)
    return RecordedRun(
        folder,
        {
            "label": folder.name,
            "recipe": "rollalloc under TRL" if is_ours else "TRL's own trainer",
            "max_rollouts": budget,
        }
        | {"source": {"trainer_state": name}},
        lines,
        changed=stamp_of(path)[-1] / 1e9,
        unit="rollouts paid" if is_ours else _STEPS,
        note=_note(name, is_ours, any(line["kind"] == "eval" for line in lines)),
    )


def _note(name: str, is_ours: bool, evaluated: bool) -> str:
    """What the figures of a run are, which is not what they are of a run of this trainer."""
    said = [f"its figures are those of {name}, which TRL writes with each checkpoint"]
    said += [] if is_ours else ["TRL's own trainer logs no number of rollouts, so optimizer steps stand in their place"]
    said += ["what is called accuracy is TRL's eval_reward, the mean reward of the evaluation set"] if evaluated else []
    return "; ".join(said)


def _lines(history: list[dict[str, Any]], is_ours: bool) -> Iterator[Line]:
    spent: Line = {
        "rollouts_paid": 0,
        "tokens_paid": 0,
        "seconds": 0.0,
        "accounts": {},
        "version": 0,
        "optimizer_steps": 0,
    }
    batch = 0
    for entry in history:
        step = _number(entry.get("step"))
        if step is None or step < spent["version"]:
            continue
        if (accuracy := _number(entry.get("eval_reward"))) is not None:
            entropy = _number(entry.get("eval_entropy"))
            evaluated = {"kind": "eval", "at": spent["rollouts_paid"], "accuracy": accuracy, "standard_error": None}
            yield {**spent, **evaluated, "breadth": {} if entropy is None else {"entropy": entropy}}
        elif "reward" in entry or "loss" in entry:
            steps, batch = int(step) - spent["version"], batch + 1
            seconds = spent["seconds"] + max(steps, 0) * (_number(entry.get("step_time")) or 0.0)
            paid = _number(entry.get(_OURS)) if is_ours else step
            tokens = _number(entry.get(f"{PREFIX}/tokens_paid" if is_ours else "num_tokens"))
            spent = {
                **spent,
                "rollouts_paid": int(spent["rollouts_paid"] if paid is None else paid),
                "tokens_paid": int(spent["tokens_paid"] if tokens is None else tokens),
                "seconds": seconds,
                "accounts": _under(entry, "accounts") or spent["accounts"],
                "version": int(step),
                "optimizer_steps": int(step),
            }
            yield {**spent, "kind": "batch", "batch": batch, **_batch(entry)}


def _batch(entry: Mapping[str, Any]) -> Line:
    line: Line = {name: counts for name in _COUNTED[1:] if (counts := _under(entry, name))}
    line |= {name: figures for name in _FIGURES if (figures := _under(entry, name, float))}
    named = {"reward_mean": "reward", "loss": "loss", "grad_norm": "grad_norm", "entropy": "entropy"}
    line |= {ours: value for ours, theirs in named.items() if (value := _number(entry.get(theirs))) is not None}
    for name, kind in _PLAIN.items():
        if (value := _number(entry.get(f"{PREFIX}/{name}"))) is not None:
            line[name] = kind(value)
    lengths = [_number(entry.get(f"completions/{name}_length")) for name in ("min", "mean", "max")]
    if None not in lengths:
        line["mean_lengths"] = lengths
    if (alike := _number(entry.get("frac_reward_zero_std"))) is not None:
        line["alike"] = alike
    return line


def _under(entry: Mapping[str, Any], name: str, kind: type = int) -> dict[str, Any]:
    start = f"{PREFIX}/{name}/"
    found = {key.removeprefix(start): _number(value) for key, value in entry.items() if key.startswith(start)}
    return {key: kind(value) for key, value in found.items() if value is not None and value >= 0}


def _spent(line: Line) -> Line:
    names = ("rollouts_paid", "tokens_paid", "seconds", "accounts", "version", "optimizer_steps", "prompts")
    return {name: line[name] for name in names if name in line}


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and isfinite(value) and abs(value) <= MOST else None
