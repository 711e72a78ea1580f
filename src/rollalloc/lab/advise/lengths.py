"""Rollout lengths, and the time that stopping the longest or generating ahead could save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollalloc import recipes
from rollalloc.core.seeds import rng
from rollalloc.lab.simulate.cluster import Cluster, Scenario
from rollalloc.lab.simulate.result import PricedRecipe
from rollalloc.lab.simulate.simulation import simulate
from rollalloc.lab.simulate.workload import Logged, SimulatedOutcome
from rollalloc.lab.waste.groups import NOT_SAID, Groups
from rollalloc.lab.waste.shares import LEAST_PROMPTS, Share, share_of

_MOST = 2048  # prompts used, at most
_SEEDS, _BATCHES = 5, 6
_BATCH = 128  # approximate rollouts per simulated batch

Watcher = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """How long rollouts are.

    Attributes:
        unit: tokens if logged, else characters of the texts.
        p50: median.
        p95: 95th percentile.
        longest: maximum in the log.
        truncated: share that hit the limit; None: not logged.
        correlation: rank correlation of length and success; None: one of them does not vary.
        faster: simulated seconds of GRPO over those of stopping the longest rollouts, and of generating one batch ahead;
            empty if not requested, or if tokens are not logged.
    """

    unit: Literal["tokens", "characters"]
    p50: Share
    p95: Share
    longest: int
    truncated: Share | None
    correlation: Share | None
    faster: Mapping[str, Share]


def lengths_of(judged: Groups, *, seed: int = 0, resamples: int = 200) -> LengthProfile | None:
    """Quantiles of rollout length and the correlation with success, from at most 2,048 prompts, by a bootstrap over them.

    Args:
        judged: groups whose rewards are 0, 1 or NaN.
        seed: seed of the bootstrap, at least 0.
        resamples: number of resamples of the bootstrap.

    Returns:
        None if neither tokens nor texts of every rollout are logged.
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
        correlation=_correlation(length_R[some_R], judged.rewards_R[some_R], row_R, times_BP),
        faster={},
    )


def _quantiles(length_R: NDArray[np.int64], row_R: NDArray[np.int64], times_BP: NDArray[np.int64]) -> list[Share]:
    order_R = np.argsort(length_R, kind="stable")
    length_R, row_R = length_R[order_R], row_R[order_R]

    def quantiles(times_P: NDArray[np.int64]) -> NDArray[np.int64]:
        until_R = np.cumsum(times_P[row_R])
        return length_R[np.searchsorted(until_R, np.array([0.5, 0.95]) * until_R[-1])]

    value_2 = quantiles(np.ones(times_BP.shape[1], np.int64))
    return _shares(value_2, [quantiles(times_P) for times_P in times_BP], times_BP.shape[1])


def _correlation(
    length_R: NDArray[np.int64], right_R: NDArray[np.float64], row_R: NDArray[np.int64], times_BP: NDArray[np.int64]
) -> Share | None:
    """Spearman's rank correlation over scored rollouts."""
    known_R = ~np.isnan(right_R)
    _, tie_R, times_T = np.unique(length_R[known_R], return_inverse=True, return_counts=True)
    x_R = (np.cumsum(times_T) - times_T / 2)[tie_R] / max(1, len(tie_R))
    y_R, row_R = right_R[known_R], row_R[known_R]
    products = (np.ones(len(x_R)), x_R, y_R, x_R * x_R, y_R * y_R, x_R * y_R)
    sums_P6 = np.stack([np.bincount(row_R, product, times_BP.shape[1]) for product in products], 1)

    def correlation(sums_B6: NDArray[np.float64]) -> NDArray[np.float64]:
        count, x, y, xx, yy, xy = sums_B6.T
        with np.errstate(invalid="ignore", divide="ignore"):
            return (xy / count - x * y / count**2) / np.sqrt(
                (xx / count - (x / count) ** 2) * (yy / count - (y / count) ** 2)
            )

    value = correlation(sums_P6.sum(0)[None])
    if not np.isfinite(value).all():
        return None
    drawn_B = correlation((times_BP @ sums_P6).astype(np.float64))
    return _shares(value, drawn_B[np.isfinite(drawn_B)][:, None], times_BP.shape[1])[0]


def _shares(value_X: NDArray[np.generic], drawn_BX: object, prompts: int) -> list[Share]:
    if prompts < LEAST_PROMPTS:
        return [Share(float(share), None) for share in value_X.tolist()]
    ends_2X = np.quantile(np.asarray(drawn_BX), (0.025, 0.975), axis=0)
    return [
        Share(float(share), (low, high)) for share, low, high in zip(value_X.tolist(), *ends_2X.tolist(), strict=True)
    ]


def with_seconds(
    lengths: LengthProfile, judged: Groups, n: int, *, gpus: int, seed: int = 0, watcher: Watcher
) -> LengthProfile:
    """Add the simulated gain of stopping the longest rollouts, and of generating one batch ahead.

    Each simulated rollout has the length of one logged for its prompt. Costs are the simulator's defaults, 7.6 billion
    parameters on H100s. Stopping is DARTS with a sampled tail; generating ahead splits the GPUs between generation and
    training.

    Args:
        lengths: lengths of the same groups.
        judged: groups whose rewards are 0, 1 or NaN.
        n: rollouts per group, at least 1; capped at 128, the size of a simulated batch.
        gpus: number of GPUs of the cluster, at least 2.
        seed: the first of five.
        watcher: called for each simulation with the number before it and the number in all.
    """
    if lengths.unit != "tokens" or n < 2:
        return lengths
    n, workload = min(n, _BATCH), _logged(judged)
    groups = min(max(1, _BATCH // n), len(workload.rollouts))
    world = Scenario(cluster=Cluster(gpus=gpus), workload=workload, batches=_BATCHES)
    ahead = replace(world, cluster=Cluster(gpus=gpus, schedule="async"))
    plans = {
        "grpo": (recipes.grpo(groups, n), world),
        "stopping the longest": (recipes.darts(groups, n - n // 2, n // 2, tail="sampled"), world),
        "running a batch ahead": (recipes.grpo(groups, n), ahead),
    }
    results = {}
    for number, (name, (recipe, scenario)) in enumerate(plans.items()):
        watcher(number, len(plans))
        results[name] = [simulate(recipe, scenario, seed + offset) for offset in range(_SEEDS)]
    gains = {
        name: PricedRecipe.of(name, result, results["grpo"]).faster
        for name, result in results.items()
        if name != "grpo"
    }
    ends = {
        name: None if gain.low is None or gain.high is None else (gain.low, gain.high) for name, gain in gains.items()
    }
    return replace(lengths, faster={name: Share(gain.point, ends[name]) for name, gain in gains.items()})


def _logged(judged: Groups) -> Logged:
    """The first 2,048 prompts of a log, as a workload for the simulator."""
    some = judged.take(judged.prompt_V < _MOST)
    by_prompt: dict[int, list[SimulatedOutcome]] = {}
    prompt_R = np.repeat(some.prompt_V, some.size_V)
    for prompt, tokens, reward in zip(prompt_R.tolist(), some.tokens_R.tolist(), some.rewards_R.tolist(), strict=True):
        by_prompt.setdefault(prompt, []).append(SimulatedOutcome(max(1, tokens), False, reward > 0))
    return Logged(rollouts=list(by_prompt.values()), source="the log")
