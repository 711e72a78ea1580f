"""Quantiles of rollout lengths."""

from __future__ import annotations

from collections.abc import Sequence
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
        truncated: share of rollouts that reached the generator's length limit. None: not logged.
        limited: share of rollouts that reached the recipe's own limit. None: it stopped none, or this is not logged.
        right_p95: 95th percentile of the right rollouts. None: no rollout is right.
        beyond: share of all tokens (or characters) that come later in their rollout than `right_p95`: what a limit of
            that length would save. None: no rollout is right.
    """

    unit: Literal["tokens", "characters"]
    p50: Share
    p95: Share
    longest: int
    truncated: Share | None
    limited: Share | None
    right_p95: Share | None
    beyond: Share | None


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
    p50, p95 = _quantiles((0.5, 0.95), length_R[some_R], prompt_R[some_R], random, resamples)
    right_R = judged.rewards_R == 1
    right_p95 = beyond = None
    if (some_R & right_R).any():
        [right_p95] = _quantiles((0.95,), length_R[some_R & right_R], prompt_R[some_R & right_R], random, resamples)
        beyond_R = np.maximum(length_R - int(right_p95.value), 0)
        beyond_V, whole_V = (np.add.reduceat(each_R, judged.begin_V) for each_R in (beyond_R, length_R))
        beyond = share_of(beyond_V, whole_V, judged.prompt_V)
    logged = judged.take(judged.truncated_V != NOT_SAID)
    return LengthProfile(
        unit=unit,
        p50=p50,
        p95=p95,
        longest=int(length_R.max()),
        truncated=share_of(logged.truncated_V - logged.limited_V, logged.size_V, logged.prompt_V),
        limited=share_of(logged.limited_V, logged.size_V, logged.prompt_V) if judged.limited_R.any() else None,
        right_p95=right_p95,
        beyond=beyond,
    )


def _quantiles(
    at: Sequence[float],
    length_R: NDArray[np.int64],
    prompt_R: NDArray[np.int64],
    random: np.random.Generator,
    resamples: int,
) -> list[Share]:
    """Quantiles of the lengths, with intervals bootstrapped over prompts."""
    prompt_P, row_R = np.unique(prompt_R, return_inverse=True)
    order_R = np.argsort(length_R, kind="stable")
    length_R, row_R, prompts = length_R[order_R], row_R[order_R], len(prompt_P)

    def quantiles(times_P: NDArray[np.int64]) -> NDArray[np.int64]:
        until_R = np.cumsum(times_P[row_R])
        return length_R[np.searchsorted(until_R, np.array(at) * until_R[-1])]

    values = quantiles(np.ones(prompts, np.int64)).tolist()
    if prompts < LEAST_PROMPTS:
        return [Share(float(value), None) for value in values]
    times_BP = random.multinomial(prompts, np.full(prompts, 1 / prompts), resamples)
    low_Q, high_Q = np.quantile([quantiles(times_P) for times_P in times_BP], (0.025, 0.975), axis=0).tolist()
    return [Share(float(value), (low, high)) for value, low, high in zip(values, low_Q, high_Q, strict=True)]
