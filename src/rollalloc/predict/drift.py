"""A common drift of all logits: a random walk, followed by a Kalman step on what came beside what was said."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FARTHEST = 1.0  # logits in one step: the step is linear, and holds no farther


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

    g = Σ (h − np)·p′ / (p(1 − p)) is the score of δ and I = Σ n·p′² / (p(1 − p)) its information, over the events since the
    last step, which had M rollouts.

    Args:
        offset: δ, logits.
        variance: P of δ, at least 0.
        said_K: p of each event under δ, in (0, 1).
        slope_K: p′ = ∂p/∂δ.
        hits_K: sum of metrics, in [0, count].
        count_K: rollouts, at least 1.
        rate: q, variance of the walk's step a rollout, at least 0; 0 does not follow.

    Returns:
        δ and P after the step; δ moves by at most 1.
    """
    variance += rate * float(count_K.sum())
    spread_K = said_K * (1 - said_K)
    score = float(np.sum((hits_K - count_K * said_K) * slope_K / spread_K))
    information = float(np.sum(count_K * slope_K**2 / spread_K))
    variance /= 1.0 + variance * information
    return offset + float(np.clip(variance * score, -_FARTHEST, _FARTHEST)), variance
