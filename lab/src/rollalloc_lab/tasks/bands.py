"""Choose prompts by their success rates, so that a pool has given shares of rare, frequent and other successes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollalloc.tasks.skills import Pool


def chosen_by_rate(rate_N: NDArray[np.float64], count: int, pool: Pool, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose prompts whose rates have the pool's shares.

    Args:
        rate_N: success rate of each candidate, in [0, 1].
        count: number of prompts to choose.
        pool: bands of rates and their shares.
        rng: draws within each band, and the order.

    Returns:
        Indices of `count` different candidates in random order, shape (count,).

    Raises:
        ValueError: a band has too few candidates.
    """
    band_N = np.digitize(rate_N, pool.edges)
    wanted_S = pool.counts(count)
    there_S = np.bincount(band_N, minlength=len(wanted_S))
    if (there_S < wanted_S).any():
        raise ValueError(
            f"expected at least {wanted_S.tolist()} prompts in the bands of rates with edges {pool.edges}, found "
            f"{there_S.tolist()}; draw more candidates, or ask for fewer prompts"
        )
    parts = [rng.permutation(np.flatnonzero(band_N == band))[:wanted] for band, wanted in enumerate(wanted_S.tolist())]
    return rng.permutation(np.concatenate(parts))
