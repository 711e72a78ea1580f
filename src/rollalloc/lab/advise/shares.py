"""Shares with intervals by formula, since a bootstrap over all prompts for each of them would be slow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.lab.waste.groups import Groups
from rollalloc.lab.waste.shares import LEAST_PROMPTS, Share

_Z = 1.959964


def share_of(part_V: NDArray[Any], whole_V: NDArray[Any], prompt_V: NDArray[Any]) -> Share | None:
    """Σ part / Σ whole with its 95% interval, as a ratio of sums over prompts, since visits of a prompt are alike.

        r ± 1.96 √(P / (P − 1) Σ_p (part_p − r whole_p)²) / Σ whole

    For a share of 0 or 1, the open end is the exact one-sided 97.5% limit over prompts, 1 − .025^(1/P).

    Args:
        part_V: of each visit, in [0, whole].
        whole_V: of each visit, at least 0.
        prompt_V: the prompt of each.

    Returns:
        None if the whole is 0.
    """
    if not whole_V.sum() > 0:
        return None
    part_P, whole_P = np.bincount(prompt_V, part_V), np.bincount(prompt_V, whole_V)
    part_P, whole_P = part_P[whole_P > 0], whole_P[whole_P > 0]
    value, prompts = float(part_P.sum() / whole_P.sum()), len(whole_P)
    if prompts < LEAST_PROMPTS:
        return Share(value, None)
    spread = prompts / (prompts - 1) * float(np.square(part_P - value * whole_P).sum())
    half = _Z * np.sqrt(spread) / float(whole_P.sum())
    open_end = 1 - 0.025 ** (1 / prompts)
    low = 1 - open_end if value >= 1 else max(0.0, value - half)
    high = open_end if value <= 0 else min(1.0, value + half)
    return Share(value, (float(low), float(high)))


def alike(groups: Groups, n: int) -> Share | None:
    """The share of groups of n with equal rewards, estimated without a model from groups of at least n.

        Σ_r C(c_r, n) / C(m, n)   for a group of m scored rollouts, c_r of them with reward r

    Args:
        groups: with rewards of any kind.
        n: at least 1.

    Returns:
        None if no group has n scored rollouts.
    """
    visit_R = np.repeat(np.arange(len(groups)), groups.size_V)
    visit_T, times_T = tallied(visit_R[~np.isnan(groups.rewards_R)], groups.rewards_R[~np.isnan(groups.rewards_R)])
    same_V = np.bincount(visit_T, _drawn(times_T, groups.scored_V[visit_T], n), len(groups))
    enough_V = groups.scored_V >= n
    return share_of(same_V[enough_V], np.ones(enough_V.sum()), groups.prompt_V[enough_V])


def pairs_differ(judged: Groups) -> Share | None:
    """The probability that two right completions of a prompt have different answers, averaged over prompts with two or more.

        1 − Σ_a C(c_a, 2) / C(m, 2)   for m right completions, c_a of them with answer a

    Args:
        judged: groups whose rewards are 0, 1 or NaN.

    Returns:
        None if no prompt has two right completions with logged text.
    """
    right_R = (judged.rewards_R > 0) & (judged.answer_R != 0)
    prompt_R = np.repeat(judged.prompt_V, judged.size_V)[right_R]
    prompt_T, times_T = tallied(prompt_R, judged.answer_R[right_R])
    right_P = np.bincount(prompt_R, minlength=len(judged.keys))
    same_P = np.bincount(prompt_T, _drawn(times_T, right_P[prompt_T], 2), len(judged.keys))
    two_P = np.flatnonzero(right_P > 1)
    return share_of(1 - same_P[two_P], np.ones(len(two_P)), two_P)


def tallied(of_R: NDArray[Any], value_R: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the distinct pairs (of, value); returns, for each pair, its `of` and how often the pair occurs."""
    order_R = np.lexsort((value_R, of_R))
    of_R, value_R = of_R[order_R], value_R[order_R]
    begins_R = np.ones(len(of_R), np.bool_)
    begins_R[1:] = (of_R[1:] != of_R[:-1]) | (value_R[1:] != value_R[:-1])
    begin_T = np.flatnonzero(begins_R)
    return of_R[begin_T].astype(np.int64), np.diff(begin_T, append=len(of_R))


def _drawn(times_T: NDArray[np.int64], among_T: NDArray[np.int64], n: int) -> NDArray[np.float64]:
    """The probability that n drawn without replacement are all of one value: C(times, n) / C(among, n)."""
    chance_T = np.ones(len(times_T))
    for taken in range(n):
        chance_T *= np.maximum(times_T - taken, 0) / np.maximum(among_T - taken, 1)
    return chance_T
