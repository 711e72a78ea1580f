"""Quantiles of rollout lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.seeds import rng
from rollalloc.waste.groups import NOT_SAID, Groups
from rollalloc.waste.shares import LEAST_PROMPTS, Share, share_of

_MOST = 2048  # maximum number of prompts to use


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """How long rollouts are.

    Attributes:
        unit: tokens if they are logged, otherwise characters of the texts.
        p50: median.
        p95: 95th percentile.
        longest: maximum in the log.
        truncated: share of rollouts that reached the length limit. None: not logged.
    """

    unit: Literal["tokens", "characters"]
    p50: Share
    p95: Share
    longest: int
    truncated: Share | None


def lengths_of(judged: Groups, *, seed: int = 0, resamples: int = 200) -> LengthProfile | None:
    """Quantiles of rollout length. Intervals are bootstrapped over at most 2,048 prompts.

    Args:
        judged: groups whose rewards are 0, 1 or NaN.
        seed: seed of the bootstrap, at least 0.
        resamples: number of resamples of the bootstrap.

    Returns:
        None if the log has neither the tokens of all rollouts nor the texts of all rollouts.
    """
    unit, length_R = ("tokens", judged.tokens_R)
    if (length_R == NOT_SAID).any():
        unit, length_R = ("characters", judged.characters_R)
    if (length_R == NOT_SAID).any() or not len(length_R):
        return None
    random = rng(seed, "advise lengths")
    visited = np.unique(judged.prompt_V)
    chosen = random.permutation(visited)[:_MOST]
    prompt_R = np.repeat(judged.prompt_V, judged.size_V)
    some_R = np.isin(prompt_R, chosen)
    row_R = np.searchsorted(np.sort(chosen), prompt_R[some_R])
    times_BP = random.multinomial(len(chosen), np.full(len(chosen), 1 / len(chosen)), resamples)
    told_V = judged.truncated_V != NOT_SAID
    logged = judged.take(told_V)
    longest = int(length_R.max())
    p50, p95 = _quantiles(length_R[some_R], row_R, times_BP)
    return LengthProfile(
        unit=unit,
        p50=p50,
        p95=p95,
        longest=longest,
        truncated=share_of(logged.truncated_V, logged.size_V, logged.prompt_V),
    )


def _quantiles(length_R: NDArray[np.int64], row_R: NDArray[np.int64], times_BP: NDArray[np.int64]) -> list[Share]:
    order_R = np.argsort(length_R, kind="stable")
    length_R, row_R = length_R[order_R], row_R[order_R]

    def quantiles(times_P: NDArray[np.int64]) -> NDArray[np.int64]:
        until_R = np.cumsum(times_P[row_R])
        return length_R[np.searchsorted(until_R, np.array([0.5, 0.95]) * until_R[-1])]

    prompts = times_BP.shape[1]
    values = quantiles(np.ones(prompts, np.int64)).tolist()
    if prompts < LEAST_PROMPTS:
        return [Share(float(value), None) for value in values]
    low_2, high_2 = np.quantile([quantiles(times_P) for times_P in times_BP], (0.025, 0.975), axis=0).tolist()
    return [Share(float(value), (low, high)) for value, low, high in zip(values, low_2, high_2, strict=True)]
