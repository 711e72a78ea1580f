"""Estimate a drift that all logits share: a random walk, followed by Kalman steps on prediction errors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FARTHEST = 1.0  # largest step, in logits; the linear approximation does not hold for larger steps


def step(
    offset: float,
    variance: float,
    said_K: NDArray[np.float64],
    slope_K: NDArray[np.float64],
    hits_K: NDArray[np.float64],
    count_K: NDArray[np.float64],
    rate: float,
) -> tuple[float, float]:
    """One extended Kalman step: P⁻ = P + qM, δ ← δ + P⁻g / (1 + P⁻I), P ← P⁻ / (1 + P⁻I).

    g = Σ (h − np)·p′ / (p(1 − p)) is the score of δ, and I = Σ n·p′² / (p(1 − p)) is its information. Both sums are over
    the events since the last step. These events had M rollouts in all.

    Args:
        offset: δ, in logits.
        variance: P, the variance of δ, at least 0.
        said_K: p, the predicted rate of each event under δ, in (0, 1).
        slope_K: p′ = ∂p/∂δ.
        hits_K: h, the sum of each event's metrics, in [0, count].
        count_K: n, the number of each event's rollouts, at least 1.
        rate: q, the variance of the random walk per rollout, at least 0. With 0, the drift stays constant.

    Returns:
        δ and P after the step. δ moves by at most 1.
    """
    variance += rate * float(count_K.sum())
    spread_K = said_K * (1 - said_K)
    score = float(np.sum((hits_K - count_K * said_K) * slope_K / spread_K))
    information = float(np.sum(count_K * slope_K**2 / spread_K))
    variance /= 1.0 + variance * information
    return offset + float(np.clip(variance * score, -_FARTHEST, _FARTHEST)), variance
