"""Converts a framework's own log into lines of `metrics.jsonl`, because all views of a run read such lines.

A resumed run goes back to the step of its checkpoint. Lines of later steps are then dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollalloc.runs.metrics import PREFIX
from rollalloc.runs.recorded import Line
from rollalloc.runs.values import number

ROLLOUTS, TOKENS = f"{PREFIX}/rollouts_paid", f"{PREFIX}/tokens_paid"
_FIGURES = ("selection", "teaching")
_PLAIN = {  # our metrics whose name under `rollalloc/` is also their name in `metrics.jsonl`
    **dict.fromkeys(("rows", "groups", "replayed", "staleness_max", "evicted", "revived", "quarantined"), int),
    **dict.fromkeys(("staleness_mean", "entropy"), float),
}
_NOTHING_PAID: Line = {
    "rollouts_paid": 0,
    "tokens_paid": 0,
    "seconds": 0.0,
    "accounts": {},
    "version": 0,
    "optimizer_steps": 0,
}


def figures_in(logged: Mapping[str, Any], names: Mapping[str, str]) -> Line:
    """The fields of a batch's line: the framework's metrics, and our metrics under `rollalloc/`.

    Args:
        logged: the framework's metrics of one step, by their keys.
        names: the framework's key for each field name.
    """
    line: Line = {ours: value for ours, theirs in names.items() if (value := number(logged.get(theirs))) is not None}
    line |= {"prompts": counts} if (counts := _under(logged, "prompts")) else {}
    line |= {name: figures for name in _FIGURES if (figures := _under(logged, name, float))}
    for name, kind in _PLAIN.items():
        if (value := number(logged.get(f"{PREFIX}/{name}"))) is not None:
            line[name] = kind(value)
    return line


def lengths_in(logged: Mapping[str, Any], keys: Iterable[str]) -> Line:
    """Minimum, mean and maximum length of the rollouts; empty if one of these lengths is not logged."""
    lengths = [number(logged.get(key)) for key in keys]
    return {} if None in lengths else {"mean_lengths": lengths}


def _under(logged: Mapping[str, Any], name: str, kind: type = int) -> dict[str, Any]:
    start = f"{PREFIX}/{name}/"
    figures = {key.removeprefix(start): number(value) for key, value in logged.items() if key.startswith(start)}
    return {key: kind(value) for key, value in figures.items() if value is not None and value >= 0}


@dataclass
class LoggedSteps:
    """The lines of a log so far, one for each step.

    Args:
        counts_rollouts: whether the log has the number of rollouts paid. If not, steps are counted instead.

    Attributes:
        lines: the lines, in the order of the steps.
        rolled_back: number of training steps that a resume undid.
    """

    counts_rollouts: bool
    lines: list[Line] = field(default_factory=list[Line])
    rolled_back: int = 0
    _batches: list[Line] = field(default_factory=list[Line])

    @property
    def paid(self) -> Line:
        """The totals so far."""
        newest = self._batches[-1] if self._batches else _NOTHING_PAID
        return {name: newest[name] for name in _NOTHING_PAID}

    def train(self, step: int, logged: Mapping[str, Any], figures: Line, seconds: float) -> None:
        """Add a training step. A second entry for the same step is merged into the first.

        Args:
            step: number of the step. A number below the newest step's means that the run was resumed.
            logged: all logged metrics by key; our metrics are read from them.
            figures: the framework's metrics of the step.
            seconds: time since the previous entry.
        """
        self.begin(step)
        is_again = bool(self._batches) and self._batches[-1]["version"] == step
        line = self._batches.pop() if is_again else {}
        before = self.paid
        rollouts = number(logged.get(ROLLOUTS)) if self.counts_rollouts else step
        tokens = number(logged.get(TOKENS))  # the frameworks' own counts include prompts, so they are not read
        totals: Line = {
            "rollouts_paid": int(before["rollouts_paid"] if rollouts is None else rollouts),
            "tokens_paid": int(before["tokens_paid"] if tokens is None else tokens),
            "seconds": before["seconds"] + max(0.0, seconds),
        }
        if is_again:  # the second entry may lack some values of the first
            totals = {name: max(line[name], total) for name, total in totals.items()}
        else:
            self.lines.append(line)
        steps = {"version": step, "optimizer_steps": step, "batch": len(self._batches) + 1}
        accounts = _under(logged, "accounts") or line.get("accounts", before["accounts"])
        line |= {**totals, "accounts": accounts, **steps, **figures, "kind": "batch"}
        self._batches.append(line)

    def evaluate(self, step: int, logged: Mapping[str, Any], accuracy: float, breadth: Line) -> None:
        """Add an evaluation after this many steps. It replaces an earlier evaluation after the same step."""
        self.go_back_to(step)
        paid = self.paid
        if not self._batches:  # the evaluation is before the first step, or the log begins with a resumed run
            paid |= {"version": step, "optimizer_steps": step}
            paid["rollouts_paid"] = int(number(logged.get(ROLLOUTS)) or 0) if self.counts_rollouts else step
        if self.lines and self.lines[-1]["kind"] == "eval" and self.lines[-1]["version"] == paid["version"]:
            self.lines.pop()
        line = {"kind": "eval", "at": paid["rollouts_paid"], "accuracy": accuracy, "standard_error": None}
        self.lines.append({**paid, **line, "breadth": breadth})

    def begin(self, step: int) -> None:
        """Prepare for a training step. If a later step is known, the run was resumed: drop this step and later ones."""
        if step < self.paid["version"]:
            self.go_back_to(step - 1)

    def go_back_to(self, step: int) -> None:
        """Drop the lines of all steps after this one."""
        while self._batches and self._batches[-1]["version"] > step:
            removed = self._batches.pop()
            self.rolled_back += 1
            while self.lines.pop() is not removed:
                pass

    @property
    def newest(self) -> Line:
        """The totals so far, and the state of the prompts if it is logged."""
        prompts = self._batches[-1].get("prompts") if self._batches else None
        return self.paid if prompts is None else {**self.paid, "prompts": prompts}

    @property
    def notes(self) -> list[str]:
        """Notes for a reader of these lines."""
        return [f"{self.rolled_back:,} steps were rolled back by a resume and are left out"] if self.rolled_back else []
