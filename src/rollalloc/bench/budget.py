"""What a run will have paid when it reaches a held-out accuracy, from its first evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from rollalloc.runs.cost import Curve, cost_to_target

# Cost over forecast, 5% and 95% of 126 finished runs of tiny models from their first two evaluations
# (`benchmarks/budget.py`, LOG.md). Tasks differ by more than runs of one: 10% and 90% held 64% of the costs of a task that
# they had not seen, these 79%.
SPREAD = (0.26, 2.28)
_RISE = 1e-3  # logits over the evaluations so far; with less nothing is being learned that a line could follow
_CLOSEST = 1e-3  # an accuracy is not taken to be nearer to 0 or 1 than this


class Unforeseeable(ValueError):
    """These evaluations do not carry a forecast; the message says what is needed."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What is forecast in one currency.

    Attributes:
        value: to the target.
        interval: that 80% of such costs lie in.
    """

    value: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run will have paid at its target.

    Attributes:
        rollouts: paid.
        tokens: generated, at the rate of tokens a rollout so far.
        evaluations: that it is made of.
        reached: whether the run is there already; then nothing is forecast and the interval is a point.
    """

    rollouts: Budget
    tokens: Budget
    evaluations: int
    reached: bool


def forecast_to(curve: Curve, target: float, *, upto: float = inf) -> Forecast:
    """Forecast the cost to an accuracy from the evaluations so far.

        logit a(r) = logit a(0) + b r,  b by least squares;  r* = (logit target - logit a(0)) / b

    The interval is r* times `SPREAD`, what finished runs paid over what was forecast of them (split conformal), and begins
    at what is paid already.

    Args:
        curve: of a run, with its first evaluation before any rollout.
        target: accuracy, in (0, 1).
        upto: evaluations at more rollouts are not looked at.

    Raises:
        ValueError: a target out of its range.
        Unforeseeable: fewer than two evaluations, none before the first rollout, or no rise.
    """
    if not 0 < target < 1:
        raise ValueError(f"target must be an accuracy above 0 and below 1, got {target}")
    kept = np.array(curve.rollouts, np.float64) <= upto
    at_E, accuracy_E = np.array(curve.rollouts, np.float64)[kept], np.array(curve.accuracy, np.float64)[kept]
    cost = cost_to_target(curve, target) if kept.all() else None
    if cost is not None and not cost.censored:
        rollouts, tokens = cost.paid["rollouts"], cost.paid["tokens"]
        return Forecast(Budget(rollouts, (rollouts, rollouts)), Budget(tokens, (tokens, tokens)), len(at_E), True)
    if len(at_E) < 2 or at_E[0] != 0:
        raise Unforeseeable(
            f"expected an evaluation before the first rollout and one after it, got {len(at_E)}; wait for the next, or "
            "evaluate more often (--eval-every)"
        )
    logit_E = _logit(accuracy_E)
    rise_E, wanted = logit_E[1:] - logit_E[0], float(_logit(np.array(target)) - logit_E[0])
    slope = float(at_E[1:] @ rise_E / (at_E[1:] @ at_E[1:]))
    if slope * at_E[-1] < _RISE:
        raise Unforeseeable(
            f"accuracy has not risen in {at_E[-1]:,.0f} rollouts ({accuracy_E[0]:.3f} to {accuracy_E[-1]:.3f}): there is no "
            "trend to go on; wait for more evaluations"
        )
    paid, reached = float(at_E[-1]), max(wanted / slope, 0.0)
    per_rollout = float(np.array(curve.tokens)[kept][-1]) / paid
    interval = tuple(max(paid, factor * reached) for factor in SPREAD)
    rollouts = Budget(max(paid, reached), (interval[0], interval[1]))
    tokens = Budget(rollouts.value * per_rollout, (interval[0] * per_rollout, interval[1] * per_rollout))
    return Forecast(rollouts, tokens, len(at_E), False)


def _logit(accuracy_E: np.ndarray) -> np.ndarray:
    held_E = np.clip(accuracy_E, _CLOSEST, 1 - _CLOSEST)
    return np.log(held_E / (1 - held_E))
