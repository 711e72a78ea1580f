"""Measures of predictions: ranking, calibration and log-loss. Numbers of successes may be fractions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST = 1e-3  # rates are clipped to [LEAST, 1 - LEAST]; this limits the log-loss of a rollout to 6.9 nats

Floats = NDArray[np.float64]


def log_losses(said_KE: Floats, hits_K: Floats, count_K: Floats) -> Floats:
    """−h·log p − (n − h)·log(1 − p), summed over events, for each column; p is clipped to [0.001, 0.999].

    Args:
        said_KE: p, the predictions, shape (K, E).
        hits_K: h, the sum of each event's metrics, in [0, count].
        count_K: n, the number of each event's rollouts.

    Returns:
        Shape (E,), in nats.
    """
    sure_KE = np.clip(said_KE, LEAST, 1 - LEAST)
    return -(hits_K @ np.log(sure_KE) + (count_K - hits_K) @ np.log1p(-sure_KE))


def auc(said_K: Floats, hits_K: Floats, count_K: Floats) -> float | None:
    """The probability that a random success had a higher prediction than a random failure; ties count half.

    An event counts as `hits` successes and `count − hits` failures. None if there are no successes or no failures.
    """
    _, tie_K = np.unique(said_K, return_inverse=True)
    hits_T, misses_T = np.bincount(tie_K, hits_K), np.bincount(tie_K, count_K - hits_K)
    pairs = hits_T.sum() * misses_T.sum()
    below_T = np.cumsum(misses_T) - misses_T
    return float(hits_T @ (below_T + misses_T / 2) / pairs) if pairs > 0 else None


def calibration_error(said_K: Floats, hits_K: Floats, count_K: Floats, bins: int = 10) -> float:
    """Σ share · |mean prediction − mean metric| over bins; 0 or more. Events sorted by prediction fill the bins equally.

    Even perfect predictions have an error of about √(2 p(1 − p) bins / (π rollouts)) by chance, for example 0.05 for 640
    rollouts at p = 1/2 in 10 bins.
    """
    error = 0.0
    for part in np.array_split(np.argsort(said_K, kind="stable"), bins):
        error += abs(float(np.sum(count_K[part] * said_K[part] - hits_K[part])))
    return error / float(count_K.sum())
