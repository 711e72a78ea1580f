"""What a log cannot tell, and what would help."""

from __future__ import annotations

import math

import numpy as np

from rollalloc.lab.advise.rates import RateMixture
from rollalloc.lab.advise.rewards import RewardReading
from rollalloc.lab.waste.finding import drifted, unusable
from rollalloc.lab.waste.groups import Groups, Log
from rollalloc.lab.waste.shares import LEAST_PROMPTS

_WIDE = 0.25  # of an interval: more than that says too little
_SURE = 4.0  # standard errors


def too_few(judged: Groups, rates: RateMixture, prompts: int) -> str:
    """Why nothing should be decided on this log before more was sampled; empty: it is enough.

    Args:
        judged: groups whose rewards are 0, 1 or NaN.
        rates: fitted to them.
        prompts: different ones.
    """
    if prompts < LEAST_PROMPTS:
        return f"{prompts} prompt{'s' if prompts > 1 else ''} cannot speak for others"
    again_P = np.bincount(judged.prompt_V, judged.scored_V)
    if (again_P[again_P > 0] < 2).mean() > 0.5:
        return "most prompts have one scored rollout, which does not tell hard ones from luck; 4 of each would"
    if is_filtered(judged, rates):
        return (
            "groups whose rewards are all the same are missing, beyond chance: the log was filtered before it was written; "
            "what is sampled has to be logged, not what is trained on"
        )
    low, high = rates.zero_variance(4).interval or (0.0, 1.0)
    if high - low > _WIDE:
        said = f"the share of groups of 4 without variance may be anything from {low:.0%} to {high:.0%}"
        return f"by these {prompts:,} prompts {said}"
    return ""


def is_filtered(judged: Groups, rates: RateMixture) -> bool:
    """Whether fewer groups are without variance than any success rates would leave, by four standard errors.

    Args:
        judged: groups whose rewards are 0, 1 or NaN.
        rates: fitted to them.
    """
    several_V = (judged.scored_V > 1) & (judged.first_V == judged.size_V)  # sizes that no result decided
    if several_V.sum() < LEAST_PROMPTS:
        return False
    size_N, times_N = np.unique(judged.scored_V[several_V], return_counts=True)
    expected = sum(
        times * rates.zero_variance(int(size)).value
        for size, times in zip(size_N.tolist(), times_N.tolist(), strict=True)
    )
    found, groups = float((~judged.mixed_V[several_V]).sum()), float(several_V.sum())
    return found + _SURE * math.sqrt(max(expected * (1 - expected / groups), 1.0)) < expected


def notes_of(
    log: Log, judged: Groups, reward: RewardReading, unpredicted: str, seed: int
) -> list[str]:  # fmt: skip
    """What a reader of a profile should know, in order of importance.

    Args:
        log: that it is of.
        judged: its groups, with rewards 0, 1 or NaN.
        reward: what its rewards are like.
        unpredicted: why success was not predicted; empty: it was.
        seed: of resampling, at least 0.
    """
    found = [*reward.rules_out]
    if moved := drifted(judged.take(judged.size_V > 1), seed) if (judged.size_V > 1).any() else "":
        found.append(f"several models are mixed here: {moved}")
    if np.median(judged.size_V) < 2:
        found.append(
            "groups have one rollout: rates are of each prompt's visits together, whatever the model was by then"
        )
    if unpredicted:
        found.append(unpredicted)
    return [*found, *unusable(log), *log.notes]
