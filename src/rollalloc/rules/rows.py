"""Rows: which scored rollouts of a group are trained on, and with which loss weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
class Everything(RowRule):
    """Every scored rollout, with weight 1."""

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=())

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        return _even(np.arange(group.rewards_G.size))

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        return {
            "every scored rollout, once": chosen[0].tolist() == list(range(group.scored)),
            "each with weight 1": set(chosen[1].tolist()) <= {1.0},
        }


@dataclass(frozen=True, slots=True)
class _Some(RowRule):
    """What the rules that keep m rollouts share: all of them where failures left m or fewer."""

    m: int

    def __post_init__(self) -> None:
        at_least("m", self.m, 1)

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=("rewards_G",), rows=self.m)

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

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=(), rows=self.m)

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
class Balanced(_Some):
    """Half of the m rows successes and half failures, the first ordered of each; where one lacks, more of the other.

    Of an odd m the failures have one more. Reinforce-Ada, arXiv 2510.04996.

    Attributes:
        above: a metric above it is a success.
    """

    above: float = SUCCESS_ABOVE

    def __post_init__(self) -> None:
        at_least("m", self.m, 1)  # `super()` does not know a dataclass that was made anew for its slots
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
            "half successes and half failures where there are enough of both": (
                group.scored <= self.m or expected is None or won == expected
            ),
            "all of the kind that lacks": expected is not None or won == total or len(kept) - won == len(wins) - total,
            "the first ordered of each kind": all(
                wins[:g].count(wins[g]) == sum(wins[other] == wins[g] for other in kept if other < g) for g in kept
            ),
        }


@dataclass(frozen=True, slots=True)
class SubsampledPilots(RowRule):
    """The n pilots whose metrics have the largest variance, and every rollout of later stages, with weight 1.

    Pilot-Commit's `n_effective`, arXiv 2605.26606: all pilots, the first stage's rollouts, say what a prompt's rate is.

    Attributes:
        n: at least 1; all of them where failures left n or fewer.
    """

    n: int

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=("metrics_G",))

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        pilots = int((group.stages_G == 0).sum())  # they come first, in order of id
        if pilots <= self.n:
            return _even(np.arange(group.scored))
        kept = max_variance_subset(group.metrics_G[:pilots], self.n)
        return _even(np.concatenate([kept, np.arange(pilots, group.scored)]))

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        stages, metrics = group.stages_G.tolist(), group.metrics_G
        kept = [g for g in chosen[0].tolist() if stages[g] == 0]
        left = [g for g in range(group.scored) if stages[g] == 0 and g not in kept]
        later = [g for g in range(group.scored) if stages[g] > 0]
        return {
            "n different pilots, or all": len(set(kept)) == len(kept) == min(self.n, len(kept) + len(left)),
            "all rollouts of later stages, once": [g for g in chosen[0].tolist() if stages[g] > 0] == later,
            "each with weight 1": set(chosen[1].tolist()) <= {1.0},
        } | (MaxVariance(self.n).best(metrics[kept], metrics[left]) if left else {})


@dataclass(frozen=True, slots=True)
class ShortestAndLongest(RowRule):
    """The K shortest and the L longest rollouts by true token length; what was truncated only where nothing else is left.

    Where a stop rule sampled the late ones (`stops.SampledTail`), it is the K shortest of those that had ended by then, with
    weight 1, and each late one that was kept, with the inverse of the probability with which it was, whichever is longer:

        E[Σ_kept f_i / q_i] = Σ_late f_i

    over all late rollouts that would not fail nor be truncated, whatever f. For that, one that was kept and failed, or was
    truncated, is left out and nothing takes its place or its weight: the group then has fewer rows. Where no more than L
    were running q is 1, and nothing was stopped. Where the rule stopped all that ran, none stands for them. Where it was
    never asked, since all ended at once, none is late, and the L longest are taken, with weight 1.

    DARTS, arXiv 2605.30859, whose released code takes the last to finish for the longest; weights by Horvitz and Thompson,
    Journal of the American Statistical Association 47, 1952.

    Attributes:
        shortest: K, at least 1.
        longest: L, 0 or more.
    """

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        at_least("shortest", self.shortest, 1)
        at_least("longest", self.longest, 0)

    @property
    def rows(self) -> int:
        """K + L."""
        return self.shortest + self.longest

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=("tokens_G", "truncated_G"), rows=self.rows, longest=self.longest)

    def _split(self, group: GroupView) -> tuple[int, int]:
        """K and L of a group: where fewer are its longest, more are its shortest."""
        longest = self.longest if group.longest is None else group.longest
        return self.rows - longest, longest

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        done_G, kept = group.in_order, group.kept
        shortest, longest = self._split(group)
        early = [g for g in range(len(done_G)) if done_G[g].rollout not in kept]
        # Truncated last, then by length, then by id.
        early.sort(key=lambda g: (done_G[g].truncated, done_G[g].tokens))
        if kept or group.cancelled:
            tail = [g for g in range(len(done_G)) if done_G[g].rollout in kept and not done_G[g].truncated]
        else:
            whole = sum(not done.truncated for done in done_G)
            tail = early[whole - longest : whole] if whole >= self.rows else early[shortest : self.rows]
        chosen_M = np.array(sorted(early[:shortest] + tail), np.int64)
        return chosen_M, 1 / group.kept_G[chosen_M]

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        kept, weights = chosen[0].tolist(), chosen[1].tolist()
        longest = self.longest if group.longest is None else group.longest
        late = [rollout in group.kept for rollout in group.rollouts_G.tolist()]
        lengths, truncated = group.tokens_G.tolist(), group.truncated_G.tolist()
        probability = [group.kept.get(rollout, 1.0) for rollout in group.rollouts_G[chosen[0]].tolist()]
        own = {
            "the weight of each is the inverse of the probability with which it was kept": all(
                abs(weight * chance - 1) < 1e-9 for weight, chance in zip(weights, probability, strict=True)
            )
        }
        if group.kept or group.cancelled:
            early = sorted(lengths[g] for g in range(group.scored) if not late[g] and not truncated[g])
            taken = sorted(lengths[g] for g in kept if not late[g] and not truncated[g])
            return own | {
                "every late one that was kept and not truncated, and no other late one": (
                    {g for g in kept if late[g]} == {g for g in range(group.scored) if late[g] and not truncated[g]}
                ),
                "the K shortest of those that had ended by then": taken == early[: self.rows - longest],
            }
        whole = sorted(lengths[g] for g in range(group.scored) if not truncated[g])
        kept_whole = sorted(lengths[g] for g in kept if not truncated[g])
        enough = len(whole) >= self.rows
        return own | {
            "K + L rollouts, or all": len(kept) == len(set(kept)) == min(self.rows, group.scored),
            "the K shortest and the L longest that were not truncated": (
                not enough or kept_whole == whole[: self.rows - longest] + whole[len(whole) - longest :]
            ),
            "a truncated one only where all others are kept": enough or kept_whole == whole,
        }


@dataclass(frozen=True, slots=True)
class LongestBySize(ShortestAndLongest):
    """As `ShortestAndLongest`, with fewer longest rollouts where a group has more rollouts to choose from.

        L_i = min(L, max(0, ⌊(2 (K + L) - M_i) / 2⌋)),   K_i = K + L - L_i

    M_i are the rollouts that are ordered for the group, with those of an earlier stage that are there. So the prompts whose
    lengths vary most, which get the most rollouts, are trained on their shortest alone. The released code of DARTS, which
    has 16 for 2 (K + L).
    """

    def longest_of(self, groups: Sequence[GroupView], sizes: Sequence[int], view: View) -> Sequence[int]:
        return [
            min(self.longest, max(0, (2 * self.rows - size - group.scored) // 2))
            for group, size in zip(groups, sizes, strict=True)
        ]

    def longest_promises(
        self, made: Sequence[int], groups: Sequence[GroupView], sizes: Sequence[int], view: View
    ) -> dict[str, bool]:
        size_G = np.array([size + group.scored for group, size in zip(groups, sizes, strict=True)])
        longest_G = np.asarray(made)
        free_G = 2 * self.rows - size_G  # rollouts below twice the rows: each two allow one longest
        return {
            "two rollouts fewer than twice the rows for each longest": bool(
                ((longest_G == 0) | (2 * longest_G <= free_G)).all()
            ),
            "L where that allows it, else as many as it allows": bool(
                ((longest_G == self.longest) | (2 * longest_G + 2 > free_G)).all()
            ),
        }


@dataclass(frozen=True, slots=True)
class LongestByRecord(ShortestAndLongest):
    """As `ShortestAndLongest`, without a longest rollout for prompts that are solved and whose lengths vary.

        L_i = 0 where s_i >= solved and σ_i >= mean σ, else L;   K_i = K + L - L_i

    s_i is the prompt's success rate in its visits so far, σ_i the running deviation of its lengths, and the mean is over the
    groups that are ordered together, of those that have one: of a group ordered alone its success decides. DARTS, by its
    paper, has the shortest alone for saturated prompts; that those are the solved ones whose lengths vary is ours.

    Attributes:
        solved: in (0, 1].

    Raises:
        ValueError: a number out of its range.
    """

    solved: float

    def __post_init__(self) -> None:
        ShortestAndLongest.__post_init__(self)
        if not 0 < self.solved <= 1:
            raise ValueError(f"solved must be a success rate in (0, 1], got {self.solved!r}")

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=("tokens_G", "truncated_G"), reads_rate=True, rows=self.rows, longest=self.longest)

    def longest_of(self, groups: Sequence[GroupView], sizes: Sequence[int], view: View) -> Sequence[int]:
        prompts = [group.prompt for group in groups]
        std_G = view.statistics.length_std_N[prompts].astype(np.float64)
        known_G = ~np.isnan(std_G)
        if not known_G.any():
            return [self.longest] * len(groups)
        varies_G = np.where(known_G, std_G, -np.inf) >= std_G[known_G].mean() * (1 - 1e-9)
        attempts_G, successes_G = view.statistics.attempts_N[prompts], view.statistics.successes_N[prompts]
        solved_G = (attempts_G > 0) & (successes_G >= self.solved * attempts_G)
        return np.where(varies_G & solved_G, 0, self.longest).tolist()

    def longest_promises(
        self, made: Sequence[int], groups: Sequence[GroupView], sizes: Sequence[int], view: View
    ) -> dict[str, bool]:
        records = [view.statistics.record(group.prompt) for group in groups]
        known = [record.length_std for record in records if record.length_std == record.length_std]
        mean = sum(known) / max(1, len(known))
        saturated = [
            record.attempts > 0
            and record.successes / record.attempts >= self.solved
            and record.length_std >= mean * (1 - 1e-6)
            for record in records
        ]
        return {
            "no longest of a solved prompt whose lengths vary more than the mean one's, and L of any other": list(made)
            == [0 if each else self.longest for each in saturated]
        }
