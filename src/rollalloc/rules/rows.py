"""Row rules: they choose the scored rollouts of a group to train on, and their loss weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.group import GroupView, as_floats
from rollalloc.core.recipe import at_least
from rollalloc.core.rule import RowRule, RowTraits, View
from rollalloc.rules.judges import SUCCESS_ABOVE

Chosen = tuple[NDArray[np.int64], NDArray[np.float64]]


def max_variance_subset(rewards_G: ArrayLike, m: int) -> NDArray[np.int64]:
    """The m rewards with the largest variance. They are the i highest and the m - i lowest rewards, for some i.

    Prefix sums of r and r² give the variance for every i. Sorting takes most of the time: O(G log G).
    PODS, Xu et al., arXiv 2504.13818.

    Args:
        rewards_G: shape (G,), finite.
        m: size of the subset, in [1, G].

    Returns:
        Indices into `rewards_G`, shape (m,), ascending.

    Raises:
        ValueError: m is out of its range, or the rewards are not finite.
    """
    reward_G = as_floats(rewards_G, "rewards_G")
    at_least("m", m, 1)
    if m > reward_G.size:
        raise ValueError(f"m must be at most the number of rewards, {reward_G.size}, got {m}")
    order_G = np.argsort(reward_G, kind="stable")
    sorted_G = reward_G[order_G]
    # Centre on the middle of the range and divide by half of its width. Otherwise, squares of large rewards could
    # overflow or lose digits. Binary rewards become exactly -1 and 1.
    sorted_G = sorted_G - (sorted_G[0] / 2 + sorted_G[-1] / 2)
    sorted_G = sorted_G / (np.abs(sorted_G).max() or 1.0)
    lowest, highest = sorted_G[:m][::-1], sorted_G[sorted_G.size - m :][::-1]
    sum_I, square_I = _sums(lowest, highest), _sums(lowest**2, highest**2)
    high = int(np.argmax(m * square_I - sum_I**2))  # m² times the variance of each subset
    return np.sort(np.concatenate([order_G[: m - high], order_G[reward_G.size - high :]]))


def _sums(lowest_M: NDArray[np.float64], highest_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each i from 0 to m, the sum of the i highest and the m - i lowest values.

    Both arguments are sorted in descending order.
    """
    of_lowest = np.concatenate([np.cumsum(lowest_M[::-1])[::-1], [0.0]])
    of_highest = np.concatenate([[0.0], np.cumsum(highest_M)])
    return of_lowest + of_highest


_MOST_SUBSETS = 1000  # `promises` tries all subsets if there are at most this many


def _split(chosen: Chosen, group: GroupView) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The chosen rewards, and the rewards that were left out."""
    return group.rewards_G[chosen[0]], np.delete(group.rewards_G, chosen[0])


def even(chosen: NDArray[np.int64]) -> Chosen:
    return chosen, np.ones(chosen.size)


@lru_cache(64)
def all_of(count: int) -> Chosen:
    """Every rollout of a group with `count` scored rollouts, with weight 1. The arrays cannot be written to."""
    chosen = even(np.arange(count))
    for array in chosen:
        array.flags.writeable = False
    return chosen


@dataclass(frozen=True, slots=True)
class Everything(RowRule):
    """Take every scored rollout, with weight 1."""

    traits = RowTraits(reads=())

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        return all_of(group.scored)

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        return {
            "every scored rollout, once": chosen[0].tolist() == list(range(group.scored)),
            "each with weight 1": set(chosen[1].tolist()) <= {1.0},
        }


@dataclass(frozen=True, slots=True)
class _Some(RowRule):
    """Base class of the rules that take m rollouts, or all rollouts if at most m have a score."""

    m: int

    def __post_init__(self) -> None:
        at_least("m", self.m, 1)

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=("rewards_G",), rows=self.m)

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        if group.scored <= self.m:
            return all_of(group.scored)
        return even(self.choose(group, rng))

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        """Choose m indices, ascending. The group has more than m rollouts."""
        raise NotImplementedError

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        kept_M, left_L = _split(chosen, group)
        return {
            "m different rollouts, or all if there are fewer": len(set(chosen[0].tolist()))
            == kept_M.size
            == min(self.m, group.scored),
            "each with weight 1": set(chosen[1].tolist()) <= {1.0},
        } | (self.compare_with_left_out(kept_M, left_L) if left_L.size else {})

    def compare_with_left_out(self, kept_M: NDArray[np.float64], left_L: NDArray[np.float64]) -> dict[str, bool]:
        """Compare the chosen rewards with the rewards that were left out. Neither array is empty."""
        return {}


@dataclass(frozen=True, slots=True)
class MaxVariance(_Some):
    """Take the m rollouts whose rewards have the largest variance (PODS)."""

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        return max_variance_subset(group.rewards_G, self.m)

    def compare_with_left_out(self, kept_M: NDArray[np.float64], left_L: NDArray[np.float64]) -> dict[str, bool]:
        all_G = np.concatenate([kept_M, left_L])
        if comb(all_G.size, kept_M.size) > _MOST_SUBSETS:
            return {}
        best = max(float(np.var(all_G[list(subset)])) for subset in combinations(range(all_G.size), kept_M.size))
        return {"no other subset of m has a larger variance": float(np.var(kept_M)) >= best - 1e-9 * max(1.0, best)}


@dataclass(frozen=True, slots=True)
class MaxReward(_Some):
    """Take the m rollouts with the highest rewards. If rewards are equal, take the rollouts with the lower ids."""

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.sort(np.argsort(-group.rewards_G, kind="stable")[: self.m])

    def compare_with_left_out(self, kept_M: NDArray[np.float64], left_L: NDArray[np.float64]) -> dict[str, bool]:
        return {"no rollout that was left out has a higher reward": bool(kept_M.min() >= left_L.max())}


@dataclass(frozen=True, slots=True)
class Random(_Some):
    """Take m random rollouts, without replacement."""

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=(), rows=self.m)

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.sort(rng.choice(group.rewards_G.size, self.m, replace=False))


@dataclass(frozen=True, slots=True)
class Percentile(_Some):
    """Take m rollouts that are spread evenly over the sorted rewards, at the quantiles (j + 1/2) / m."""

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        count = group.rewards_G.size
        rank_M = ((np.arange(self.m) + 0.5) * count / self.m).astype(np.int64)
        return np.sort(np.argsort(group.rewards_G, kind="stable")[rank_M])

    def compare_with_left_out(self, kept_M: NDArray[np.float64], left_L: NDArray[np.float64]) -> dict[str, bool]:
        all_G, count = sorted([*kept_M.tolist(), *left_L.tolist()]), kept_M.size + left_L.size
        parts = [(j * count // self.m, -(-(j + 1) * count // self.m) - 1) for j in range(self.m)]
        spread = zip(sorted(kept_M.tolist()), parts, strict=True)
        return {
            "one rollout from each of m equal parts of the sorted rewards": all(
                all_G[first] <= reward <= all_G[last] for reward, (first, last) in spread
            )
        }


@dataclass(frozen=True, slots=True)
class Balanced(_Some):
    """Take m rollouts, half of them successes. If there are too few successes or failures, take more of the other kind.

    Take the successes with the lowest ids and the failures with the lowest ids. If m is odd, take one more failure than
    successes. Reinforce-Ada, arXiv 2510.04996.

    Attributes:
        above: a metric above this is a success.
    """

    above: float = SUCCESS_ABOVE

    def __post_init__(self) -> None:
        # `super()` does not work here: `slots=True` makes a new class.
        at_least("m", self.m, 1)
        if not 0 <= self.above < 1:
            raise ValueError(f"above must be in [0, 1), got {self.above!r}")

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=("metrics_G",), reads_rate=True, rows=self.m)

    def choose(self, group: GroupView, rng: np.random.Generator) -> NDArray[np.int64]:
        won_G = group.metrics_G > self.above
        won, lost = np.flatnonzero(won_G), np.flatnonzero(~won_G)
        wins = min(max(self.m // 2, self.m - lost.size), won.size)
        return np.sort(np.concatenate([won[:wins], lost[: self.m - wins]]))

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        wins = [metric > self.above for metric in group.metrics_G.tolist()]
        kept = chosen[0].tolist()
        won = sum(wins[g] for g in kept)
        total, half = sum(wins), self.m // 2
        expected = half if total >= half and len(wins) - total >= self.m - half else None
        return _Some.promises(self, chosen, group, view) | {
            "half successes and half failures if there are enough of both": (
                group.scored <= self.m or expected is None or won == expected
            ),
            "if there are too few successes or failures, all of them": expected is not None
            or won == total
            or len(kept) - won == len(wins) - total,
            "the successes and the failures that were ordered first": all(
                wins[:g].count(wins[g]) == sum(wins[other] == wins[g] for other in kept if other < g) for g in kept
            ),
        }
