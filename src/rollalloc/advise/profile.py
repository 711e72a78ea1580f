"""The profile of a model on its prompts, computed from a log; the verdict is based on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.advise.doubts import notes_of, too_few
from rollalloc.advise.lengths import LengthProfile, lengths_of
from rollalloc.advise.logged_rewards import RewardReading, read_rewards
from rollalloc.advise.predictability import Predictability, predictability_of
from rollalloc.advise.rates import Ints, RateMixture, fit_rates
from rollalloc.advise.shares import alike, pairs_differ
from rollalloc.waste.finding import chosen
from rollalloc.waste.groups import NO_STEP, Groups, Log
from rollalloc.waste.shares import Share

SIZES = (2, 4, 8, 16, 32)  # group sizes for which the share without variance is shown

Features = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Profile:
    """The properties of a model on its prompts, computed from a log.

    Attributes:
        prompts: number of distinct prompts.
        rollouts: number of logged rollouts.
        n: usual group size.
        rates: distribution of success rates over prompts.
        zero_variance: share of groups that are all right or all wrong, by group size. For graded rewards, it is the share of
            groups with equal rewards, and only of sizes up to the largest logged group.
        hopeless: share of prompts that are hardly ever solved.
        solved: share of prompts that are nearly always solved.
        mean: mean success rate.
        predictability: how well a rollout's success can be predicted; None if unknown.
        lengths: lengths of rollouts; None if not logged.
        reward: a description of the rewards.
        right_pairs_differ: probability that two right completions of a prompt differ; None if not logged.
        notes: notes for the reader, the most important first.
        too_few: why there are too few rollouts for a verdict; empty if there are enough.
        remedy: what to do then, if more rollouts of the same kind would not help.
        groups: usual number of groups per step; 0 if unknown, or if there is only one step.
        complete: False if the log may lack rollouts that were paid but not trained on.
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
    lengths: LengthProfile | None
    reward: RewardReading
    right_pairs_differ: Share | None
    notes: tuple[str, ...]
    too_few: str
    remedy: str = ""
    groups: int = 0
    complete: bool = True

    @property
    def auc(self) -> float | None:
        """AUC of the best predictions of success; None if unknown."""
        return None if self.predictability is None else self.predictability.auc

    def described(self) -> dict[str, Any]:
        """The profile as plain data."""
        rest = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rates"}
        plain = {
            name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in rest.items()
        }
        plain["zero_variance"] = {str(n): asdict(share) for n, share in self.zero_variance.items()}
        grid = {"rate": self.rates.rate_K.tolist(), "weight": self.rates.weight_K.tolist(), "sd": asdict(self.rates.sd)}
        return plain | {"rates": grid, "graded": self.reward.graded, "auc": self.auc}


def profile_of(
    log: Log, *, threshold: float | None = None, from_step: int | None = None, features_PD: Features | None = None,
    seed: int = 0, resamples: int = 200,
) -> Profile:  # fmt: skip
    """Compute the profile of a log.

    Args:
        log: the log to profile.
        threshold: rewards of at least this finite number are right. None: a reward is right if it is nearer to the highest
            reward than to the lowest.
        from_step: ignore groups logged before this step; at least 0.
        features_PD: features of each prompt, in the order of the log's keys. None: computed from the logged texts.
        seed: seed of everything random, at least 0.
        resamples: number of resamples of bootstraps over prompts.

    Raises:
        ValueError: the log has only totals, no score, or no group at or after `from_step`.
    """
    groups, _ = chosen(log, from_step)
    if groups is None:
        raise ValueError(
            "expected single rollouts, but the log has only totals; train with "
            "--log-rollouts, and give the folder with rollouts.jsonl"
        )
    reward = read_rewards(groups, threshold)
    judged = groups.judged(reward.threshold)
    n = int(np.median(groups.size_V))
    rates = fit_rates(*_counts(judged), seed=seed, resamples=resamples)
    predictability, unpredicted = predictability_of(judged, features_PD, seed=seed, resamples=resamples)
    prompts = len(np.unique(groups.prompt_V))
    unfair = (log.selected, log.remedy) if log.selected else None
    lacks, remedy = unfair or too_few(judged, rates, prompts, complete=log.complete)
    lengths = lengths_of(judged, seed=seed, resamples=resamples)
    zero_variance = {n: alike(groups, n) if reward.graded else rates.zero_variance(n) for n in SIZES}
    return Profile(
        prompts=prompts,
        rollouts=len(groups.rewards_R),
        n=n,
        rates=rates,
        zero_variance={n: share for n, share in zero_variance.items() if share is not None},
        hopeless=rates.hopeless,
        solved=rates.solved,
        mean=rates.mean,
        predictability=predictability,
        lengths=lengths,
        reward=reward,
        right_pairs_differ=pairs_differ(judged),
        notes=tuple(notes_of(log, judged, reward, unpredicted)),
        too_few=lacks,
        remedy=remedy,
        groups=_groups(groups),
        complete=log.complete,
    )


def _groups(groups: Groups) -> int:
    """Median number of groups per step; 0 if the log has no steps, or only one step, as in a sampled profile."""
    _, times_S = np.unique(groups.step_V[groups.step_V != NO_STEP], return_counts=True)
    return int(np.median(times_S)) if times_S.size > 1 else 0


def _counts(judged: Groups) -> tuple[Ints, Ints, Ints]:
    """Right rollouts, scored rollouts and prompt index of each visit. Visits with one rollout are summed per prompt."""
    hits_V = np.add.reduceat(np.nan_to_num(judged.rewards_R), judged.begin_V).astype(np.int64)
    count_V, prompt_V = judged.scored_V, judged.prompt_V
    if np.median(judged.size_V) < 2:
        hits_V, count_V = (np.bincount(prompt_V, counts).astype(np.int64) for counts in (hits_V, count_V))
        prompt_V = np.arange(len(hits_V))
    scored = np.flatnonzero(count_V)
    return hits_V[scored], count_V[scored], prompt_V[scored]
