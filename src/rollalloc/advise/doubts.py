"""Reasons why a log is too small or incomplete for a verdict, and notes for the reader."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rollalloc.advise.logged_rewards import RewardReading
from rollalloc.advise.rates import RateMixture
from rollalloc.advise.shares import all_drawn
from rollalloc.waste.finding import drifted, unusable
from rollalloc.waste.groups import Groups, Log
from rollalloc.waste.shares import LEAST_PROMPTS

_WIDE = 0.25  # an interval wider than this is too uncertain
_SURE, _SURE_OF_SOME = 4.0, 3.0  # standard errors required by the two tests of `is_filtered`


def too_few(judged: Groups, rates: RateMixture, prompts: int, *, complete: bool = True) -> tuple[str, str]:
    """The reason why this log has too few rollouts for a verdict, and what to do; both empty if it has enough.

    If more rollouts of the same kind would give a verdict, only the reason is set.

    Args:
        judged: groups with rewards of 0, 1 or NaN.
        rates: the mixture of rates fitted to the groups.
        prompts: number of different prompts.
        complete: False if groups without variance may be missing in the log.
    """
    if prompts < LEAST_PROMPTS:
        return f"{prompts} prompt{'s' if prompts > 1 else ''}, at least {LEAST_PROMPTS} are needed", ""
    again_P = np.bincount(judged.prompt_V, judged.scored_V)
    if (again_P[again_P > 0] < 2).mean() > 0.5:
        why = "most prompts have only one scored rollout, so hard prompts cannot be told from bad luck; sample 4 per prompt"
        return why, ""
    nothing_alike = not complete and bool(judged.mixed_V.all())
    if nothing_alike or is_filtered(judged, rates):
        return (
            "there are fewer groups with equal rewards than chance allows: the log was filtered before it was written",
            "log all sampled rollouts, not only those that are trained on",
        )
    low, high = rates.zero_variance(4).interval or (0.0, 1.0)
    if high - low > _WIDE:
        doubt = f"the share of groups of 4 without variance can be anything from {low:.0%} to {high:.0%}"
        return f"judging by these {prompts:,} prompts, {doubt}", ""
    return "", ""


def is_filtered(judged: Groups, rates: RateMixture) -> bool:
    """Whether groups without variance are missing in the log, because it has fewer of them than chance allows.

    Only rollouts ordered before any result was known are used, because later orders depend on results. Two tests are made:

    1. Does the log have fewer such groups than any distribution of success rates would give? This test detects a log in
       which all such groups are missing.
    2. Suppose that each prompt's rollouts were assigned to its visits at random. Does the log have fewer such groups than
       this would give? This test also detects a log in which only some of these groups are missing, but it needs prompts
       with several visits.

    Args:
        judged: groups with rewards of 0, 1 or NaN.
        rates: the mixture of rates fitted to the groups.
    """
    first = judged.first()
    first = first.take(first.scored_V > 1)
    if len(first) < LEAST_PROMPTS:
        return False
    size_N, times_N = np.unique(first.scored_V, return_counts=True)
    expected = sum(
        times * rates.zero_variance(int(size)).value
        for size, times in zip(size_N.tolist(), times_N.tolist(), strict=True)
    )
    alike, groups = float((~first.mixed_V).sum()), float(len(first))
    if alike + _SURE * math.sqrt(max(expected * (1 - expected / groups), 1.0)) < expected:
        return True
    missing_P = _missing(first)
    return float(missing_P.sum()) > _SURE_OF_SOME * math.sqrt(max(float(np.square(missing_P).sum()), 1.0))


def _missing(first: Groups) -> NDArray[np.float64]:
    """For each prompt, the expected number of visits without variance, minus the observed number.

    If n rollouts, s of them right, are assigned to the prompt's visits at random, a visit with m rollouts has no variance
    with probability C(s, m) / C(n, m) + C(n − s, m) / C(n, m).
    """
    prompts = len(first.keys)
    hits_V = np.add.reduceat(np.nan_to_num(first.rewards_R), first.begin_V)
    of_visits = (np.bincount(first.prompt_V, counts, prompts)[first.prompt_V] for counts in (hits_V, first.scored_V))
    s_V, n_V = (counts.astype(np.int64) for counts in of_visits)
    expected_V = all_drawn(s_V, n_V, first.scored_V) + all_drawn(n_V - s_V, n_V, first.scored_V)
    return np.bincount(first.prompt_V, expected_V - ~first.mixed_V, prompts).astype(np.float64)


def notes_of(log: Log, judged: Groups, reward: RewardReading, unpredicted: str) -> list[str]:
    """Notes for the reader of a profile, in order of importance.

    Args:
        log: the profiled log.
        judged: the groups of the log, with rewards 0, 1 or NaN.
        reward: a description of the log's rewards.
        unpredicted: why success could not be predicted; empty if it could.
    """
    notes = [*reward.rules_out]
    if moved := drifted(judged.take(judged.size_V > 1)) if (judged.size_V > 1).any() else "":
        notes.append(f"the log mixes several versions of the model: {moved}")
    if np.median(judged.size_V) < 2:
        notes.append(
            "groups have one rollout: a prompt's rate is over all of its visits, and the model may have changed between them"
        )
    if unpredicted:
        notes.append(unpredicted)
    return [*notes, *unusable(log), *log.notes]
