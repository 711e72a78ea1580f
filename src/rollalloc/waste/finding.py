"""Summarizes a log: shares of rollouts by cause, with notes for the reader."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rollalloc.files.text import visible
from rollalloc.runs.learning_signal import share_taught
from rollalloc.waste.groups import NO_STEP, Groups, Log
from rollalloc.waste.shares import Shares, drift, shares_of

ALONE = (
    "{:,} rollouts are alone in their group and are not counted: GRPO has nothing to compare them with, but a method that "
    "compares each rollout with a prediction or a running mean learns from them"
)
_ALONE_BOOKED = (
    "{:,} rollouts are alone in their group, because the recipe compares each with a prediction or a mean: the run's "
    "accounts say what taught"
)
_GRADES = 2  # a log with more different rewards than this has graded rewards


@dataclass(slots=True)
class Finding:
    """The summary of a log.

    Attributes:
        format: format of the log.
        rollouts: number of logged rollouts.
        shares: shares of rollouts by cause, from groups of at least 2 rollouts; None if there are no such groups.
        booked: number of rollouts for each cause, as the trainer itself counted them; empty if the log has no such counts.
        notes: notes for the reader, the most important first.
        alone: number of rollouts that are alone in their group.
        complete: False if the log may lack rollouts that were paid but not trained on.
        skipped: number of rollouts that were paid but are missing in the log, as its ids show; a lower bound.
    """

    format: str
    rollouts: int
    shares: Shares | None
    booked: dict[str, int]
    notes: list[str] = field(default_factory=list)
    alone: int = 0
    complete: bool = True
    skipped: int = 0

    @property
    def paid(self) -> int:
        """Number of rollouts that the run paid, by its own accounts; 0 if unknown."""
        return sum(self.booked.values())

    @property
    def wasted(self) -> float | None:
        """Share of rollouts without a learning signal, by the trainer's own accounts if it logged any; None if unknown."""
        if (taught := share_taught(self.booked)) is not None:
            return 1 - taught
        return None if self.shares is None else self.shares.wasted.value

    def described(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {"finding": sentence(self), "wasted": self.wasted, **asdict(self)}


def find(log: Log, *, threshold: float | None = None, from_step: int | None = None) -> Finding:
    """Count the rollouts of a log by cause.

    Args:
        log: the log.
        threshold: rewards of at least this finite number are right, and all others wrong. None: rewards are used unchanged.
        from_step: ignore groups that were logged before this step or without a step; at least 0.

    Raises:
        ValueError: an argument is out of its range, there is no group at or after `from_step`, or the log has no rollouts.
    """
    check_asked(threshold=threshold, from_step=from_step)
    groups, stepless = chosen(log, from_step)
    groups = None if groups is None else groups.judged(threshold)
    booked = {} if log.accounts is None or from_step is not None else log.accounts
    booked = {cause: rollouts for cause, rollouts in booked.items() if cause != "open"}
    rollouts = sum(booked.values()) if groups is None else len(groups.rewards_R)
    if not rollouts:
        raise ValueError("expected rollouts in the log, but it counts none; wait until the run has generated some")
    finding = Finding(log.format, rollouts, None, booked, complete=log.complete, skipped=log.skipped)
    if groups is None:
        finding.notes += [*unusable(log), *log.notes]
        return finding
    compared = groups.take(groups.size_V > 1)
    finding.alone = len(groups) - len(compared)
    finding.shares = shares_of(compared) if len(compared) else None
    finding.notes += _compared_with_paid(finding, log)
    if finding.alone:
        finding.notes.append((_ALONE_BOOKED if booked else ALONE).format(finding.alone))
    finding.notes += [*unusable(log), *_warnings(compared, threshold)]
    if from_step is not None and stepless:
        finding.notes.append(
            f"{stepless:,} groups with an unknown step were left out, like the groups before --from-step"
        )
    finding.notes += log.notes
    return finding


def _compared_with_paid(finding: Finding, log: Log) -> list[str]:
    """A sentence if the log has fewer or more rollouts than the run counted as paid."""
    if not log.runs or not finding.paid or finding.rollouts == finding.paid:
        return []
    sources = ", ".join(visible(run.source) for run in log.runs[:3])
    logged, paid = f"the log has {finding.rollouts:,}", f"{finding.paid:,}"
    if finding.rollouts < finding.paid:
        still = sum(run.accounts.get("open", 0) for run in log.runs)
        more = f" ({still:,} more are still open)" if still else ""
        return [
            f"{logged} of the {paid} rollouts that the run paid by {sources}{more}; shares by rewards are of these alone"
        ]
    return [f"{logged} rollouts, and {sources} counts {paid}: the run went on after that file"]


def chosen(log: Log, from_step: int | None) -> tuple[Groups | None, int]:
    """The groups at or after `from_step` (None if the log has only totals), and the number of groups without a step.

    Raises:
        ValueError: no group was logged at or after `from_step`.
    """
    if not log.groups and from_step is None:
        return None, 0
    if not log.groups:
        raise ValueError(f"--from-step {from_step}: the log has only totals over all steps; leave the option out")
    stepless = int((log.groups.step_V == NO_STEP).sum())
    if from_step is None:
        return log.groups, stepless
    groups = log.groups.take(log.groups.step_V >= from_step)
    if not len(groups):
        raise ValueError(f"--from-step {from_step}: no group was logged at or after this step; give an earlier step")
    return groups, stepless


def check_asked(*, threshold: float | None, from_step: int | None) -> None:
    """Raise an error for invalid arguments of `find`, before anything is read.

    Raises:
        ValueError: an argument is out of its range.
    """
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(
            f"--threshold: expected a finite number, the lowest reward of a right rollout, got {threshold}"
        )
    if from_step is not None and from_step < 0:
        raise ValueError(f"--from-step: expected a whole number of at least 0, got {from_step}")


def sentence(finding: Finding) -> str:
    """The finding in one sentence."""
    shares = finding.shares
    if finding.booked:
        return f"{finding.wasted or 0.0:.1%} of {finding.paid:,} rollouts taught nothing, by the run's own accounts."
    if shares is None:
        return f"No group has 2 rollouts or more, so it is unknown what the {finding.rollouts:,} rollouts taught."
    alone = f"; {finding.alone:,} rollouts alone in their group are not counted" if finding.alone else ""
    interval = shares.wasted.interval
    within = "" if interval is None else " (95% interval {:.1%} – {:.1%})".format(*interval)
    which = "rollouts" if finding.complete else "rollouts that were trained on"
    more = f"; at least {finding.skipped:,} more were paid and are not in the log" if finding.skipped else ""
    return (
        f"{shares.wasted.value:.1%}{within} of {finding.rollouts - finding.alone:,} {which} taught nothing: "
        f"{shares.groups:,} groups of {shares.prompts:,} prompts{alone}{more}."
    )


def unusable(log: Log) -> list[str]:
    """Sentences about the lines and fields of a log that could not be used."""
    sentences: list[str] = []
    if log.bad:
        sentences.append(f"{log.bad:,} lines could not be used; the first is {log.first_bad}")
    if log.odd:
        sentences.append(f"{log.odd:,} fields are invalid and count as missing; the first is {log.first_odd}")
    return sentences


def _warnings(groups: Groups, threshold: float | None) -> list[str]:
    warnings: list[str] = []
    grades = np.unique(groups.rewards_R[~np.isnan(groups.rewards_R)])
    if threshold is None and len(grades) > _GRADES:
        warnings.append(
            f"rewards take {len(grades):,} values from {grades[0]:g} to {grades[-1]:g}, and a group counts as having a "
            "learning signal if its rewards are not all equal; --threshold sets the lowest reward of a right rollout"
        )
    moved = drifted(groups)
    return [*warnings, moved] if moved else warnings


def drifted(groups: Groups) -> str:
    """A sentence if the wasted shares of the first and last third of the steps differ by more than chance; else empty."""
    thirds = drift(groups)
    if thirds is None or not thirds[0].interval or not thirds[1].interval:
        return ""
    (early, late), (low, high) = thirds, zip(thirds[0].interval, thirds[1].interval, strict=True)
    if max(low) <= min(high):
        return ""
    return (
        f"the waste changed from {early.value:.1%} in the first third of the steps to {late.value:.1%} in the last third; "
        "the last third is closer to the next steps, and --from-step selects it"
    )
