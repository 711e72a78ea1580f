"""The profile of a model on its prompts, out of a log: what a verdict is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rollalloc.lab.advise.predictability import Predictability
from rollalloc.lab.advise.rates import RateMixture, fit_rates
from rollalloc.lab.waste.groups import Groups, Log
from rollalloc.lab.waste.shares import LEAST_PROMPTS, Share

SIZES = (2, 4, 8, 16, 32)  # of groups whose variance is told
_RIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a rollout.

    Attributes:
        p50: median.
        p95: 95th percentile.
        longest: that was logged.
        truncated: share that hit the limit; None: the log does not say.
        correlation: rank correlation of length and success; None: one of them does not vary.
    """

    p50: Share
    p95: Share
    longest: int
    truncated: Share | None
    correlation: Share | None


@dataclass(frozen=True, slots=True)
class RewardReading:
    """What rewards are like.

    Attributes:
        low: the lowest.
        high: the highest.
        values: different ones.
        graded: whether there are more than two.
        unscored: share of rollouts without one.
        usual: share of the scored that have the most frequent value.
        rules_out: what these rewards rule out, in sentences.
    """

    low: float
    high: float
    values: int
    graded: bool
    unscored: Share
    usual: Share
    rules_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a model on its prompts.

    Attributes:
        prompts: different ones.
        rollouts: logged.
        n: usual size of a group.
        rates: success rates over prompts.
        zero_variance: share of groups without variance, by rollouts of a group.
        hopeless: share of prompts that are hardly ever solved.
        solved: share of prompts that nearly always are.
        mean: success rate.
        predictability: of a rollout's success; None: nothing could be said.
        lengths: of rollouts; None: the log does not say.
        reward: what rewards are like.
        right_pairs_differ: chance that two right completions of a prompt differ; None: the log does not say.
        notes: what a reader should know, in order of importance.
        too_few: what there is too little of; empty: enough.
    """

    prompts: int
    rollouts: int
    n: int
    rates: RateMixture
    zero_variance: Mapping[int, Share]
    hopeless: Share
    solved: Share
    mean: Share
    predictability: Predictability | None
    lengths: Lengths | None
    reward: RewardReading
    right_pairs_differ: Share | None
    notes: tuple[str, ...]
    too_few: str

    def signals(self) -> dict[str, float]:
        """The numbers that a verdict is learned from; what is not known stands at what says nothing."""
        auc = None if self.predictability is None else self.predictability.auc
        return {
            "zero_variance_4": self.zero_variance[4].value,
            "mean_rate": self.mean.value,
            "spread": self.rates.sd.value,
            "auc": 0.5 if auc is None else auc,
            "graded": float(self.reward.graded),
            "many_answers": 0.0 if self.right_pairs_differ is None else self.right_pairs_differ.value,
        }


def profile_of(log: Log, *, threshold: float | None = None, seed: int = 0, resamples: int = 200) -> Profile:
    """The profile that a log gives.

    Args:
        log: as read.
        threshold: rewards of at least this are right, a finite number; by default half way between lowest and highest.
        seed: of everything random, at least 0.
        resamples: of bootstraps over prompts.

    Raises:
        ValueError: a log that has only sums, or no score at all.
    """
    if log.groups is None:
        raise ValueError("expected rollouts, the log has only sums; train with --log-rollouts")
    groups = log.groups
    judged, reward = _judged(groups, threshold)
    hits_V = np.add.reduceat(np.nan_to_num(judged.rewards_R), judged.begin_V).astype(np.int64)
    scored = np.flatnonzero(judged.scored_V)
    rates = fit_rates(hits_V[scored], judged.scored_V[scored], judged.prompt_V[scored], seed=seed, resamples=resamples)
    prompts = len(np.unique(judged.prompt_V))
    few = f"{prompts} prompts, where {LEAST_PROMPTS} are the least" if prompts < LEAST_PROMPTS else ""
    return Profile(
        prompts=prompts,
        rollouts=len(groups.rewards_R),
        n=int(np.median(groups.size_V)),
        rates=rates,
        zero_variance={n: rates.zero_variance(n) for n in SIZES},
        hopeless=rates.hopeless,
        solved=rates.solved,
        mean=rates.mean,
        predictability=None,
        lengths=None,
        reward=reward,
        right_pairs_differ=None,
        notes=tuple(log.notes),
        too_few=few,
    )


def _judged(groups: Groups, threshold: float | None) -> tuple[Groups, RewardReading]:
    """The groups with 1 for what is right and 0 for what is wrong, and what the rewards were like.

    Raises:
        ValueError: no score at all.
    """
    known_R = groups.rewards_R[~np.isnan(groups.rewards_R)]
    if not known_R.size:
        raise ValueError("expected rewards, none of the log's rollouts has one; --reward names another field")
    value_U, times_U = np.unique(known_R, return_counts=True)
    low, high = float(value_U[0]), float(value_U[-1])
    if threshold is None:
        threshold = (low + high) / 2 if high > low else _RIGHT
    unscored = Share(1 - len(known_R) / len(groups.rewards_R), None)
    usual = Share(float(times_U.max() / len(known_R)), None)
    return groups.judged(threshold), RewardReading(low, high, len(value_U), len(value_U) > 2, unscored, usual)
