"""Fits the distribution of success rates over prompts, because the means of a few rollouts vary more than the rates do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.seeds import rng
from rollalloc.waste.shares import LEAST_PROMPTS, Share

HOPELESS = 0.02  # prompts with at most this rate are hopeless; those with at least 1 - HOPELESS are solved
_POINTS = 129
_STEPS = 400  # number of EM steps; further steps change only weights that the counts leave undetermined
_PSEUDO = 0.05  # pseudo-count of the uniform distribution, so that no rate gets weight 0
# The starting points of the resamples are drawn from a Dirichlet distribution. `_LUMPS` is the sum of its parameters for
# the rates between 0 and 1. `_ENDS` is its parameter for the rate 0, and also for the rate 1.
_LUMPS, _ENDS = 3.0, 1.0
_LEAST = 1e-300  # replaces a rate of 0 in logarithms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RateMixture:
    """A distribution of success rates over prompts, with bootstrap alternatives.

    Attributes:
        rate_K: grid of rates in [0, 1], ends included.
        weight_K: weight of each rate; the sum is 1.
        weight_BK: weights fitted to each bootstrap resample, each from its own starting point; empty if there are too few
            prompts.
    """

    rate_K: Floats
    weight_K: Floats
    weight_BK: Floats

    def share(self, value_K: Floats) -> Share:
        """The mean of a function of the rate, E[f(p)], with its interval.

        Args:
            value_K: values of f on the grid of rates.
        """
        return self._of(lambda weight_BK: weight_BK @ value_K)

    def zero_variance(self, n: int) -> Share:
        """The share of groups of n rollouts that are all right or all wrong: E[p^n + (1 - p)^n].

        Args:
            n: rollouts of a group, at least 1.
        """
        return self.share(self.rate_K**n + (1 - self.rate_K) ** n)

    @property
    def hopeless(self) -> Share:
        """The share of prompts whose rate is at most .02."""
        return self.share((self.rate_K <= HOPELESS).astype(np.float64))

    @property
    def solved(self) -> Share:
        """The share of prompts whose rate is at least .98."""
        return self.share((self.rate_K >= 1 - HOPELESS).astype(np.float64))

    @property
    def mean(self) -> Share:
        """The mean rate."""
        return self.share(self.rate_K)

    @property
    def sd(self) -> Share:
        """Standard deviation of the rates over prompts."""
        return self._of(
            lambda weight_BK: np.sqrt(np.maximum(weight_BK @ self.rate_K**2 - (weight_BK @ self.rate_K) ** 2, 0.0))
        )

    def posterior_mean(self, hits_P: Ints, count_P: Ints) -> Floats:
        """Posterior mean rate of prompts with these counts, E[p | s of n], shape (P,).

        Args:
            hits_P: number of right rollouts of each prompt, in [0, count].
            count_P: number of rollouts of each prompt. If it is 0, the result is the mean over all prompts.
        """
        return self.expected(self.rate_K, hits_P, count_P)

    def expected(self, value_K: Floats, hits_P: Ints, count_P: Ints) -> Floats:
        """E[f(p) | s of n], shape (P,). `value_K` has f on the grid of rates. See `posterior_mean` for the counts."""
        chance_CK, cell_P = self._posterior(hits_P, count_P)
        return (chance_CK @ value_K)[cell_P]

    def quantile(self, level: float, hits_P: Ints, count_P: Ints) -> Floats:
        """Posterior quantile of each prompt's rate, shape (P,): the smallest grid rate with P(p ≤ rate | s of n) ≥ level.

        The fitted mixture is treated as exact. See `posterior_mean` for the counts.
        """
        chance_CK, cell_P = self._posterior(hits_P, count_P)
        at_C = np.minimum((chance_CK.cumsum(1) < level).sum(1), len(self.rate_K) - 1)
        return self.rate_K[at_C][cell_P]

    def _posterior(self, hits_P: Ints, count_P: Ints) -> tuple[Floats, Ints]:
        """Posterior weights of the rates for each different pair of counts, shape (C, K).

        The second result is the index of each prompt's pair.
        """
        cell_C2, cell_P = _cells(hits_P, count_P)
        joint_CK = _likelihood(cell_C2, self.rate_K) * self.weight_K
        return joint_CK / joint_CK.sum(1, keepdims=True), cell_P

    def _of(self, functional: Callable[[Floats], Floats]) -> Share:
        value = float(functional(self.weight_K[None])[0])
        if not len(self.weight_BK):
            return Share(value, None)
        low, high = np.quantile(functional(self.weight_BK), (0.025, 0.975)).tolist()
        return Share(value, (min(low, value), max(high, value)))


def fit_rates(
    hits_V: Ints, count_V: Ints, prompt_V: Ints | None = None, *, seed: int = 0, resamples: int = 200
) -> RateMixture:
    """Fit a mixture of binomials to the counts by maximum likelihood, with EM over a grid of rates.

        w ← (Σ_v w L_v / (w · L_v) + c b) / (V + c),   L_vk = p_k^s (1 - p_k)^(n - s)

    b is uniform, the pseudo-count c is 0.05, and EM starts at w = b. EM changes only what the counts determine. Everything
    else stays as in b: for example, 4 rollouts per prompt do not tell how many groups of 32 would have no variance. For
    the intervals to cover this uncertainty too, each resample has its own b and c. b is a random mixture of the uniform
    distribution and a Dirichlet draw with a few large weights. c is drawn from Exp(1), because a log in
    which x prompts of a rare kind are expected has none of them with probability exp(−x).

    Args:
        hits_V: number of right rollouts of each visit, in [0, count].
        count_V: number of rollouts of each visit, at least 1.
        prompt_V: the prompt of each visit. Visits of the same prompt are resampled together. None: all visits are of
            different prompts.
        seed: seed of the bootstrap, at least 0.
        resamples: number of resamples of the bootstrap over prompts.

    Raises:
        ValueError: there are no visits.

    Source: Laird (1978) for the maximum; Fong, Lyddon and Holmes (2019) for resamples with pseudo-observations.
    """
    if not len(hits_V):
        raise ValueError("expected counts of at least one prompt, got none")
    prompt_V = np.arange(len(hits_V)) if prompt_V is None else np.unique(prompt_V, return_inverse=True)[1]
    cell_C2, cell_V = _cells(hits_V, count_V)
    rate_K = np.sin(np.linspace(0.0, np.pi / 2, _POINTS)) ** 2  # this grid is finer near 0 and 1
    like_CK = _likelihood(cell_C2, rate_K)
    even_K = np.full(_POINTS, 1 / _POINTS)
    count_1C = np.bincount(cell_V, minlength=len(cell_C2))[None].astype(np.float64)
    weight_K = _fitted(count_1C, like_CK, even_K[None], np.full((1, 1), _PSEUDO))[0]
    prompts = int(prompt_V.max()) + 1
    if prompts < LEAST_PROMPTS:
        return RateMixture(rate_K, weight_K, np.zeros((0, _POINTS)))
    random = rng(seed, "advise rates")
    count_BC = np.empty((resamples, len(cell_C2)))
    for count_C in count_BC:
        times_P = np.bincount(random.integers(prompts, size=prompts), minlength=prompts)
        count_C[:] = np.bincount(cell_V, times_P[prompt_V], len(cell_C2))
    lumps_K = np.full(_POINTS, _LUMPS / _POINTS)
    lumps_K[[0, -1]] = _ENDS
    even_B1 = random.random((resamples, 1)) ** 2
    start_BK = even_B1 * even_K + (1 - even_B1) * random.dirichlet(lumps_K, resamples)
    pseudo_B1 = random.exponential(size=(resamples, 1))
    return RateMixture(rate_K, weight_K, _fitted(count_BC, like_CK, start_BK, pseudo_B1))


def _cells(hits_V: Ints, count_V: Ints) -> tuple[Ints, Ints]:
    """The distinct pairs (s, n), shape (C, 2), and the index of each visit's pair."""
    width = int(count_V.max(initial=0)) + 1
    code_C, cell_V = np.unique(hits_V * width + count_V, return_inverse=True)
    return np.stack([code_C // width, code_C % width], 1), cell_V


def _likelihood(cell_C2: Ints, rate_K: Floats) -> Floats:
    """p^s (1 - p)^(n - s), shape (C, K), each row divided by its maximum."""
    hits_C1, count_C1 = cell_C2[:, :1], cell_C2[:, 1:]
    right_K, wrong_K = np.log(np.maximum(rate_K, _LEAST)), np.log(np.maximum(1 - rate_K, _LEAST))
    log_CK = hits_C1 * right_K + (count_C1 - hits_C1) * wrong_K
    return np.exp(log_CK - log_CK.max(1, keepdims=True))


def _fitted(count_BC: Floats, like_CK: Floats, start_BK: Floats, pseudo_B1: Floats) -> Floats:
    """Weights after `_STEPS` steps of EM."""
    weight_BK, all_B1 = start_BK, count_BC.sum(1, keepdims=True) + pseudo_B1
    for _ in range(_STEPS):
        pull_BK = weight_BK * ((count_BC / (weight_BK @ like_CK.T)) @ like_CK)
        weight_BK = (pull_BK + pseudo_B1 * start_BK) / all_B1
    return weight_BK
