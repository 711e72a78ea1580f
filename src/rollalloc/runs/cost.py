"""Cost to target: the cost of a run until it reached an accuracy. All other modules use this definition.

A run is evaluated on a fixed grid: the multiples of `eval_every` rollouts paid. The evaluation at a grid point uses the
newest weights that were made with at most that number of rollouts. A run reaches the target when two successive evaluations
of different weights are at or above the target, because a single evaluation may be luck. The first of the two reaches the
target, and the second confirms it. The evaluation of the final weights is not on the grid: it can confirm the last grid
point, but it cannot reach the target. The cost is interpolated linearly between the grid point that reached the target and
the grid point before. If a run never reached the target, its cost is censored: it is more than the run had paid at its last
grid point.

Costs are rollouts, generated tokens, seconds without evaluation, and optimizer steps. The number of rollouts is the grid
point itself. The other costs are the totals when the evaluated weights were made.
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
    """Held-out accuracy against costs. Each column has one entry per evaluation with an accuracy, in order of time.

    Attributes:
        rollouts: the grid point, in rollouts paid.
        tokens: tokens generated before the evaluated weights were made.
        seconds: seconds before the evaluated weights were made, without evaluation.
        steps: optimizer steps before the evaluated weights were made; NaN if unknown.
        version: version of the evaluated weights; None if unknown.
        accuracy: accuracy, in [0, 1].
        standard_error: standard error of the accuracy; 0 if it is exact, None if unknown.
        final: version and accuracy of the final weights. Their evaluation may confirm that the last entry reached a target.
            None: there was no such evaluation after the last entry of the grid.
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
    """The cost of a run until it reached a target.

    Attributes:
        paid: the amount of each of `COSTS`.
        censored: True if the target was not reached; the cost is then more than `paid`.
        at: index of the grid point at which the target was reached; None if it was not reached.
    """

    paid: dict[str, float]
    censored: bool
    at: int | None = None


def curve_of(metrics: Iterable[Mapping[str, Any]]) -> Curve:
    """The curve of a run's evaluations on the grid. Costs are computed from it."""
    lines = _evaluations(metrics)
    final = next(((line["version"], line["accuracy"]) for line in reversed(lines) if line["at"] is None), None)
    return replace(_curve([line for line in lines if line["at"] is not None]), final=final)


def whole_curve_of(metrics: Iterable[Mapping[str, Any]]) -> Curve:
    """The curve of all evaluations of a run, including that of the final weights, for figures and texts.

    The final weights are plotted at the cost that had been paid when they were made. They are left out if the last grid
    point has the same weights.
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
    """The cost of a run until it reached the target; a lower bound if it never reached the target.

    Args:
        curve: the run's curve.
        target: accuracy, in (0, 1].

    Returns:
        The cost; None if the curve is empty.
    """
    if not curve.accuracy:
        return None
    at = _reached(curve, target)
    last = len(curve.accuracy) - 1 if at is None else at
    share = 1.0
    if at:
        before, after = curve.accuracy[at - 1], curve.accuracy[at]
        # The entry before `at` may be at or above the target, if it is the second evaluation of its weights and the first
        # was below. The cost is then the cost of the entry before `at`, without interpolation.
        share = (target - before) / (after - before) if before < target else 0.0
    paid = {name: _between(getattr(curve, name), last, share) for name in COSTS}
    return Cost(paid, censored=at is None, at=at)


def _reached(curve: Curve, target: float) -> int | None:
    """Index of the first grid point that reached the target and was confirmed; None if no grid point was."""
    evaluated = [*zip(curve.version, curve.accuracy, strict=True), *([] if curve.final is None else [curve.final])]
    starts = [0, *(at + 1 for at, (one, next_) in enumerate(pairwise(evaluated)) if one[0] != next_[0])]
    for at, confirmed_at in pairwise(starts):
        if min(evaluated[at][1], evaluated[confirmed_at][1]) >= target:
            return at
    return None


def _between(column: Sequence[float], at: int, share: float) -> float:
    """Interpolate linearly between the entry before `at` (share 0) and the entry at `at` (share 1)."""
    before = column[at - 1] if at else column[at]
    return float(before + share * (column[at] - before))
