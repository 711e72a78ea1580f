"""Cost to target, defined here and nowhere else: what a run paid until it reached an accuracy.

A run is evaluated on a fixed grid of rollouts paid: at each multiple of `eval_every`, the newest weights whose rollouts
all lie within it. The target is reached at the first grid point from which two evaluations in a row, of different
weights, are at or above it: one lucky evaluation is not enough. The evaluation of the final weights, which is no grid
point, counts as the second of two. Between that point and the one before it the cost is
interpolated linearly. A run that never got there is censored: its cost is more than what it had paid at its last grid
point.

Costs are rollouts, generated tokens, seconds (evaluation aside) and optimizer steps. The first is read off the grid;
the others are what had been paid when the weights of a grid point were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan
from typing import Any

COSTS = ("rollouts", "tokens", "seconds", "steps")


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out accuracy, one entry an evaluation that has an accuracy, in order.

    Attributes:
        rollouts: the grid point, in rollouts paid.
        tokens: generated, when the weights were made; so are the two that follow.
        seconds: spent on everything but evaluation.
        steps: of the optimizer; NaN where it is not known.
        version: of the weights; None where it is not known.
        accuracy: in [0, 1].
        standard_error: of the accuracy; 0 where it is exact, None where it is not known.
        final: version and accuracy of the final weights, where these were evaluated and are no entry; None: they were not.
            They may confirm the last entry.
    """

    rollouts: tuple[float, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    steps: tuple[float, ...]
    version: tuple[int | None, ...]
    accuracy: tuple[float, ...]
    standard_error: tuple[float | None, ...]
    final: tuple[int | None, float] | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run paid.

    Attributes:
        paid: amount by each of `COSTS`.
        censored: the target was not reached: the cost is more than `paid`.
        at: index of the grid point at which it was; None where it was not.
    """

    paid: dict[str, float]
    censored: bool
    at: int | None = None


def curve_of(metrics: Iterable[Mapping[str, Any]]) -> Curve:
    """The evaluations of a run on the grid that have an accuracy: what costs are computed from."""
    lines = _evaluations(metrics)
    final = next(((line["version"], line["accuracy"]) for line in reversed(lines) if line["at"] is None), None)
    return replace(_curve([line for line in lines if line["at"] is not None]), final=final)


def whole_curve_of(metrics: Iterable[Mapping[str, Any]]) -> Curve:
    """The same and the evaluation of the final weights, which is no point of the grid: what figures and sentences show.

    That one stands at what was paid when these weights were made, unless the last grid point has them already.
    """
    lines = _evaluations(metrics)
    grid = [line for line in lines if line["at"] is not None]
    final = next((line for line in reversed(lines) if line["at"] is None), None)
    if final is None or (grid and grid[-1]["version"] == final["version"]):
        return _curve(grid)
    return _curve([*grid, {**final, "at": max([final["rollouts_paid"], *(line["at"] for line in grid[-1:])])}])


def _evaluations(metrics: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in metrics if line["kind"] == "eval" and line["accuracy"] is not None]


def _curve(lines: Sequence[Mapping[str, Any]]) -> Curve:
    columns = ("at", "tokens_paid", "seconds", "optimizer_steps", "version", "accuracy", "standard_error")
    at, tokens, seconds, steps, *others = (tuple(line[name] for line in lines) for name in columns)
    return Curve(at, tokens, seconds, tuple(nan if step is None else step for step in steps), *others)


def cost_to_target(curve: Curve, target: float) -> Cost | None:
    """What was paid when the target was reached, or a lower bound of it.

    Args:
        curve: of a run.
        target: accuracy, in (0, 1].

    Returns:
        The cost; None where nothing was evaluated.
    """
    if not curve.accuracy:
        return None
    at = _reached(curve, target)
    last = len(curve.accuracy) - 1 if at is None else at
    share = 1.0
    if at:
        before, after = curve.accuracy[at - 1], curve.accuracy[at]
        # Sampled anew, the weights before may have stood there once: no further back than that.
        share = (target - before) / (after - before) if before < target else 0.0
    paid = {name: _between(getattr(curve, name), last, share) for name in COSTS}
    return Cost(paid, censored=at is None, at=at)


def _reached(curve: Curve, target: float) -> int | None:
    """Index of the first grid point from which the weights, and those evaluated next, are at the target."""
    evaluated = [*zip(curve.version, curve.accuracy, strict=True), *([] if curve.final is None else [curve.final])]
    starts = [0, *(at + 1 for at, (one, next_) in enumerate(pairwise(evaluated)) if one[0] != next_[0])]
    for at, confirmed_at in pairwise(starts):
        if min(evaluated[at][1], evaluated[confirmed_at][1]) >= target:
            return at
    return None


def _between(column: Sequence[float], at: int, share: float) -> float:
    """The value that share of the way from the entry before to this one."""
    before = column[at - 1] if at else column[at]
    return float(before + share * (column[at] - before))
