"""A run as its folder tells it: finished, running or failed, of this version or an older one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from rollalloc.runs.cost import Cost, Curve, cost_to_target, curve_of, whole_curve_of
from rollalloc.runs.teaching import in_words

Line = dict[str, Any]
_OF_ONE_RUN = ("seed", "digests")  # fields of `run.json` in which the seeds of a method differ
_LONGEST = 10 * 365 * 24 * 3600  # seconds left beyond which no figure is given


@dataclass(frozen=True)
class RecordedRun:
    """What is known of a run; fields that its version did not write are just not there.

    Attributes:
        folder: of the run; of a run of verl, its log.
        description: what `run.json` says; empty where it cannot be read.
        metrics: the lines of `metrics.jsonl`; of a long run, one for several.
        problem: what could not be read, with the file and its line; None: nothing.
        changed: when its files were last written, in seconds since the epoch; 0: never.
        unread: bytes of the metrics that are still to be read.
        unit: what `rollouts_paid` counts: steps of the framework in a log that does not say the rollouts.
        note: what a reader must know of where the figures come from; None: nothing.
    """

    folder: Path
    description: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Sequence[Line] = ()
    problem: str | None = None
    changed: float = 0.0
    unread: int = 0
    unit: str = "rollouts paid"
    note: str | None = None

    @property
    def label(self) -> str:
        """What the run is called among others."""
        return str(self.description.get("label") or self.description.get("recipe") or self.folder.name)

    @property
    def name(self) -> str:
        """What tells the run from others of its folder: the label that it was given, else its folder."""
        return str(self.description.get("label") or self.folder.name)

    @property
    def seed(self) -> int | None:
        """The run's seed, where it is known."""
        return self.description.get("seed")

    @property
    def target(self) -> float | None:
        """Held-out accuracy at which the run ends."""
        return self.description.get("target")

    @property
    def budget(self) -> int | None:
        """Rollouts that the run may pay; None: no limit, or none known."""
        return self.description.get("max_rollouts")

    @cached_property
    def last(self) -> Line | None:
        """The newest line of the metrics that says what is paid by now: an evaluation's may be of weights before."""
        known = (line for line in reversed(self.metrics) if line["kind"] != "eval")
        return next(known, self.metrics[-1] if self.metrics else None)

    @property
    def ended(self) -> bool:
        """Whether the run came to its end, and wrote all that it writes."""
        return self.last is not None and self.last["kind"] == "end"

    @property
    def failed(self) -> bool:
        """Whether the run ended in an error that it could write down."""
        return self.last is not None and self.last["kind"] == "failed"

    @property
    def why(self) -> str | None:
        """Why the run is over, ended or failed; None: it is not, as far as is known."""
        return str(self.last.get("why", "it ended")) if self.last and (self.ended or self.failed) else None

    @property
    def reached(self) -> bool:
        """Whether the target was reached, as costs have it; as it said, where not all evaluations are kept."""
        said = self.ended and (self.why or "").startswith("target")
        return said or (self.cost is not None and not self.cost.censored)

    @property
    def paid(self) -> int:
        """Rollouts paid so far."""
        return self.last["rollouts_paid"] if self.last else 0

    @property
    def amount(self) -> str:
        """What was paid so far, with its unit."""
        return f"{self.paid:,} {self.unit.removesuffix(' paid')}"

    @property
    def accounts(self) -> Mapping[str, int]:
        """Rollouts paid so far, by cause."""
        return self.last["accounts"] if self.last else {}

    @property
    def unscored(self) -> Mapping[str, int]:
        """Rollouts without a score so far, by reason."""
        return self.last.get("unscored", {}) if self.last else {}

    @cached_property
    def batches(self) -> list[Line]:
        """The lines of the batches."""
        return [line for line in self.metrics if line["kind"] == "batch"]

    @cached_property
    def grouped(self) -> bool:
        """Whether rollouts are compared within groups, as far as is known."""
        return not self.batches or any(compares(line) for line in self.batches)

    @property
    def taught(self) -> str:
        """The share of rollouts that taught, see `share_taught`."""
        return share_taught(self.accounts, self.grouped)

    @property
    def silence(self) -> str | None:
        """That most of its last rollouts taught nothing, in words; None where they teach, or it is not known."""
        shares = next((line["teaching"] for line in reversed(self.metrics) if "teaching" in line), {})
        return in_words(shares)

    @cached_property
    def curve(self) -> Curve:
        """Held-out accuracy against what was paid, that of the final weights included."""
        return whole_curve_of(self.metrics)

    @cached_property
    def cost(self) -> Cost | None:
        """What was paid when the target was reached, or a lower bound of it; None without a target or an evaluation."""
        return None if self.target is None else cost_to_target(curve_of(self.metrics), self.target)


def unshown(run: RecordedRun, error: Exception) -> RecordedRun:
    """What is shown in the place of a run that cannot be, whatever its files hold: the others keep theirs."""
    return RecordedRun(run.folder, problem=f"it cannot be shown: {type(error).__name__}: {error}")


def compares(batch: Mapping[str, Any]) -> bool:
    """Whether a batch's line has rows that were compared within their group, not each with a prediction or a mean."""
    return (batch.get("rows") or 0) - (batch.get("replayed") or 0) > (batch.get("groups") or 0)


def share_taught(accounts: Mapping[str, int], grouped: bool) -> str:
    """The share of rollouts in groups that had something to compare; "n/a" where none is compared, "" without rollouts."""
    paid = sum(accounts.values())
    return "" if not paid else f"{accounts.get('trained', 0) / paid:.0%}" if grouped else "n/a"


def remaining(run: RecordedRun) -> timedelta | None:
    """How long until the budget is spent at the pace so far; None where either is not known."""
    budget, last = run.budget, run.last
    if run.why or run.unread or budget is None or last is None or not last["rollouts_paid"]:
        return None
    left = last["seconds"] * max(0, budget - run.paid) / run.paid
    return timedelta(seconds=round(left)) if left < _LONGEST else None


def share_done(run: RecordedRun) -> float | None:
    """The share of its budget that a run has paid, in [0, 1], and 1 once it has ended; None: it has no budget."""
    if run.ended:
        return 1.0
    return min(1.0, run.paid / run.budget) if run.budget else None


def held_out(run: RecordedRun) -> str:
    """The first and last held-out accuracy, e.g. "held-out 0.465 → 0.577 (± 0.027)"; empty without an evaluation.

    The number after ± is the standard error of the last one.
    """
    if not (accuracy := run.curve.accuracy):
        return ""
    last = f"{accuracy[-1]:.3f}"
    first = f"{accuracy[0]:.3f} → " if len(accuracy) > 1 else ""
    error = next(reversed(run.curve.standard_error), None)
    certainty = "" if error is None else " (exact)" if error == 0 else f" (± {error:.3f})"
    return f"held-out {first}{last}{certainty}"


def state(run: RecordedRun) -> str:
    """What the run is at, in a word or two."""
    if run.unread:
        return f"being read, {run.unread / 1e6:,.0f} MB left"
    if run.failed:
        return "failed"
    if run.ended:
        return "target reached" if run.reached else "finished"
    return "starting" if not run.metrics else "not ended"


def by_label(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Runs that differ in their seed only, together; those that differ in more have their folder's name with the label."""
    found: dict[str, list[RecordedRun]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    methods: dict[str, list[RecordedRun]] = {}
    for label, of_label in found.items():
        if _are_seeds_of_one(of_label):
            methods[label] = of_label
        else:
            methods |= {f"{run.folder.name} ({label})": [run] for run in of_label}
    return methods


def _are_seeds_of_one(runs: Sequence[RecordedRun]) -> bool:
    seeds = [run.seed for run in runs]
    setups = [{name: value for name, value in run.description.items() if name not in _OF_ONE_RUN} for run in runs]
    return len(runs) == 1 or (len(set(seeds)) == len(seeds) and all(setup == setups[0] for setup in setups))
