"""How good predictions were: ranking, calibration and log-loss. Hits may be fractions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST = 1e-3  # rates are clipped to [LEAST, 1 - LEAST], so one surprise costs at most 6.9 nats per rollout

Floats = NDArray[np.float64]


def log_losses(said_KE: Floats, hits_K: Floats, count_K: Floats) -> Floats:
    """−h·log p − (n − h)·log(1 − p), summed over events, for each column; p is clipped to [0.001, 0.999].

    Args:
        said_KE: p, the predictions, shape (K, E).
        hits_K: h, the sum of metrics, in [0, count].
        count_K: n, the rollouts.

    Returns:
        Shape (E,), in nats.
    """
    sure_KE = np.clip(said_KE, LEAST, 1 - LEAST)
    return -(hits_K @ np.log(sure_KE) + (count_K - hits_K) @ np.log1p(-sure_KE))


def auc(said_K: Floats, hits_K: Floats, count_K: Floats) -> float | None:
    """The probability that a success had a higher prediction than a failure; ties count half. None if there are no
    successes or no failures.

    An event counts as `hits` successes and `count − hits` failures.
    """
    _, tie_K = np.unique(said_K, return_inverse=True)
    hits_T, misses_T = np.bincount(tie_K, hits_K), np.bincount(tie_K, count_K - hits_K)
    pairs = hits_T.sum() * misses_T.sum()
    below_T = np.cumsum(misses_T) - misses_T
    return float(hits_T @ (below_T + misses_T / 2) / pairs) if pairs > 0 else None


def calibration_error(said_K: Floats, hits_K: Floats, count_K: Floats, bins: int = 10) -> float:
    """Σ share · |mean prediction − mean metric| over bins of events sorted by prediction, equally many in each; 0 or
    more.

    Even perfect predictions have an error, by chance: about √(2 p(1 − p) bins / (π rollouts)), which is 0.05 for 640
    rollouts at p = 1/2 in 10 bins.
    """
    error = 0.0
    for part in np.array_split(np.argsort(said_K, kind="stable"), bins):
        error += abs(float(np.sum(count_K[part] * said_K[part] - hits_K[part])))
    return error / float(count_K.sum())
