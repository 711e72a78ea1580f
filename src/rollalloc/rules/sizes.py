"""Sizes: how many rollouts each group gets in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import comb, erfc, inf, log, sqrt

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.latency import Curve, checked_curve
from rollalloc.core.recipe import at_least
from rollalloc.core.rule import Memory, SizeRule, Traits, View, longest_of, rows_of

_POINTS = 64  # lengths at which a batch's running rollouts are counted
_FAR = 3.0  # deviations of the logarithm up to which they reach


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
        max_factor: rollouts for each row at most.
        least: rollouts of a group at least, where that is more than the rows; what is above `max_factor` counts as that.
        normalise: σ is (σ - min) / (max - min) of the groups that are ordered together, so that the prompt whose lengths
            vary least gets no more than `least`; False: σ is in tokens.
    """

    mean_factor: float
    max_factor: float
    least: int = 1
    normalise: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.mean_factor <= self.max_factor:
            raise ValueError(f"expected 1 <= mean_factor <= max_factor, got {self.mean_factor} and {self.max_factor}")
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
    """As `Redundant`, with the number of rollouts in all that makes the batch's generation shortest, or pays best.

        T = ∫ t(c(x)) P(any runs at x) dx,   E = 1 - Σ (σ_i / M_i) / Σ (σ_i / least)
        minimise T,  or with a price maximise E - price · T / T_0

    x is tokens, c(x) how many rollouts run then, where any does, and t(c) the seconds of a token where c rollouts are
    decoded, between the points of `latency` as on a line. Beyond the last point rollouts wait, so that t grows in
    proportion. Group i runs until K of its M_i rollouts have ended, which by x is binomial: each ends by the log-normal law
    that the statistics predicts for the prompt, or, before its first visit, by the mean of all that have one; `truncated` of
    them never. Of the M_i - K that
    run by then L go on. A rollout more in a group makes its K-th end sooner, and each step dearer. T_0 is T where each
    group has as few rollouts as may be; E, 0 there, is what more of them are worth to the selection.

    All numbers of rollouts in all are tried, each with three floors of a group's: the least, the mean, and between. Where no
    prompt at all has a law, as before a first batch has ended and under a recipe that stops nothing, or nothing was measured
    yet, half of the redundancy is given.

    The total of DARTS, arXiv 2605.30859, where the derivative of E - λT is 0, λ the price; that E is the sum that the
    sizes minimise, that both are shares, and `truncated`, are ours.

    Attributes:
        max_factor: rollouts for each row at most, at least 1.
        latency: (rollouts, seconds for a token of each) points, rollouts growing, seconds not falling: a step of more
            rollouts is not cheaper; at least one. None: what the engine measures of itself and tells by `Updated`.
        price: λ, above 0; None: T alone counts.
        least: as for `Redundant`.
        normalise: as for `Redundant`; E is in tokens all the same.
        truncated: share of rollouts that are taken to run to the limit, in [0, 1): those that are stopped do not show it.

    Raises:
        ValueError: a number out of its range.
    """

    max_factor: float
    latency: Curve | None
    price: float | None = None
    least: int = 1
    normalise: bool = False
    truncated: float = 0.01

    def __post_init__(self) -> None:
        if not self.max_factor >= 1:
            raise ValueError(f"max_factor must be at least 1, got {self.max_factor!r}")
        if self.price is not None and not 0 < self.price < inf:
            raise ValueError(f"price must be a number above 0, or None, got {self.price!r}")
        at_least("least", self.least, 1)
        if not 0 <= self.truncated < 1:
            raise ValueError(f"truncated must be a share in [0, 1), got {self.truncated!r}")
        if self.latency is not None:
            object.__setattr__(self, "latency", checked_curve(self.latency))

    @property
    def traits(self) -> Traits:
        return Traits(reads_rows=True, reads_latency=self.latency is None)

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        rows = rows_of(view)
        most = _most(rows, self.max_factor)
        longer_GX, curve = self._longer(groups, view), self.latency or view.latency
        if longer_GX is None or curve is None:
            return self._of((1 + self.max_factor) / 2, self.least)(groups, view, memory)
        std_G = _deviations(groups, view)
        running = _Running(longer_GX, most)
        first = min(max(rows, self.least), most)
        tried = [
            self._of(mean / rows, least).spread(std_G, rows)
            for mean in range(first, most + 1)
            for least in sorted({first, (first + mean) // 2, mean})
        ]
        costs = np.array([cost(curve, running, sizes, longest_of(groups, sizes, view), rows) for sizes in tried])
        if self.price is not None:
            left = np.array([(std_G / sizes).sum() for sizes in tried])  # first: the fewest of each
            costs = self.price * costs / costs[0] + left / max(left[0], 1e-300)
        return tried[int(np.argmin(costs))]

    def _of(self, mean_factor: float, least: int) -> Redundant:
        return Redundant(min(mean_factor, self.max_factor), self.max_factor, least, self.normalise)

    def _longer(self, groups: Sequence[GroupView], view: View) -> NDArray[np.float64] | None:
        """The share of each group's rollouts that are longer than each of some lengths, evenly apart, shape (G, X)."""
        law_2N, unknown = view.statistics.log_length_2N, view.statistics.mean_law
        if law_2N is None or unknown is None:
            return None
        prompts = [group.prompt for group in groups]
        mean_G, var_G = np.array([law_2N[at][prompts] for at in (0, 1)], np.float64)
        mean_G[np.isnan(mean_G)], var_G[np.isnan(var_G)] = unknown
        std_G = np.sqrt(np.maximum(var_G, 1e-12))
        furthest = float(np.exp(mean_G + _FAR * std_G).max())
        x_X = (np.arange(_POINTS) + 0.5) * furthest / _POINTS
        far_GX = (np.log(x_X) - mean_G[:, None]) / std_G[:, None]
        return self.truncated + (1 - self.truncated) * np.vectorize(erfc)(far_GX / sqrt(2)) / 2

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        mean_factor = sum(sizes) / (len(groups) * rows_of(view))
        within = 1 - 1e-9 <= mean_factor <= self.max_factor + 1e-9
        return {"between the rows and `max_factor` times as many on average": within} | (
            self._of(max(1.0, mean_factor), max(self.least, min(sizes))).promises(sizes, groups, view, memory)
        )


def cost(curve: Curve, running: _Running, sizes: Sequence[int], longest: Sequence[int], rows: int) -> float:
    """T of `Priced`, in units of the distance between the lengths of `running`; L of each group's rows are `longest`."""
    share_X, running_X = running(sizes, longest, rows)
    numbers, seconds = np.array(curve).T
    each_X = np.interp(running_X, numbers, seconds) * np.maximum(1.0, running_X / numbers[-1])
    return float((each_X * share_X).sum())


class _Running:
    """How many rollouts run after so many tokens, where a group is over once K of its rollouts have ended, and L late ones.

    Args:
        longer_GX: the share of each group's rollouts that are longer than each length.
        most: rollouts of a group at most.
    """

    def __init__(self, longer_GX: NDArray[np.float64], most: int) -> None:
        powers = np.arange(most + 1)[:, None, None]
        self.ended_NGX, self.longer_NGX = (1 - longer_GX) ** powers, longer_GX**powers

    def __call__(
        self, sizes: Sequence[int], longest: Sequence[int], rows: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The chance that any runs at each length, and how many do where any does, shape (X,) each.

        Of a group's M rollouts N have ended, which is binomial. Before the K-th ends the M - N others run; then L of the
        M - K go on, chosen at random.
        """
        alike: dict[tuple[int, int], list[int]] = {}
        for g, key in enumerate(zip(sizes, longest, strict=True)):
            alike.setdefault(key, []).append(g)
        over_X = np.ones(self.ended_NGX.shape[-1])
        running_X = np.zeros_like(over_X)
        for (size, tail), at in alike.items():
            many = [comb(size, ended) for ended in range(size + 1)]
            chance_NGX = self.ended_NGX[: size + 1, at] * self.longer_NGX[size::-1, at]
            chance_NGX *= np.array(many, np.float64)[:, None, None]
            over_N, runs_N = zip(*(_left(size, ended, rows - tail, tail) for ended in range(size + 1)), strict=True)
            over_X *= np.tensordot(over_N, chance_NGX, 1).prod(axis=0)
            running_X += np.tensordot(runs_N, chance_NGX, 1).sum(axis=0)
        share_X = np.maximum(1 - over_X, 1e-12)
        return share_X, running_X / share_X


def _left(size: int, ended: int, shortest: int, longest: int) -> tuple[float, float]:
    """The chance that a group is over where so many would have ended by themselves, and how many of it run."""
    late = size - shortest
    if ended < shortest or longest >= late:  # nothing is stopped yet, or ever
        return float(ended >= size), size - ended
    return comb(ended - shortest, longest) / comb(late, longest), (size - ended) * longest / late


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
