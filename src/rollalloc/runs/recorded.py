"""`RecordedRun`: a running, finished or failed run, as its files describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rollalloc.runs.cost import Cost, Curve, cost_to_target, curve_of, whole_curve_of
from rollalloc.runs.learning_signal import in_words

Line = dict[str, Any]
_LONGEST_WHY = 2000  # characters; an error of code that is not ours may be of any length
_OF_ONE_RUN = ("seed", "digests", "starts")  # fields of `run.json` that differ between the seeds of a method


@dataclass(frozen=True)
class RecordedRun:
    """A run, as far as its files describe it.

    Attributes:
        folder: the run's folder; for verl, its log file.
        description: contents of `run.json`; empty if it cannot be read.
        metrics: lines of `metrics.jsonl`. From a long run, only some lines are kept.
        problem: the error of reading the run, with file and line. None: no error.
        unit: what `rollouts_paid` counts: rollouts, or steps if the framework's log does not have rollouts.
        note: a remark on the source of the figures, to be shown with them. None: no remark.
    """

    folder: Path
    description: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Sequence[Line] = ()
    problem: str | None = None
    unit: str = "rollouts paid"
    note: str | None = None

    @property
    def label(self) -> str:
        """The label of the run. Without a label, its recipe; without a recipe, the name of its folder."""
        return str(self.description.get("label") or self.description.get("recipe") or self.folder.name)

    @property
    def name(self) -> str:
        """The label of the run. Without a label, the name of its folder."""
        return str(self.description.get("label") or self.folder.name)

    @property
    def seed(self) -> int | None:
        """The run's seed; None if unknown."""
        return self.description.get("seed")

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """When and by what the run was started, and each time that it was resumed (see `rollalloc.files.origin`)."""
        starts = self.description.get("starts")
        return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []

    @property
    def target(self) -> float | None:
        """Held-out accuracy at which the run ends; None if there is no target."""
        return self.description.get("target")

    @property
    def budget(self) -> int | None:
        """Maximum number of rollouts to generate. None: no limit, or unknown."""
        return self.description.get("max_rollouts")

    @cached_property
    def last(self) -> Line:
        """The newest line of the metrics that is not an evaluation; empty if there are no metrics.

        Evaluations are skipped, because their totals may belong to earlier weights.
        """
        lines = (line for line in reversed(self.metrics) if line["kind"] != "eval")
        return next(lines, self.metrics[-1] if self.metrics else {})

    @property
    def ended(self) -> bool:
        """Whether the run ended normally and wrote all its results."""
        return self.last.get("kind") == "end"

    @property
    def failed(self) -> bool:
        """Whether the run ended with an error and recorded the error."""
        return self.last.get("kind") == "failed"

    @property
    def why(self) -> str | None:
        """Why the run ended or failed. None if the run is going on, or was killed before it could record a reason."""
        return str(self.last.get("why", "it ended"))[:_LONGEST_WHY] if self.ended or self.failed else None

    @property
    def reached(self) -> bool:
        """Whether the run reached its target. Its last line or its evaluations show this."""
        by_last_line = self.ended and (self.why or "").startswith("target")
        return by_last_line or (self.cost is not None and not self.cost.censored)

    @property
    def paid(self) -> int:
        """Rollouts paid so far."""
        return self.last.get("rollouts_paid", 0)

    @property
    def accounts(self) -> Mapping[str, int]:
        """Rollouts paid so far, by cause."""
        return self.last.get("accounts", {})

    @property
    def unscored(self) -> Mapping[str, int]:
        """Number of rollouts without a score so far, by reason."""
        return self.last.get("unscored", {})

    @cached_property
    def batches(self) -> list[Line]:
        """The lines of the batches."""
        return [line for line in self.metrics if line["kind"] == "batch"]

    @cached_property
    def grouped(self) -> bool:
        """Whether rollouts are compared within groups. True if there is no batch yet."""
        return not self.batches or any(compares(line) for line in self.batches)

    @property
    def silence(self) -> str | None:
        """The warning that most of the recent rollouts had no effect on training; None if no warning is needed."""
        shares = next((line["teaching"] for line in reversed(self.metrics) if "teaching" in line), {})
        return in_words(shares)

    @cached_property
    def curve(self) -> Curve:
        """Held-out accuracy against rollouts paid, including the final weights."""
        return whole_curve_of(self.metrics)

    @cached_property
    def cost(self) -> Cost | None:
        """The cost to reach the target, see `cost_to_target`. None if there is no target or no evaluation."""
        return None if self.target is None else cost_to_target(curve_of(self.metrics), self.target)


def compares(batch: Mapping[str, Any]) -> bool:
    """Whether a batch has groups with several rows, so that rows are compared within their group.

    If not, each row is compared with a predicted baseline or with a mean over the batch.
    """
    return (batch.get("rows") or 0) - (batch.get("replayed") or 0) > (batch.get("groups") or 0)


def share_done(run: RecordedRun) -> float | None:
    """The share of its budget that a run has paid, in [0, 1]; 1 after its end; None without a budget."""
    if run.ended:
        return 1.0
    return min(1.0, run.paid / run.budget) if run.budget else None


def held_out(run: RecordedRun) -> str:
    """The first and last held-out accuracy, e.g. "held-out 0.465 → 0.577 (± 0.027)"; empty without an evaluation.

    The number after ± is the standard error of the last accuracy.
    """
    if not (accuracy := run.curve.accuracy):
        return ""
    last = f"{accuracy[-1]:.3f}"
    first = f"{accuracy[0]:.3f} → " if len(accuracy) > 1 else ""
    error = next(reversed(run.curve.standard_error), None)
    certainty = "" if error is None else " (exact)" if error == 0 else f" (± {error:.3f})"
    return f"held-out {first}{last}{certainty}"


def by_label(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Group runs by label if their seeds differ and everything else is equal. Otherwise each run is on its own."""
    labels: dict[str, list[RecordedRun]] = {}
    for run in runs:
        labels.setdefault(run.label, []).append(run)
    methods: dict[str, list[RecordedRun]] = {}
    for label, of_label in labels.items():
        if _are_seeds_of_one(of_label):
            methods[label] = of_label
        else:
            methods |= {f"{run.folder.name} ({label})": [run] for run in of_label}
    return methods


def _are_seeds_of_one(runs: Sequence[RecordedRun]) -> bool:
    seeds = [run.seed for run in runs]
    setups = [{name: value for name, value in run.description.items() if name not in _OF_ONE_RUN} for run in runs]
    return len(runs) == 1 or (len(set(seeds)) == len(seeds) and all(setup == setups[0] for setup in setups))
