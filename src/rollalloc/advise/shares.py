"""Shares computed from pairs or small groups: groups of n with equal rewards, and pairs of right answers that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.waste.groups import Groups
from rollalloc.waste.shares import Share, share_of


def alike(groups: Groups, n: int) -> Share | None:
    """The share of groups of n with equal rewards, estimated directly from groups of at least n rollouts.

        Σ_r C(c_r, n) / C(m, n)   for a group of m scored rollouts, c_r of them with reward r

    Args:
        groups: groups with rewards of any kind.
        n: size of a group, at least 1.

    Returns:
        None if no group has n scored rollouts.
    """
    visit_R = np.repeat(np.arange(len(groups)), groups.size_V)
    visit_T, times_T = tallied(visit_R[~np.isnan(groups.rewards_R)], groups.rewards_R[~np.isnan(groups.rewards_R)])
    same_V = np.bincount(visit_T, all_drawn(times_T, groups.scored_V[visit_T], n), len(groups))
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
    same_P = np.bincount(prompt_T, all_drawn(times_T, right_P[prompt_T], 2), len(judged.keys))
    two_P = np.flatnonzero(right_P > 1)
    return share_of(1 - same_P[two_P], np.ones(len(two_P)), two_P)


def tallied(of_R: NDArray[Any], value_R: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count equal pairs (of, value). Return `of` for each different pair, and how often the pair occurs."""
    order_R = np.lexsort((value_R, of_R))
    of_R, value_R = of_R[order_R], value_R[order_R]
    begins_R = np.ones(len(of_R), np.bool_)
    begins_R[1:] = (of_R[1:] != of_R[:-1]) | (value_R[1:] != value_R[:-1])
    begin_T = np.flatnonzero(begins_R)
    return of_R[begin_T].astype(np.int64), np.diff(begin_T, append=len(of_R))


def all_drawn(
    some_V: NDArray[np.int64], all_V: NDArray[np.int64], size_V: NDArray[np.int64] | int
) -> NDArray[np.float64]:
    """The probability that a sample without replacement has only marked items: C(some, size) / C(all, size).

    There are `all` items, `some` of them marked, and the sample has `size` items.
    """
    chance_V = np.ones(len(some_V))
    for taken in range(int(np.max(size_V, initial=0))):
        another_V = np.maximum(some_V - taken, 0) / np.maximum(all_V - taken, 1)
        chance_V *= np.where(taken < size_V, another_V, 1.0)
    return chance_V
