"""DARTS, arXiv 2605.30859: generate spare rollouts, train on the shortest and longest rollouts, and stop the others.

For runs in which a batch waits for a few long rollouts.

How this differs from the paper and its released code:

- The longest rollouts are the rollouts with the most tokens. In the released code, they are the rollouts that finish
  last.
- With L ≥ 1, the paper stops running rollouts although any of them might become one of the longest. Here, `tail` has
  three choices: let all rollouts end ("exact"), train on a weighted random sample of the late rollouts ("sampled"), or
  train only on the shortest rollouts ("none").
- Truncated rollouts become rows only if there are too few other rollouts.
- Parts of the released code are off by default, but can be set: `least`, `normalise`, `unseen`, `longest_by="size"` and
  `lengths_of="trained"`.

PAPERS.md has the full list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heapreplace
from itertools import pairwise
from math import inf, isnan, sqrt
from operator import mul
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe, at_least, one_of
from rollalloc.core.rule import (
    Memory,
    RowRule,
    RowTraits,
    SampledStops,
    SizeRule,
    StopRule,
    Traits,
    View,
    rows_of,
)
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.shapes import Sizes, groups_of, sized
from rollalloc.rules import advantages
from rollalloc.rules.rows import Chosen

Curve = tuple[tuple[int, float], ...]  # points (number of rollouts decoded at once, seconds per token of one rollout)
_NEWEST = 0.3  # weight of the newest visit in the running mean and deviation of a prompt's lengths
MOST_FACTOR = 1024  # largest ratio of rollouts to rows; up to this ratio, sizes are computed within seconds


def shape(rows: int = 64, group_rows: int = 4, shortest: int | None = None, longest: int | None = None) -> Sizes:
    """K + L rows of a group, of which L = 1 is one of the longest.

    Args:
        rows: rows of a batch, at least 1.
        group_rows: K + L, at least 1. If it is 1, L is 0.
        shortest: K, if the user set it. L is the rest of the group.
        longest: L, if the user set it. K is the rest of the group.
    """
    if longest is None:
        longest = min(1, group_rows - 1) if shortest is None else group_rows - shortest
    if shortest is None:
        shortest = group_rows - longest
    return {"groups": groups_of(rows, group_rows), "shortest": shortest, "longest": longest}


@sized(shape)
def darts(
    groups: int = 16,
    shortest: int = 3,
    longest: int = 1,
    max_redundancy: float = 2.0,
    tail: Literal["exact", "sampled", "none"] = "exact",
    deviation: advantages.Deviation | None = None,
    latency: Curve | None = None,
    solved: float | None = None,
    share: float = 0.1,
    least: int | None = None,
    normalise: bool = False,
    longest_by: Literal["all", "size"] = "all",
    lengths_of: Literal["all", "trained"] = "all",
    unseen: Literal["batch", "recorded"] = "batch",
) -> Recipe:
    """DARTS: generate spare rollouts, train on the shortest and longest, stop the others. arXiv 2605.30859.

    1. Give each prompt of the batch more than K + L rollouts. Prompts whose lengths vary most get the most rollouts
       (`max_redundancy`, `least`, `normalise`). With `latency`, also choose the total number of rollouts.
    2. Generate. Stop rollouts that are not needed, according to `tail`.
    3. Choose the K shortest and the L longest rollouts of each group as its rows.
    4. Compute GRPO's advantages over the chosen rows.

    Args:
        groups: prompts in a batch, at least 1.
        shortest: K, at least 1.
        longest: L, 0 or more. K + L rollouts of each group are trained on.
        max_redundancy: the largest ratio of generated to trained rollouts of a prompt, in [1, 1024]. The average ratio is
            half way between 1 and this number.
        tail: what happens to the rollouts that still run when K have ended. "exact" lets all of them end. "sampled"
            keeps L of them at random, instead of the longest, and stops the others. Each kept rollout is weighted by the
            inverse of its probability of being kept. "none" trains on the K + L shortest rollouts and stops the others.
            The model then learns only from short answers, so use "none" only for prompts that are nearly solved.
        deviation: the kind of standard deviation, see `grpo`.
        latency: decoding speed, as points (rollouts decoded at once, seconds per token): (1, 0.002), (64, 0.004), ...
            Seconds must not decrease. The total number of rollouts is then chosen for the shortest generation time, see
            `Priced`. None: groups have (1 + max_redundancy) / 2 · (K + L) rollouts on average.
        solved: success rate in (0, 1] from which a prompt counts as solved; only with tail="sampled". Late rollouts of a
            solved prompt are kept only in a part of its visits (`share`), with larger weights. The success rate is taken
            from earlier visits. At the first visit, a mixture with a method that predicts success rates uses its
            prediction. None: no prompt counts as solved.
        share: share of a solved prompt's visits in which late rollouts are kept, in (0, 1].
        least: minimum number of rollouts of each group, in [K + L, (1 + max_redundancy) / 2 · (K + L)]. The released
            code has 10 rollouts for K + L = 8 rows. None: K + L.
        normalise: True: as in the released code, use (σ - min + 1) / (max - min) over the groups ordered together, where σ
            is the standard deviation of a prompt's lengths. False: use σ in tokens.
        longest_by: how L depends on the prompt. "all": L is the same for every prompt. "size": as in the released code,
            prompts with more rollouts have a smaller L and a larger K (`longest_rows`).
        lengths_of: which rollouts of a visit are used to compute σ. "all": all rollouts; the length of a stopped rollout
            is its length so far. "trained": only the trained rollouts, as in the released code. Most of these are short,
            so σ is too small for prompts whose lengths vary most. "trained" cannot be combined with latency, which
            predicts the lengths of all rollouts.
        unseen: σ of a prompt that was never visited. "batch": the mean σ of the other prompts that are ordered together.
            "recorded": as in the released code, the mean σ of all prompts that were visited so far. "recorded" cannot be
            combined with latency.

    Raises:
        ValueError: a value is out of its range, or two values contradict each other.
    """
    at_least("shortest", shortest, 1)
    at_least("longest", longest, 0)
    if least is not None:
        rows, mean = shortest + longest, (1 + max_redundancy) / 2 * (shortest + longest)
        at_least("least", least, rows, f"{rows} rollouts of each group are trained on")
        if least > mean:
            raise ValueError(
                f"least={least} is above the {mean:g} rollouts that a group has on average; use a smaller least or a larger "
                "max_redundancy"
            )
    if not 1 <= max_redundancy <= MOST_FACTOR:
        raise ValueError(
            f"max_redundancy (rollouts generated per row) must be in [1, {MOST_FACTOR}], got {max_redundancy}"
        )
    one_of("tail", tail, ("exact", "sampled", "none"))
    one_of("longest_by", longest_by, ("all", "size"))
    one_of("lengths_of", lengths_of, ("all", "trained"))
    one_of("unseen", unseen, ("batch", "recorded"))
    if lengths_of != "all" and latency is not None:
        raise ValueError(
            f"latency predicts the lengths of all rollouts, got lengths_of={lengths_of!r} as well; leave one of them out"
        )
    if unseen != "batch" and latency is not None:
        raise ValueError(
            "latency predicts the lengths of new prompts from those that are ordered with them, got unseen='recorded' as "
            "well; leave one of them out"
        )
    if longest_by != "all" and (tail == "none" or not longest):
        raise ValueError(
            f"longest_by={longest_by!r} needs a recipe that trains on longest rollouts, got longest={longest} and "
            f'tail={tail!r}; set longest to at least 1 and tail to "exact" or "sampled", or leave longest_by out'
        )
    if solved is not None and tail != "sampled":
        raise ValueError(f'solved needs tail="sampled", got tail={tail!r}; change one of them, or leave solved out')
    if tail == "none":
        shortest, longest = shortest + longest, 0
    floor, by_size = 1 if least is None else least, longest_by == "size"
    chosen = ShortestAndLongest(shortest, longest, by_size)
    size = Redundant(
        (1 + max_redundancy) / 2,
        max_redundancy,
        floor,
        normalise,
        chosen if lengths_of == "trained" else None,
        unseen == "recorded",
    )
    if latency is not None:
        size = Priced(max_redundancy, latency, longest, by_size, floor, normalise)
    stop = SampledTail(longest, by_size, solved, share)
    base = grpo(groups, shortest + longest)
    return replace(
        base,
        stages=(replace(base.stages[0], size=size, stop=None if tail == "exact" else stop),),
        rows=chosen,
        advantage=advantages.OverChosen(advantages.kernel_of(deviation)),
    )


def longest_rows(longest: int, by_size: bool, rows: int, size: int) -> int:
    """L_i: the number of longest rollouts among a group's rows.

        L_i = L,  or by size  L_i = min(L, max(0, ⌊(2 rows - M_i) / 2⌋))

    With `by_size`, L_i is smaller for groups with more rollouts, and 0 for `2 * rows` rollouts or more. The released code of
    DARTS does this, with rows = 8.

    Args:
        longest: L.
        by_size: whether the number depends on the size of the group.
        rows: K + L, the number of rows of a group.
        size: M_i, the number of rollouts decided for the group.
    """
    return min(longest, max(0, (2 * rows - size) // 2)) if by_size else longest


class _ByLengths(SizeRule):
    """A size rule that remembers the mean and the standard deviation of each prompt's lengths."""

    __slots__ = ()

    traits = Traits(reads_rows=True)

    def init(self, table: PromptTable) -> Memory:
        return {name: np.full(len(table), np.nan, np.float32) for name in ("mean_N", "std_N")}

    def observe(self, memory: Memory, group: GroupView) -> None:
        """Update the running mean and standard deviation of the prompt's lengths.

        Nothing is learned from a visit of only one rollout, nor of one whose rollouts had a limit, which cuts lengths.

            mean ← mean + 0.3 (m - mean),   std ← std + 0.3 (s - std)

        m and s are the mean and the standard deviation of this visit's lengths (see `_lengths`). At the first visit, mean
        and std are set to m and s.
        """
        (lengths, lost), prompt = self._lengths(group), group.prompt
        count, total = len(lengths), sum(lengths)
        if count < 2 or group.limit is not None:
            return
        # For so few integers, plain sums are faster than NumPy.
        deviation = sqrt(count * sum(map(mul, lengths, lengths)) - total * total) / sqrt(count * (count - lost))
        for running_N, newest in ((memory["mean_N"], total / count), (memory["std_N"], deviation)):
            last = float(running_N[prompt])
            running_N[prompt] = newest if isnan(last) else last + _NEWEST * (newest - last)

    def _lengths(self, group: GroupView) -> tuple[Sequence[int], int]:
        """The lengths of a visit's rollouts, and the `ddof` of their standard deviation: 0 or 1."""
        return group.lengths, 0


@dataclass(frozen=True, slots=True)
class Redundant(_ByLengths):
    """Give each group more rollouts than it has rows, and give the most to groups whose lengths vary most.

        minimise Σ σ_i / M_i   subject to  Σ M_i = mean_factor · rows · groups  and  least ≤ M_i ≤ max_factor · rows

    M_i is the size of group i. σ_i is the running standard deviation of its prompt's lengths (see `observe`); a prompt
    without a record gets the mean σ. rows is the number of rows of a group. The objective is separable and convex, so it
    is optimal to give rollouts one at a time to the group with the largest gain σ / (M (M + 1)).

    DARTS, arXiv 2605.30859. The released code uses least = 10 for groups of 8 rows, and normalise = True.

    Attributes:
        mean_factor: average number of rollouts for each row, in [1, max_factor].
        max_factor: largest number of rollouts for each row, up to 1024.
        least: minimum number of rollouts of a group, clipped to [rows, max_factor · rows].
        normalise: True: use (σ - min + 1) / (max - min) over the groups that are ordered together; the group whose lengths
            vary least then gets little more than `least`. False: use σ in tokens.
        trained: a row rule: σ is the sample standard deviation over the rollouts that the rule chooses. None: σ is the
            population standard deviation over all rollouts.
        recorded: a prompt without a record gets the mean σ of all prompts with a record (True), or of those that are ordered
            together (False).
    """

    mean_factor: float
    max_factor: float
    least: int = 1
    normalise: bool = False
    trained: ShortestAndLongest | None = None
    recorded: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.mean_factor <= self.max_factor <= MOST_FACTOR:
            raise ValueError(
                f"expected 1 <= mean_factor <= max_factor <= {MOST_FACTOR}, got {self.mean_factor} and {self.max_factor}"
            )
        at_least("least", self.least, 1)

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        # A single group gets all rollouts, whatever its deviation.
        return self.spread(np.ones(1) if len(groups) == 1 else _deviations(groups, memory), rows_of(view))

    def init(self, table: PromptTable) -> Memory:
        # `recorded_2`: number of prompts with a record, and the sum of their σ. To sum over all prompts would take longer.
        return _ByLengths.init(self, table) | ({"recorded_2": np.zeros(2)} if self.recorded else {})

    def observe(self, memory: Memory, group: GroupView) -> None:
        before = float(memory["std_N"][group.prompt])
        _ByLengths.observe(self, memory, group)
        after = float(memory["std_N"][group.prompt])
        if self.recorded and not isnan(after):
            memory["recorded_2"] += (1, after) if isnan(before) else (0, after - before)

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        fresh = _ByLengths.remap(self, memory, source_N, table)
        if self.recorded:
            known = ~np.isnan(fresh["std_N"])
            fresh["recorded_2"][:] = known.sum(), fresh["std_N"][known].sum(dtype=np.float64)
        return fresh

    def spread(self, std_G: NDArray[np.float64], rows: int) -> list[int]:
        """Return the size of each group.

        Args:
            std_G: standard deviation of the prompts' lengths, in tokens.
            rows: number of rows of a group.
        """
        groups, least, most = len(std_G), self._least(rows), _most(rows, self.max_factor)
        spare = max(0, min(round(self.mean_factor * rows * groups), most * groups) - least * groups)
        if groups == 1:
            return [least + spare]
        if self.normalise and np.ptp(std_G) > 0:
            std_G = std_G - std_G.min() + 1  # the division by max - min changes no comparison
        std_G = np.maximum(std_G, 1e-9 * max(1.0, float(std_G.max())))  # if all are 0, rollouts are divided evenly
        sizes = [least] * groups
        gains = [(-std / (least * (least + 1)), g) for g, std in enumerate(std_G.tolist())]
        heapify(gains)
        for _ in range(spare):
            g = gains[0][1]
            sizes[g] += 1
            gain = -std_G[g] / (sizes[g] * (sizes[g] + 1)) if sizes[g] < most else np.inf
            heapreplace(gains, (float(gain), g))
        return sizes

    def _lengths(self, group: GroupView) -> tuple[Sequence[int], int]:
        if self.trained is None:
            return group.lengths, 0
        return [group.in_order[g].tokens for g in self.trained.chosen(group)], 1

    def _least(self, rows: int) -> int:
        """The smallest size of a group."""
        return min(max(rows, self.least), _most(rows, self.max_factor))

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        size_G, rows = np.asarray(sizes, np.float64), rows_of(view)
        std_G = np.array([float(memory["std_N"][group.prompt]) for group in groups])
        others = memory["std_N"] if self.recorded else std_G
        std_G = np.where(np.isnan(std_G), np.nanmean(others) if np.isfinite(others).any() else 1.0, std_G)
        if self.normalise and std_G.max() > std_G.min():
            std_G = std_G - float(min(std_G)) + 1
        most = _most(rows, self.max_factor)
        floor = most if self.least > most else max(self.least, rows)
        gain_G = np.where(size_G < most, std_G / (size_G * (size_G + 1)), -np.inf)  # gain from one more rollout
        loss_G = np.where(size_G > floor, std_G / (size_G * np.maximum(1, size_G - 1)), np.inf)  # loss from one fewer
        mean = min(round(self.mean_factor * rows * size_G.size), most * size_G.size)
        return {
            "on average `mean_factor` rollouts for each row, or the minimum size": size_G.sum()
            == max(mean, floor * size_G.size),
            "at least the rows and `least`, and at most `max_factor` times the rows": bool(
                ((size_G >= rows) & (size_G >= floor) & (size_G <= most)).all()
            ),
            "moving a rollout to another group would not improve the objective": bool(
                gain_G.max() <= loss_G.min() + 1e-6 * max(1.0, float(std_G.max()))
            ),
        }


def _most(rows: int, factor: float) -> int:
    """The largest size of a group. 1e-9 corrects rounding: in floating point, 1.15 * 100 is below 115."""
    return int(factor * rows + 1e-9)


def _deviations(groups: Sequence[GroupView], memory: Memory) -> NDArray[np.float64]:
    """Standard deviation of each prompt's lengths, shape (G,). A prompt without a record gets the mean, or 1.

    The mean is over all prompts with a record if the memory counts them, and otherwise over these groups.
    """
    std_G = memory["std_N"][[group.prompt for group in groups]].astype(np.float64)
    known = std_G[~np.isnan(std_G)]
    count, total = memory.get("recorded_2", (known.size, known.sum()))
    std_G[np.isnan(std_G)] = total / count if count else 1.0
    return std_G


@dataclass(frozen=True, slots=True)
class Priced(_ByLengths):
    """Like `Redundant`, but also choose the total number R of rollouts, so that the generation time T is shortest.

        T = Σ_j (e_(j) - e_(j-1)) · t(R - j + 1)

    The batch's R rollouts end after e_(1) ≤ … ≤ e_(R) tokens. t(c) is the number of seconds per token while c rollouts
    are decoded. t is linear between the points of `latency`. Beyond the last point, rollouts wait for a slot, and t is
    proportional to c.

    Lengths are predicted from each prompt's record. The M_i rollouts of group i are assumed to have the lengths μ_i +
    σ_i z_m. μ_i and σ_i are the running mean and standard deviation of the prompt's lengths, and z_m is the normal
    quantile of (m - 3/8) / (M_i + 1/4). A prompt without a record gets the mean of the other prompts. When the
    K shortest rollouts have ended, L of the running rollouts go on, evenly spaced in the order of length. All others stop.

    Every possible total is tried with three values of the minimum size of a group: `least`, the mean, and the middle
    between them. While no prompt has a record, groups have (1 + max_factor) / 2 rollouts for each row on average.

    DARTS, arXiv 2605.30859: T is the paper's sum. Normal quantiles: Blom, Statistical Estimates and Transformed
    Beta-Variables, 1958.

    Attributes:
        max_factor: largest number of rollouts for each row, in [1, 1024].
        latency: points (number of rollouts decoded at once, seconds per token of one rollout), at least one point. The
            numbers of rollouts must increase, and the seconds must not decrease.
        longest: L, 0 or more.
        by_size: whether L depends on the size of a group, see `longest_rows`.
        least: minimum number of rollouts of a group, see `Redundant`.
        normalise: whether sizes follow normalised σ, see `Redundant`.

    Raises:
        ValueError: a number is out of its range.
    """

    max_factor: float
    latency: Curve
    longest: int
    by_size: bool = False
    least: int = 1
    normalise: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_factor <= MOST_FACTOR:
            raise ValueError(f"max_factor must be at least 1 and at most {MOST_FACTOR}, got {self.max_factor!r}")
        at_least("longest", self.longest, 0)
        at_least("least", self.least, 1)
        object.__setattr__(self, "latency", _checked_curve(self.latency))

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        rows = rows_of(view)
        most = _most(rows, self.max_factor)
        prompts = [group.prompt for group in groups]
        mean_G = memory["mean_N"][prompts].astype(np.float64)
        known_G = ~np.isnan(mean_G)
        if not known_G.any():
            return self._of((1 + self.max_factor) / 2, self.least)(groups, view, memory)
        mean_G[~known_G] = mean_G[known_G].mean()
        std_G = _deviations(groups, memory)
        first = min(max(rows, self.least), most)
        tried = [
            self._of(mean / rows, least).spread(std_G, rows)
            for mean in range(first, most + 1)
            for least in sorted({first, (first + mean) // 2, mean})
        ]
        costs = np.array(
            [
                seconds(self.latency, ends(mean_G, std_G, sizes, self._longest(groups, sizes, rows), rows))
                for sizes in tried
            ]
        )
        return tried[int(np.argmin(costs))]

    def _longest(self, groups: Sequence[GroupView], sizes: Sequence[int], rows: int) -> list[int]:
        """L for each group, if the groups get these sizes."""
        return [
            longest_rows(self.longest, self.by_size, rows, group.size + size)
            for group, size in zip(groups, sizes, strict=True)
        ]

    def _of(self, mean_factor: float, least: int) -> Redundant:
        return Redundant(min(mean_factor, self.max_factor), self.max_factor, least, self.normalise)

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        mean_factor = sum(sizes) / (len(groups) * rows_of(view))
        within = 1 - 1e-9 <= mean_factor <= self.max_factor + 1e-9
        return {"on average between one and `max_factor` rollouts for each row": within} | (
            self._of(max(1.0, mean_factor), max(self.least, min(sizes))).promises(sizes, groups, view, memory)
        )


def ends(
    mean_G: NDArray[np.float64], std_G: NDArray[np.float64], sizes: Sequence[int], longest: Sequence[int], rows: int
) -> NDArray[np.float64]:
    """The number of tokens after which each rollout of a batch ends, ascending; see `Priced`. `longest`: L of each group."""
    all_ends: list[NDArray[np.float64]] = []
    for mean, std, size, tail in zip(mean_G, std_G, sizes, longest, strict=True):
        lengths_M = np.maximum(mean + std * _normal_scores(size), 0.0)
        shortest = min(max(rows - tail, 1), size)
        late = size - shortest
        kept = ((np.arange(min(tail, late)) + 0.5) * late / max(1, min(tail, late))).astype(int) + shortest
        stopped = np.setdiff1d(np.arange(shortest, size), kept)
        lengths_M[stopped] = lengths_M[shortest - 1]  # stopped when the K-th shortest rollout ends
        all_ends.append(lengths_M)
    return np.sort(np.concatenate(all_ends))


def seconds(curve: Curve, ends_R: NDArray[np.float64]) -> float:
    """T of `Priced`, in seconds. `ends_R` has the numbers of tokens after which the batch's rollouts end, ascending."""
    running_R = np.arange(ends_R.size, 0, -1)
    rollouts, seconds_each = np.array(curve).T
    each_R = np.interp(running_R, rollouts, seconds_each) * np.maximum(1.0, running_R / rollouts[-1])
    return float((np.diff(ends_R, prepend=0.0) * each_R).sum())


def _checked_curve(latency: Any) -> Curve:
    """Check the points of a latency curve, and return them as Python numbers."""
    try:
        points = tuple((int(rollouts), float(seconds)) for rollouts, seconds in latency)
    except (TypeError, ValueError):
        points = ()
    numbers = [rollouts for rollouts, _ in points]
    whole = all(0 < seconds < inf for _, seconds in points)
    if not points or numbers != sorted(set(numbers)) or numbers[0] < 1 or not whole:
        raise ValueError(
            "latency must be pairs (rollouts, seconds per token), rollouts increasing from 1 and seconds above 0, such as "
            f"((1, 0.002), (64, 0.004)), got {latency!r}"
        )
    for (fewer, before), (more, after) in pairwise(points):
        if after < before:
            raise ValueError(
                f"latency falls from {before:g} s per token at {fewer} rollouts to {after:g} s at {more}, but decoding more "
                "rollouts cannot take less time: measure again, or give both points the mean of their seconds"
            )
    return points


@cache
def _normal_scores(count: int) -> NDArray[np.float64]:
    """Expected values of `count` sorted draws from the standard normal distribution, by Blom's formula."""
    return np.array([NormalDist().inv_cdf((m - 0.375) / (count + 0.25)) for m in range(1, count + 1)])


@dataclass(frozen=True, slots=True)
class ShortestAndLongest(RowRule):
    """Take the K shortest and the L longest rollouts by number of tokens.

    Truncated rollouts are taken only if there are too few others. If the stop rule `SampledTail` sampled the late
    rollouts, the rows are instead:

    - the K shortest of the rollouts that had ended before the sampling, with weight 1;
    - each late rollout that was kept, with weight 1 / q, where q is the probability of being kept.

    With these weights, sums over late rollouts are estimated without bias, for any function f of a rollout:

        E[Σ_kept f_i / q_i] = Σ_late f_i

    A kept rollout that fails or is truncated does not become a row, and Σ_late does not include such rollouts. If
    `SampledTail` stopped all running rollouts, only the K shortest are taken. If all rollouts ended before the sampling,
    the L longest are taken with weight 1.

    DARTS, arXiv 2605.30859. Its released code takes the rollouts that finish last instead of the longest. Weights:
    Horvitz and Thompson, Journal of the American Statistical Association 47, 1952.

    Attributes:
        shortest: K, at least 1.
        longest: L, 0 or more.
        by_size: whether L depends on the size of the group, see `longest_rows`. K + L is fixed.
    """

    shortest: int
    longest: int
    by_size: bool = False

    def __post_init__(self) -> None:
        at_least("shortest", self.shortest, 1)
        at_least("longest", self.longest, 0)

    @property
    def rows(self) -> int:
        """Number of rows of a group, K + L."""
        return self.shortest + self.longest

    @property
    def traits(self) -> RowTraits:
        return RowTraits(reads=("tokens_G", "truncated_G"), rows=self.rows)

    def _split(self, group: GroupView) -> tuple[int, int]:
        """K and L of this group."""
        longest = longest_rows(self.longest, self.by_size, self.rows, group.size)
        return self.rows - longest, longest

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Chosen:
        chosen_M = np.array(self.chosen(group), np.int64)
        return chosen_M, 1 / group.kept_G[chosen_M]

    def chosen(self, group: GroupView) -> list[int]:
        """Indices of the rows among the group's scored rollouts, ascending."""
        done_G, kept = group.in_order, group.kept
        shortest, longest = self._split(group)
        early = [g for g in range(len(done_G)) if done_G[g].rollout not in kept]
        # Sort by: not truncated first, then length, then id.
        early.sort(key=lambda g: (done_G[g].truncated, done_G[g].tokens))
        if kept or group.cancelled:
            tail = [g for g in range(len(done_G)) if done_G[g].rollout in kept and not done_G[g].truncated]
        else:
            whole = sum(not done.truncated for done in done_G)
            tail = early[whole - longest : whole] if whole >= self.rows else early[shortest : self.rows]
        return sorted(early[:shortest] + tail)

    def promises(self, chosen: Chosen, group: GroupView, view: View) -> dict[str, bool]:
        kept, weights = chosen[0].tolist(), chosen[1].tolist()
        longest = _promised_longest(self.longest, self.by_size, self.rows, group.size)
        late = [rollout in group.kept for rollout in group.rollouts_G.tolist()]
        lengths, truncated = group.tokens_G.tolist(), group.truncated_G.tolist()
        probability = [group.kept.get(rollout, 1.0) for rollout in group.rollouts_G[chosen[0]].tolist()]
        own = {
            "the weight of each row is the inverse of the probability with which the rollout was kept": all(
                abs(weight * chance - 1) < 1e-9 for weight, chance in zip(weights, probability, strict=True)
            )
        }
        if group.kept or group.cancelled:
            early = sorted(lengths[g] for g in range(group.scored) if not late[g] and not truncated[g])
            taken = sorted(lengths[g] for g in kept if not late[g] and not truncated[g])
            return own | {
                "exactly the late rollouts that were kept and not truncated": (
                    {g for g in kept if late[g]} == {g for g in range(group.scored) if late[g] and not truncated[g]}
                ),
                "the K shortest of the rollouts that had ended before the sampling": taken
                == early[: self.rows - longest],
            }
        whole = sorted(lengths[g] for g in range(group.scored) if not truncated[g])
        kept_whole = sorted(lengths[g] for g in kept if not truncated[g])
        enough = len(whole) >= self.rows
        return own | {
            "K + L rollouts, or all if there are fewer": len(kept) == len(set(kept)) == min(self.rows, group.scored),
            "the K shortest and the L longest that were not truncated": (
                not enough or kept_whole == whole[: self.rows - longest] + whole[len(whole) - longest :]
            ),
            "a truncated rollout only if all others are taken": enough or kept_whole == whole,
        }


def _promised_longest(longest: int, by_size: bool, rows: int, size: int) -> int:
    """`longest_rows` in a second way: the largest number L_i ≤ L with 2 · L_i + size ≤ 2 · rows."""
    return max(n for n in range(longest + 1) if not n or not by_size or size + 2 * n <= 2 * rows)


@dataclass(frozen=True, slots=True)
class SampledTail(StopRule):
    """Once K rollouts have ended without truncation, keep a random sample of L running rollouts and stop the others.

    The row rule declares K + L, the number of rows of a group. If r rollouts are running, each is kept with probability
    L / r, or 1 if r ≤ L. `ShortestAndLongest` weights the kept rollouts by the inverse of this probability. The sample
    replaces the L longest rollouts, because it is not known yet which rollouts will be the longest.

    If a prompt is solved, each of its visits keeps late rollouts only with probability `share`. The probabilities of the
    kept rollouts are then multiplied by `share`, so that larger weights make up for the other visits. A prompt is solved
    if the success rate of its earlier visits is at least `solved`. At the first visit, `group.predicted` is used as the
    success rate.

    Attributes:
        longest: L, 0 or more; the same value as in the row rule.
        by_size: whether L depends on the size of the group; the same value as in the row rule.
        solved: success rate from which a prompt counts as solved, in (0, 1]. None: no prompt counts as solved.
        share: share of a solved prompt's visits in which late rollouts are kept, in (0, 1].

    Raises:
        ValueError: a number is out of its range.
    """

    longest: int
    by_size: bool = False
    solved: float | None = None
    share: float = 0.1

    def __post_init__(self) -> None:
        at_least("longest", self.longest, 0)
        if self.solved is not None and not 0 < self.solved <= 1:
            raise ValueError(f"solved must be a success rate in (0, 1], or None, got {self.solved!r}")
        if not 0 < self.share <= 1:
            raise ValueError(
                f"share must be in (0, 1] (with 0, no late rollout of a solved prompt would be seen), got {self.share!r}"
            )

    def least_scored(self, view: View) -> int:
        """The smallest possible K. No rollout is stopped before K rollouts have a score."""
        return rows_of(view) - self.longest

    @property
    def traits(self) -> Traits:
        return Traits(reads=("truncated_G",), reads_rate=self.solved is not None, reads_rows=True)

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int] | SampledStops:
        # `group.whole` counts only rollouts of this stage: in a mixture, the pilots alone could reach K.
        tail = longest_rows(self.longest, self.by_size, rows_of(view), group.size)
        if not group.unfinished or group.whole < rows_of(view) - tail:
            return ()
        running = sorted(group.running)
        # Sample a group only once: a second sample would stop kept rollouts.
        if not group.kept.keys().isdisjoint(running):
            return ()
        share = 1.0
        if tail and self._is_solved(group):
            share = self.share
            if rng.random() >= share:
                return SampledStops(running, {})
        if len(running) <= tail:
            return SampledStops((), dict.fromkeys(running, share))
        kept = set(rng.permutation(len(running))[:tail].tolist())
        return SampledStops(
            [rollout for at, rollout in enumerate(running) if at not in kept],
            {running[at]: share * tail / len(running) for at in sorted(kept)},
        )

    def _is_solved(self, group: GroupView) -> bool:
        """Whether the prompt is solved. The answer does not change while the group runs."""
        if self.solved is None:
            return False
        record, predicted = group.record, group.predicted
        if record.attempts:
            return record.successes >= self.solved * record.attempts
        return predicted is not None and predicted >= self.solved

    def promises(self, made: Sequence[int] | SampledStops, group: GroupView, view: View) -> dict[str, bool]:
        whole = sum(
            not truncated and stage == group.stage
            for truncated, stage in zip(group.truncated_G.tolist(), group.stages_G.tolist(), strict=True)
        )
        stopped, kept = (made.cancel, made.kept) if isinstance(made, SampledStops) else (made, {})
        running = set(group.running)
        longest = _promised_longest(self.longest, self.by_size, rows_of(view), group.size)
        due = whole >= rows_of(view) - longest and not running & set(group.kept)
        left = running - set(stopped)
        share = self.share if longest and self._is_solved(group) else 1.0
        none_kept = share < 1 and due and not left
        return {
            "only unfinished rollouts are stopped": set(stopped) <= running,
            "no rollout is stopped before K of its stage have ended, and a group is sampled once": due or not stopped,
            "L rollouts go on, or none of a solved prompt": (
                not due or none_kept or len(left) == min(longest, len(running))
            ),
            "each rollout that goes on has its probability in `kept`, including the factor `share` of a solved prompt": (
                kept == (dict.fromkeys(left, share * len(left) / len(running)) if due and running else {})
            ),
        }
