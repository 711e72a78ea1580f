"""The profile of a model on its prompts, out of a log: what a verdict is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.lab.advise.doubts import notes_of, too_few
from rollalloc.lab.advise.lengths import Lengths, Watcher, lengths_of, with_seconds
from rollalloc.lab.advise.predictability import Predictability, predictability_of
from rollalloc.lab.advise.rates import Ints, RateMixture, fit_rates
from rollalloc.lab.advise.rewards import RewardReading, read_rewards
from rollalloc.lab.advise.shares import alike, pairs_differ
from rollalloc.lab.waste.finding import chosen
from rollalloc.lab.waste.groups import NO_STEP, Groups, Log
from rollalloc.lab.waste.shares import Share

__all__ = ["SIZES", "Lengths", "Predictability", "Profile", "RewardReading", "profile_of"]

SIZES = (2, 4, 8, 16, 32)  # of groups whose variance is told

Features = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a model on its prompts.

    Attributes:
        prompts: different ones.
        rollouts: logged.
        n: usual size of a group.
        rates: success rates over prompts.
        zero_variance: share of groups without variance, by rollouts of a group; where rewards are graded and groups are
            smaller than that, of groups all right or all wrong, which is at least as much.
        hopeless: share of prompts that are hardly ever solved.
        solved: share of prompts that nearly always are.
        mean: success rate.
        predictability: of a rollout's success; None: nothing could be said.
        lengths: of rollouts; None: the log does not say.
        reward: what rewards are like.
        right_pairs_differ: chance that two right completions of a prompt differ; None: the log does not say.
        notes: what a reader should know, in order of importance.
        too_few: what there is too little of; empty: enough.
        groups: usually logged in a step; 0: the log does not say, or has one step only.
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
    groups: int = 0

    @property
    def auc(self) -> float | None:
        """Of the best predictions of success; None: nothing could be said."""
        return None if self.predictability is None else self.predictability.auc

    def described(self) -> dict[str, Any]:
        """All of it as plain data."""
        rest = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rates"}
        plain = {
            name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in rest.items()
        }
        plain["zero_variance"] = {str(n): asdict(share) for n, share in self.zero_variance.items()}
        grid = {"rate": self.rates.rate_K.tolist(), "weight": self.rates.weight_K.tolist(), "sd": asdict(self.rates.sd)}
        return plain | {"rates": grid, "graded": self.reward.graded, "auc": self.auc}


def profile_of(
    log: Log, *, threshold: float | None = None, from_step: int | None = None, features_PD: Features | None = None,
    gpus: int | None = None, seed: int = 0, resamples: int = 200, watcher: Watcher = lambda done, of: None,
) -> Profile:  # fmt: skip
    """The profile that a log gives.

    Args:
        log: as read.
        threshold: rewards of at least this are right, a finite number; None: those nearer to the highest than to the lowest.
        from_step: groups logged before it are left out; at least 0.
        features_PD: numbers of each prompt of the log, in the order of its keys; by default those of the texts it has.
        gpus: of the cluster on which stopping and running ahead are simulated, at least 2; None: they are not.
        seed: of everything random, at least 0.
        resamples: of bootstraps over prompts.
        watcher: called before each simulation.

    Raises:
        ValueError: a log that has only sums, no score at all, or no group at or after `from_step`.
    """
    groups, _ = chosen(log, from_step)
    if groups is None:
        raise ValueError(
            "expected rollouts, the log has only sums; train with --log-rollouts, and give the folder with rollouts.jsonl"
        )
    reward = read_rewards(groups, threshold)
    judged = groups.judged(reward.threshold)
    n = int(np.median(groups.size_V))
    rates = fit_rates(*_counts(judged), seed=seed, resamples=resamples)
    predictability, unpredicted = predictability_of(judged, features_PD, seed=seed, resamples=resamples)
    prompts = len(np.unique(groups.prompt_V))
    lacks = too_few(judged, rates, prompts, complete=log.complete)
    lengths = lengths_of(judged, seed=seed, resamples=resamples)
    if lengths is not None and gpus is not None and not lacks:  # simulating takes seconds, and would decide nothing
        lengths = with_seconds(lengths, judged, n, gpus=gpus, seed=seed, watcher=watcher)
    zero_variance = {n: (alike(groups, n) if reward.graded else None) or rates.zero_variance(n) for n in SIZES}
    return Profile(
        prompts=prompts,
        rollouts=len(groups.rewards_R),
        n=n,
        rates=rates,
        zero_variance=zero_variance,
        hopeless=rates.hopeless,
        solved=rates.solved,
        mean=rates.mean,
        predictability=predictability,
        lengths=lengths,
        reward=reward,
        right_pairs_differ=pairs_differ(judged),
        notes=tuple(notes_of(log, judged, reward, unpredicted, seed)),
        too_few=lacks,
        groups=_groups(groups),
    )


def _groups(groups: Groups) -> int:
    """Groups of a step, the median; 0 where steps are not known, or there is one: a profile is no batch of anybody's."""
    _, times_S = np.unique(groups.step_V[groups.step_V != NO_STEP], return_counts=True)
    return int(np.median(times_S)) if times_S.size > 1 else 0


def _counts(judged: Groups) -> tuple[Ints, Ints, Ints]:
    """Right rollouts, scored ones and the prompt of each visit; of each prompt where visits are of one rollout."""
    hits_V = np.add.reduceat(np.nan_to_num(judged.rewards_R), judged.begin_V).astype(np.int64)
    count_V, prompt_V = judged.scored_V, judged.prompt_V
    if np.median(judged.size_V) < 2:
        hits_V, count_V = (np.bincount(prompt_V, each).astype(np.int64) for each in (hits_V, count_V))
        prompt_V = np.arange(len(hits_V))
    scored = np.flatnonzero(count_V)
    return hits_V[scored], count_V[scored], prompt_V[scored]
