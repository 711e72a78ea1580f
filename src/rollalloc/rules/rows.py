"""Rows: which scored rollouts of a group are trained on, and with which loss weight."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.group import GroupView, as_floats
from rollalloc.core.recipe import View, at_least

Chosen = tuple[NDArray[np.int64], NDArray[np.float64]]


def max_variance_subset(rewards_G: ArrayLike, m: int) -> NDArray[np.int64]:
    """The m rewards of largest variance: for some i, the i highest and the m - i lowest.

    The variance of every such subset comes from prefix sums of r and r², so the cost is that of the sort, O(G log G).
    PODS, Xu et al., arXiv 2504.13818.

    Args:
        rewards_G: shape (G,), finite.
        m: size of the subset, in [1, G].

    Returns:
        Indices into `rewards_G`, shape (m,), ascending.

    Raises:
        ValueError: m out of its range, or rewards that are not finite.
    """
    reward_G = as_floats(rewards_G, "rewards_G")
    at_least("m", m, 1)
    if m > reward_G.size:
        raise ValueError(f"m must be at most the number of rewards, {reward_G.size}, got {m}")
    order_G = np.argsort(reward_G, kind="stable")
    sorted_G = reward_G[order_G]
    # Centred on the middle of the range and scaled to it, which keeps r² from swamping the differences or leaving the range
    # of floats, and is exact for binary rewards.
    sorted_G = sorted_G - (sorted_G[0] / 2 + sorted_G[-1] / 2)
    sorted_G = sorted_G / (np.abs(sorted_G).max() or 1.0)
    lowest, highest = sorted_G[:m][::-1], sorted_G[sorted_G.size - m :][::-1]
    sum_I, square_I = _sums(lowest, highest), _sums(lowest**2, highest**2)
    high = int(np.argmax(m * square_I - sum_I**2))  # m² times the variance with the `high` highest
    return np.sort(np.concatenate([order_G[: m - high], order_G[reward_G.size - high :]]))


def _sums(lowest_M: NDArray[np.float64], highest_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of the i highest and the m - i lowest for i = 0 ... m; `lowest_M` descending, `highest_M` descending."""
    of_lowest = np.concatenate([np.cumsum(lowest_M[::-1])[::-1], [0.0]])
    of_highest = np.concatenate([[0.0], np.cumsum(highest_M)])
    return of_lowest + of_highest


_MOST_SUBSETS = 1000  # that are tried to prove a choice the best


def _split(chosen: Chosen, group: GroupView) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The rewards kept and those left."""
    return group.rewards_G[chosen[0]], np.delete(group.rewards_G, chosen[0])


def _even(chosen: NDArray[np.int64]) -> Chosen:
    return chosen, np.ones(chosen.size)


@dataclass(frozen=True, slots=True)
class Everything:
    """Every scored rollout, with weight 1."""

    reads: ClassVar = ()

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        return _even(np.arange(group.rewards_G.size))

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        return {
            "every scored rollout, once": chosen[0].tolist() == list(range(group.scored)),
            "each with weight 1": set(chosen[1].tolist()) <= {1.0},
        }


@dataclass(frozen=True, slots=True)
class _Some:
    """What the rules that keep m rollouts share: all of them where failures left m or fewer."""

    reads: ClassVar = ("rewards_G",)

    m: int

    def __post_init__(self) -> None:
        at_least("m", self.m, 1)

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        if group.rewards_G.size <= self.m:
            return _even(np.arange(group.rewards_G.size))
        return _even(self.choose(group, rng))

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        """m indices, ascending, of a group of more than m."""
        raise NotImplementedError

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        kept_M, left_L = _split(chosen, group)
        return {
            "m different rollouts, or all": len(set(chosen[0].tolist())) == kept_M.size == min(self.m, group.scored),
            "each with weight 1": set(chosen[1].tolist()) <= {1.0},
        } | (self.best(kept_M, left_L) if left_L.size else {})

    def best(self, kept_M: NDArray[np.float64], left_L: NDArray[np.float64]) -> dict[str, bool]:
        """What is promised of the rewards kept and of those left, where some are."""
        return {}


@dataclass(frozen=True, slots=True)
class MaxVariance(_Some):
    """The m rollouts whose rewards have the largest variance (PODS)."""

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        return max_variance_subset(group.rewards_G, self.m)

    def best(self, kept_M: NDArray[np.float64], left_L: NDArray[np.float64]) -> dict[str, bool]:
        all_G = np.concatenate([kept_M, left_L])
        if comb(all_G.size, kept_M.size) > _MOST_SUBSETS:
            return {}
        best = max(float(np.var(all_G[list(subset)])) for subset in combinations(range(all_G.size), kept_M.size))
        return {"no other subset of m has a larger variance": float(np.var(kept_M)) >= best - 1e-9 * max(1.0, best)}


@dataclass(frozen=True, slots=True)
class MaxReward(_Some):
    """The m rollouts of highest reward; among equals the first ordered."""

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.sort(np.argsort(-group.rewards_G, kind="stable")[: self.m])

    def best(self, kept_M: NDArray[np.float64], left_L: NDArray[np.float64]) -> dict[str, bool]:
        return {"none that is left has a higher reward": bool(kept_M.min() >= left_L.max())}


@dataclass(frozen=True, slots=True)
class Random(_Some):
    """m rollouts at random, without replacement."""

    reads: ClassVar = ()

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.sort(rng.choice(group.rewards_G.size, self.m, replace=False))


@dataclass(frozen=True, slots=True)
class Percentile(_Some):
    """m rollouts evenly spread over the sorted rewards: those at the quantiles (j + 1/2) / m."""

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        count = group.rewards_G.size
        rank_M = ((np.arange(self.m) + 0.5) * count / self.m).astype(np.int64)
        return np.sort(np.argsort(group.rewards_G, kind="stable")[rank_M])

    def best(self, kept_M: NDArray[np.float64], left_L: NDArray[np.float64]) -> dict[str, bool]:
        all_G, count = sorted([*kept_M.tolist(), *left_L.tolist()]), kept_M.size + left_L.size
        parts = [(j * count // self.m, -(-(j + 1) * count // self.m) - 1) for j in range(self.m)]
        spread = zip(sorted(kept_M.tolist()), parts, strict=True)
        return {
            "one out of each m-th part of the sorted rewards": all(
                all_G[first] <= reward <= all_G[last] for reward, (first, last) in spread
            )
        }


@dataclass(frozen=True, slots=True)
class ShortestAndLongest:
    """The K shortest and the L longest rollouts by true token length; what was truncated only where nothing else is left.

    Where the tail was sampled (`stops.SampledTail`), each of the L stands for those that were stopped, too: its weight is
    (L + number stopped) / L, the inverse of the probability with which it was kept.

    DARTS, arXiv 2605.30859, whose released code takes the last to finish for the longest.

    Attributes:
        shortest: K, at least 1.
        longest: L, 0 or more.
        weigh_tail: whether the L rows carry that weight; 1 otherwise.
    """

    reads: ClassVar = ("tokens_G", "truncated_G")

    shortest: int
    longest: int
    weigh_tail: bool = False

    def __post_init__(self) -> None:
        at_least("shortest", self.shortest, 1)
        at_least("longest", self.longest, 0)

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        done_G, rows = group.in_order, self.shortest + self.longest
        # Truncated last, then by length, then by id.
        order = sorted(range(len(done_G)), key=lambda g: (done_G[g].truncated, done_G[g].tokens))
        whole = sum(not done.truncated for done in done_G)
        tail = order[whole - self.longest : whole] if whole >= rows else order[self.shortest : rows]
        chosen = sorted(order[: self.shortest] + tail)
        if not self.weigh_tail or not tail:
            return _even(np.array(chosen))
        weight = (len(tail) + group.cancelled) / len(tail)
        return np.array(chosen), np.array([weight if g in tail else 1.0 for g in chosen])

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        kept, rows = chosen[0].tolist(), self.shortest + self.longest
        lengths = group.tokens_G.tolist()
        whole = sorted(lengths[g] for g in np.flatnonzero(~group.truncated_G))
        kept_whole = sorted(lengths[g] for g in kept if not group.truncated_G[g])
        enough = len(whole) >= rows
        stand_for = group.cancelled if self.weigh_tail and len(kept) > self.shortest else 0
        by_length = sorted(kept, key=lambda g: (bool(group.truncated_G[g]), lengths[g]))
        weight_of = dict(zip(kept, chosen[1].tolist(), strict=True))
        return {
            "K + L rollouts, or all": len(kept) == len(set(kept)) == min(rows, group.scored),
            "the K shortest and the L longest that were not truncated": (
                not enough or kept_whole == whole[: self.shortest] + whole[len(whole) - self.longest :]
            ),
            "a truncated one only where all others are kept": enough or kept_whole == whole,
            "the weights are those of the rows and of all for which the tail stands": (
                abs(sum(weight_of.values()) - len(kept) - stand_for) < 1e-6
            ),
            "the shortest weigh 1": all(weight_of[g] == 1 for g in by_length[: self.shortest]),
        }
