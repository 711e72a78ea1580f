"""Sizes: how many rollouts each group gets in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heapreplace
from math import inf, log
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.latency import Curve, checked_curve
from rollalloc.core.recipe import at_least
from rollalloc.core.rule import Memory, SizeRule, Traits, View, longest_of, rows_of

MOST_FACTOR = 1024  # rollouts for each one trained on: far beyond any use, and a batch's sizes are found in seconds


@dataclass(frozen=True, slots=True)
class Fixed(SizeRule):
    """n rollouts for every group."""

    n: int

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        return [self.n] * len(groups)

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        return {"n rollouts for each group": list(sizes) == [self.n for _ in groups]}


@dataclass(frozen=True, slots=True)
class Redundant(SizeRule):
    """More rollouts than are trained on, most where lengths vary most.

    Minimises Σ σ_i / M_i subject to Σ M_i = mean_factor · rows · groups and least ≤ M_i ≤ max_factor · rows, where σ_i is
    the running standard deviation of prompt i's lengths and rows is how many of a group the recipe trains on. The objective
    is separable and convex, so giving one rollout after the other to the group that gains most, σ / (M (M + 1)), is
    optimal. A prompt without a record gets the mean σ.

    DARTS, arXiv 2605.30859; its released code has least = 10 for 8 rows, and normalises.

    Attributes:
        mean_factor: rollouts for each row on average, in [1, max_factor].
        max_factor: rollouts for each row at most, up to 1024.
        least: rollouts of a group at least, where that is more than the rows; what is above `max_factor` counts as that.
        normalise: σ is (σ - min) / (max - min) of the groups that are ordered together, so that the prompt whose lengths
            vary least gets no more than `least`; False: σ is in tokens.
    """

    mean_factor: float
    max_factor: float
    least: int = 1
    normalise: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.mean_factor <= self.max_factor <= MOST_FACTOR:
            raise ValueError(
                f"expected 1 <= mean_factor <= max_factor <= {MOST_FACTOR}, got {self.mean_factor} and {self.max_factor}"
            )
        at_least("least", self.least, 1)

    @property
    def traits(self) -> Traits:
        return Traits(reads_rows=True)

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        # Of one group nothing need be known: all that is to spare is its own.
        return self.spread(np.ones(1) if len(groups) == 1 else _deviations(groups, view), rows_of(view))

    def spread(self, std_G: NDArray[np.float64], rows: int) -> list[int]:
        """The same, of groups whose lengths have these deviations, in tokens, and of which so many rows are trained on."""
        groups, least, most = len(std_G), self._least(rows), _most(rows, self.max_factor)
        spare = max(0, min(round(self.mean_factor * rows * groups), most * groups) - least * groups)
        if groups == 1:
            return [least + spare]
        if self.normalise and np.ptp(std_G) > 0:
            std_G = (std_G - std_G.min()) / np.ptp(std_G)
        std_G = np.maximum(std_G, 1e-9 * max(1.0, float(std_G.max())))  # equal lengths: the spare rollouts go round
        sizes = [least] * groups
        gains = [(-std / (least * (least + 1)), g) for g, std in enumerate(std_G.tolist())]
        heapify(gains)
        for _ in range(spare):
            g = gains[0][1]
            sizes[g] += 1
            gain = -std_G[g] / (sizes[g] * (sizes[g] + 1)) if sizes[g] < most else np.inf
            heapreplace(gains, (float(gain), g))
        return sizes

    def _least(self, rows: int) -> int:
        """The floor of each size."""
        return min(max(rows, self.least), _most(rows, self.max_factor))

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        size_G, rows = np.asarray(sizes, np.float64), rows_of(view)
        std_G = np.array([view.statistics.record(group.prompt).length_std for group in groups])
        std_G = np.where(np.isnan(std_G), np.nanmean(std_G) if np.isfinite(std_G).any() else 1.0, std_G)
        if self.normalise and std_G.max() > std_G.min():
            std_G = np.interp(std_G, (std_G.min(), std_G.max()), (0.0, 1.0))
        most = _most(rows, self.max_factor)
        floor = most if self.least > most else max(self.least, rows)
        gain_G = np.where(size_G < most, std_G / (size_G * (size_G + 1)), -np.inf)  # of one rollout more
        loss_G = np.where(size_G > floor, std_G / (size_G * np.maximum(1, size_G - 1)), np.inf)  # of one less
        mean = min(round(self.mean_factor * rows * size_G.size), most * size_G.size)
        return {
            "`mean_factor` rollouts for each row on average, or the floor": size_G.sum()
            == max(mean, floor * size_G.size),
            "at least the rows and `least`, and at most `max_factor` times the rows": bool(
                ((size_G >= rows) & (size_G >= floor) & (size_G <= most)).all()
            ),
            "no rollout would help more in another group": bool(
                gain_G.max() <= loss_G.min() + 1e-6 * max(1.0, float(std_G.max()))
            ),
        }


def _most(rows: int, factor: float) -> int:
    """So many times the rows; 1.15 * 100, in floating point a little less, is 115."""
    return int(factor * rows + 1e-9)


def _deviations(groups: Sequence[GroupView], view: View) -> NDArray[np.float64]:
    """The deviation of each prompt's lengths in tokens, shape (G,); the others' mean, or 1, where it has no record."""
    std_G = view.statistics.length_std_N[[group.prompt for group in groups]].astype(np.float64)
    known = std_G[~np.isnan(std_G)]
    std_G[np.isnan(std_G)] = known.mean() if known.size else 1.0
    return std_G


@dataclass(frozen=True, slots=True)
class Priced(SizeRule):
    """As `Redundant`, with the total number of rollouts that makes a batch's generation shortest, or pays best.

        T = Σ_j (e_(j) - e_(j-1)) · t(R - j + 1),   E = 1 - Σ (σ_i / M_i) / Σ (σ_i / least)
        minimise T,  or with a price maximise E - price · T / T_0

    e_(1) ≤ … ≤ e_(R) are the tokens after which the batch's R rollouts end, and t(c) the seconds for a token while c
    rollouts are decoded, linear between the points of `latency` and proportional beyond the last one, where rollouts wait.
    The M_i rollouts of group i are taken to have the lengths μ_i + σ_i z_m, z_m being the normal quantile of
    (m - 3/8) / (M_i + 1/4), with the running mean and deviation of its prompt's lengths, or the mean ones of the other
    prompts before its first visit. Once the K shortest have ended, L of the others go on, evenly spaced in length as a
    random choice of them is on average, and the rest are stopped. T_0 is T with the fewest rollouts; E is then 0, and grows
    with the choice that more rollouts give.

    All totals are tried, each with three floors of a group's size: the least, the mean, and half way. Before any prompt has
    a record, or before the engine has measured its latency, half of the redundancy is given.

    DARTS, arXiv 2605.30859: T is the paper's sum, and the total is where the derivative of E - λT is 0 (λ is the price).
    That E is the sum which `Redundant` minimises, and that both are shares, are ours; normal quantiles by Blom, Statistical
    Estimates and Transformed Beta-Variables, 1958.

    Attributes:
        max_factor: rollouts for each row at most, in [1, 1024].
        latency: (rollouts, seconds for a token of each) points, rollouts growing, seconds not falling; at least one. None:
            what the engine measures of itself and tells by `Updated`.
        price: λ, above 0; None: T alone counts.
        least: as for `Redundant`.
        normalise: as for `Redundant`; E is in tokens all the same.

    Raises:
        ValueError: a number out of its range.
    """

    max_factor: float
    latency: Curve | None
    price: float | None = None
    least: int = 1
    normalise: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_factor <= MOST_FACTOR:
            raise ValueError(f"max_factor must be at least 1 and at most {MOST_FACTOR}, got {self.max_factor!r}")
        if self.price is not None and not 0 < self.price < inf:
            raise ValueError(f"price must be a number above 0, or None, got {self.price!r}")
        at_least("least", self.least, 1)
        if self.latency is not None:
            object.__setattr__(self, "latency", checked_curve(self.latency))

    @property
    def traits(self) -> Traits:
        return Traits(reads_rows=True, reads_latency=self.latency is None)

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        rows = rows_of(view)
        most = _most(rows, self.max_factor)
        prompts = [group.prompt for group in groups]
        mean_G, curve = view.statistics.length_mean_N[prompts].astype(np.float64), self.latency or view.latency
        known_G = ~np.isnan(mean_G)
        if not known_G.any() or curve is None:
            return self._of((1 + self.max_factor) / 2, self.least)(groups, view, memory)
        mean_G[~known_G] = mean_G[known_G].mean()
        std_G = _deviations(groups, view)
        first = min(max(rows, self.least), most)
        tried = [
            self._of(mean / rows, least).spread(std_G, rows)
            for mean in range(first, most + 1)
            for least in sorted({first, (first + mean) // 2, mean})
        ]
        costs = np.array(
            [seconds(curve, ends(mean_G, std_G, sizes, longest_of(groups, sizes, view), rows)) for sizes in tried]
        )
        if self.price is not None:
            left = np.array(
                [(std_G / sizes).sum() for sizes in tried]
            )  # the first has the fewest rollouts of each group
            costs = self.price * costs / costs[0] + left / max(left[0], 1e-300)
        return tried[int(np.argmin(costs))]

    def _of(self, mean_factor: float, least: int) -> Redundant:
        return Redundant(min(mean_factor, self.max_factor), self.max_factor, least, self.normalise)

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        mean_factor = sum(sizes) / (len(groups) * rows_of(view))
        within = 1 - 1e-9 <= mean_factor <= self.max_factor + 1e-9
        return {"between the rows and `max_factor` times as many on average": within} | (
            self._of(max(1.0, mean_factor), max(self.least, min(sizes))).promises(sizes, groups, view, memory)
        )


def ends(
    mean_G: NDArray[np.float64], std_G: NDArray[np.float64], sizes: Sequence[int], longest: Sequence[int], rows: int
) -> NDArray[np.float64]:
    """The tokens after which each rollout of a batch ends, ascending; see `Priced`. `longest` is L of each group."""
    all_ends: list[NDArray[np.float64]] = []
    for mean, std, size, tail in zip(mean_G, std_G, sizes, longest, strict=True):
        lengths_M = np.maximum(mean + std * _normal_scores(size), 0.0)
        shortest = min(max(rows - tail, 1), size)
        late = size - shortest
        kept = ((np.arange(min(tail, late)) + 0.5) * late / max(1, min(tail, late))).astype(int) + shortest
        stopped = np.setdiff1d(np.arange(shortest, size), kept)
        lengths_M[stopped] = lengths_M[shortest - 1]  # when the K-th ended
        all_ends.append(lengths_M)
    return np.sort(np.concatenate(all_ends))


def seconds(curve: Curve, ends_R: NDArray[np.float64]) -> float:
    """T of `Priced`: the seconds of a batch whose rollouts end after so many tokens, ascending."""
    running_R = np.arange(ends_R.size, 0, -1)
    rollouts, seconds_each = np.array(curve).T
    each_R = np.interp(running_R, rollouts, seconds_each) * np.maximum(1.0, running_R / rollouts[-1])
    return float((np.diff(ends_R, prepend=0.0) * each_R).sum())


@cache
def _normal_scores(count: int) -> NDArray[np.float64]:
    """The expected order statistics of so many draws from the standard normal law, by Blom's formula."""
    return np.array([NormalDist().inv_cdf((m - 0.375) / (count + 0.25)) for m in range(1, count + 1)])


@dataclass(frozen=True, slots=True)
class Knapsack(SizeRule):
    """More rollouts where they are worth most, the same number in all.

        maximise Σ (1 - p^N - (1 - p)^N) · p (1 - p)²  over whole N in [least, most], for the prompts with 0 < p < 1

    p is the success rate that the prompt rule expects (`group.predicted`); the first factor is the probability that both
    outcomes are seen. The value is concave in N, so giving one rollout after the other to the group that gains most is
    optimal. A prompt of which nothing is expected gets `mean_n`, one with p = 0 or p = 1 `least`. Where more are left
    beyond the least than show both outcomes of each contested prompt with probability `sure`, Σ min(most, log(1 - sure) /
    log max(p, 1 - p)), the rest goes to the prompts with p = 0, evenly.

    Knapsack RL, arXiv 2509.25849; see PAPERS.md.

    Attributes:
        mean_n: rollouts per group on average, in [least, most].
        least: rollouts per group at least, 1 or more.
        most: rollouts per group at most.
        sure: in (0, 1).

    Raises:
        ValueError: a number out of its range.
    """

    mean_n: int
    least: int = 2
    most: int = 128
    sure: float = 0.9

    def __post_init__(self) -> None:
        at_least("least", self.least, 1)
        at_least("mean_n", self.mean_n, self.least, "the least of a group")
        at_least("most", self.most, self.mean_n, "the mean of all groups")
        if not 0 < self.sure < 1:
            raise ValueError(f"sure must be in (0, 1), got {self.sure!r}")

    @property
    def traits(self) -> Traits:
        return Traits(reads_rate=True)

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        predictions = [group.predicted for group in groups]
        sizes = [self.mean_n if predicted is None else self.least for predicted in predictions]
        spare = self.mean_n * len(groups) - sum(sizes)
        contested = [g for g, predicted in enumerate(predictions) if predicted is not None and 0 < predicted < 1]
        failed = [g for g, predicted in enumerate(predictions) if predicted == 0]
        beyond = max(0, spare - self._wanted(predictions)) if failed else 0
        spare -= beyond
        spare += self._evenly(sizes, failed, beyond)
        spare = self._where_most_is_gained(sizes, contested, predictions, spare)
        self._evenly(sizes, range(len(groups)), spare)
        return sizes

    def _wanted(self, predictions: Sequence[float | None]) -> int:
        """Rollouts that show both outcomes of the contested prompts, most likely."""
        rates = [
            max(predicted, 1 - predicted) for predicted in predictions if predicted is not None and 0 < predicted < 1
        ]
        return sum(int(min(self.most, log(1 - self.sure) / log(rate))) if rate < 1 else self.most for rate in rates)

    def _where_most_is_gained(
        self, sizes: list[int], contested: Sequence[int], predictions: Sequence[float | None], spare: int
    ) -> int:
        """Give the contested groups one rollout after the other; returns how many none of them could take."""
        gains = [(-_gain(predictions[g] or 0.0, sizes[g]) if sizes[g] < self.most else inf, g) for g in contested]
        heapify(gains)
        while spare and gains and gains[0][0] < inf:
            g = gains[0][1]
            sizes[g] += 1
            spare -= 1
            heapreplace(gains, (-_gain(predictions[g] or 0.0, sizes[g]) if sizes[g] < self.most else inf, g))
        return spare

    def _evenly(self, sizes: list[int], among: Sequence[int], spare: int) -> int:
        """Give the smallest of these groups one rollout after the other; returns how many none of them could take."""
        order = [(sizes[g], g) for g in among if sizes[g] < self.most]
        heapify(order)
        while spare and order and order[0][0] < self.most:
            size, g = order[0]
            sizes[g] = size + 1
            spare -= 1
            heapreplace(order, (size + 1, g))
        return spare

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        rate_G = np.array([np.nan if group.predicted is None else group.predicted for group in groups])
        size_G = np.asarray(sizes, np.int64)
        contested_G, failed_G, solved_G = (rate_G > 0) & (rate_G < 1), rate_G == 0, rate_G == 1
        gain_G = np.where(size_G < self.most, _values(rate_G, size_G + 1) - _values(rate_G, size_G), -inf)[contested_G]
        loss_G = np.where(size_G > self.least, _values(rate_G, size_G) - _values(rate_G, size_G - 1), inf)[contested_G]
        spare = int(np.where(np.isnan(rate_G), 0, self.mean_n - self.least).sum())
        full = bool((size_G[contested_G] == self.most).all())
        beyond = int((size_G[failed_G] - self.least).sum())
        return {
            "`mean_n` rollouts per group on average, each from `least` to `most`": bool(
                size_G.sum() == self.mean_n * len(groups) and ((size_G >= self.least) & (size_G <= self.most)).all()
            ),
            "no rollout of a contested prompt would be worth more at another": not contested_G.any()
            or bool(gain_G.max() <= loss_G.min() + 1e-12),
            "where nothing is known, the mean at least": bool((size_G[np.isnan(rate_G)] >= self.mean_n).all()),
            "a solved prompt has more than the least only where no other could take it": (
                not (size_G[solved_G] > self.least).any() or (full and bool((size_G[failed_G] == self.most).all()))
            ),
            "a failed prompt has what the contested ones do not need": (
                not failed_G.any()
                or full
                or beyond
                == min(
                    max(0, spare - self._wanted(rate_G[contested_G].tolist())),
                    failed_G.sum() * (self.most - self.least),
                )
            ),
        }


def _gain(p: float, n: int) -> float:
    """What one rollout more than n is worth at a prompt of success rate p."""
    return (p**n * (1 - p) + (1 - p) ** n * p) * p * (1 - p) ** 2


def _values(rate_G: NDArray[np.float64], size_G: NDArray[np.int64]) -> NDArray[np.float64]:
    """What so many rollouts are worth at prompts of these success rates, shape (G,)."""
    return (1 - rate_G**size_G - (1 - rate_G) ** size_G) * rate_G * (1 - rate_G) ** 2
