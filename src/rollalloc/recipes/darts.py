"""DARTS: redundant rollouts, of which the shortest and the longest are trained on and the rest are stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heapreplace
from math import inf
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.latency import Curve, checked_curve
from rollalloc.core.recipe import Recipe, at_least, one_of
from rollalloc.core.rule import (
    Memory,
    RowRule,
    RowTraits,
    Sample,
    SizeRule,
    StopRule,
    Traits,
    View,
    longest_in,
    longest_of,
    rows_of,
)
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages
from rollalloc.rules.rows import Chosen

MOST_FACTOR = (
    1024  # rollouts for each one trained on: far beyond any use, and the sizes of a batch are found in seconds
)


@sized
def darts(
    groups: int = 16,
    shortest: int = 7,
    longest: int = 1,
    max_redundancy: float = 2.0,
    tail: Literal["exact", "sampled", "none"] = "exact",
    deviation: advantages.Deviation | None = None,
    latency: tuple[tuple[int, float], ...] | Literal["measured"] | None = None,
    solved: float | None = None,
    share: float = 0.1,
    least: int | None = None,
    normalise: bool = False,
    longest_by: Literal["all", "size", "record"] = "all",
    price: float | None = None,
) -> Recipe:
    """DARTS: redundant rollouts, train on the shortest and the longest, stop what is not needed. arXiv 2605.30859.

    Args:
        groups: prompts in a batch, at least 1.
        shortest: K, at least 1.
        longest: L, 0 or more. K + L rollouts of each group are trained on.
        max_redundancy: rollouts for each one trained on, at most; half of the redundancy is given on average, most to
            prompts whose lengths vary most. In [1, 1024].
        tail: "exact" lets every rollout end, since any that runs may become the longest. "sampled" keeps L random ones of
            those running once K ended, stops the rest, and weights each of the L by the inverse of that probability: the
            longest are no longer sought, a random late one stands for all late ones. "none", for prompts that are nearly
            solved, trains on the K + L shortest and stops the rest as soon as they are there: only short answers are learned
            from.
        deviation: as for `grpo`.
        latency: seconds for a token by how many rollouts are decoded at once, (1, 0.002), (64, 0.004), ...: how many
            rollouts there are in all is then what makes generation shortest; see `Priced`. Seconds that fall are
            refused. "measured": those that the engine measures of itself, which the native trainer's asynchronous one
            does; half the redundancy until it has. None: half the redundancy.
        solved: with tail="sampled", prompts that succeeded so often in the visits before, or of which a method that this is
            mixed with expects it before the first, have no tail, but for `share` of their visits, which stand for all; in
            (0, 1]. None: all have one. With longest_by="record" the rate from which a prompt has none, whatever the tail.
        share: in (0, 1].
        least: rollouts of each group at least, in [K + L, (1 + max_redundancy) / 2 · (K + L)]; released: 10 for 8 rows.
            None: K + L.
        normalise: compare how lengths vary by (σ - min) / (max - min) of the groups ordered together, as released, not in
            tokens.
        longest_by: L is the number of "all" prompts; or "size" gives a prompt fewer, none in the end, the more rollouts it
            has, and as many more of the shortest, `LongestBySize`, as released; "record" gives none to prompts that
            succeeded so often as `solved` says and whose lengths vary more than others', `LongestByRecord`. A group
            without a longest is stopped once its rows are there, under tail="exact" too.
        price: with latency, what a batch's seconds count against the worth of more rollouts to choose from, above 0:
            `Priced`'s λ. None: seconds alone count.

    Raises:
        ValueError: a value out of its range, or two that do not go together.
    """
    at_least("shortest", shortest, 1)
    at_least("longest", longest, 0)
    if least is not None:
        _check_floor(least, shortest + longest, (1 + max_redundancy) / 2)
    if not 1 <= max_redundancy <= MOST_FACTOR:
        raise ValueError(
            f"max_redundancy: expected rollouts for each one trained on, from 1 to {MOST_FACTOR}, got {max_redundancy}"
        )
    if price is not None and latency is None:
        raise ValueError("price weighs seconds, which latency says; give latency, or leave price out")
    one_of("tail", tail, ("exact", "sampled", "none"))
    one_of("longest_by", longest_by, ("all", "size", "record"))
    if longest_by != "all" and (tail == "none" or not longest):
        raise ValueError(
            f"longest_by={longest_by!r}: of a recipe that trains on longest rollouts only, got longest={longest} and "
            f"tail={tail!r}; give longest of at least 1 and another tail, or leave longest_by out"
        )
    if longest_by == "record" and solved is None:
        raise ValueError(
            'longest_by="record" needs solved, the success rate from which a prompt has no longest; such as 0.9'
        )
    if solved is not None and tail != "sampled" and longest_by != "record":
        raise ValueError(
            f'solved leaves out the tail of a sampled one only; give tail="sampled", got {tail!r}, or no solved'
        )
    floor = 1 if least is None else least
    size = Redundant((1 + max_redundancy) / 2, max_redundancy, floor, normalise)
    if latency is not None:
        curve = None if latency == "measured" else latency
        size = Priced(max_redundancy, curve, price, floor, normalise)
    if tail == "none":
        shortest, longest = shortest + longest, 0
    base = grpo(groups, shortest + longest)
    stop = _stop(tail, solved if longest_by != "record" else None, share, longest_by == "all")
    return replace(
        base,
        stages=(replace(base.stages[0], size=size, stop=stop),),
        rows=_ends(shortest, longest, longest_by, solved),
        advantage=advantages.OverChosen(advantages.kernel_of(deviation)),
    )


def _stop(tail: str, solved: float | None, share: float, same_longest: bool) -> StopRule | None:
    """What is stopped of a group, by its tail; of one without a longest all that is not needed, in any case."""
    if tail != "exact":
        return SampledTail(solved, share)
    return None if same_longest else ShortestOnly()


def _ends(shortest: int, longest: int, longest_by: str, solved: float | None) -> RowRule:
    """The shortest and the longest, with as many of these as all groups have, or each by itself."""
    if longest_by == "size":
        return LongestBySize(shortest, longest)
    if longest_by == "record" and solved is not None:
        return LongestByRecord(shortest, longest, solved)
    return ShortestAndLongest(shortest, longest)


def _check_floor(least: int, rows: int, mean_factor: float) -> None:
    """Refuse a floor of a group's rollouts that is none, or leaves nothing to be given by need."""
    at_least("least", least, rows, f"{rows} rollouts of each group are trained on")
    if least > mean_factor * rows:
        raise ValueError(
            f"least={least} is above the {mean_factor * rows:g} rollouts that a group has on average; give a lower floor, "
            "or a higher max_redundancy"
        )


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
class ShortestAndLongest(RowRule):
    """The K shortest and the L longest rollouts by true token length; what was truncated only where nothing else is left.

    Where a stop rule sampled the late ones (`SampledTail`), it is the K shortest of those that had ended by then, with
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


@dataclass(frozen=True, slots=True)
class SampledTail(StopRule):
    """Once K rollouts are there that were not truncated, keep L random ones of those running, stop the rest.

    K + L are the rows that the recipe's row rule takes of a group, L those that it takes of this one for being the longest.
    Each of the r that run goes on with probability L / r, or 1 where no more than L run, and the group keeps that with it.
    With L = 0 nothing is kept. With L ≥ 1 the longest rollouts are replaced by a random sample of the late ones: no rollout
    can be known to be the longest while others run.

    A prompt whose earlier visits succeeded at a rate of `solved` at least, or of which so much is expected
    (`group.predicted`) where it has none, has no tail, but for a share `share` of its visits, by a draw of its own: there
    each goes on with probability `share` · L / r, so that the few stand for all.

    Attributes:
        solved: in (0, 1]; None: every prompt has its tail.
        share: in (0, 1].

    Raises:
        ValueError: a number out of its range.
    """

    solved: float | None = None
    share: float = 0.1

    def __post_init__(self) -> None:
        if self.solved is not None and not 0 < self.solved <= 1:
            raise ValueError(f"solved must be a success rate in (0, 1], or None, got {self.solved!r}")
        if not 0 < self.share <= 1:
            raise ValueError(
                f"share must be in (0, 1], or no late rollout of a solved prompt is seen, got {self.share!r}"
            )

    def least_scored(self, view: View) -> int:
        """K where L is largest: scored rollouts before which nothing is stopped."""
        return rows_of(view) - view.longest

    @property
    def traits(self) -> Traits:
        return Traits(reads=("truncated_G",), reads_rate=self.solved is not None, reads_rows=True)

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int] | Sample:
        # Only this stage's own rollouts count: pilots that are there before it begins would stop it at once.
        tail = longest_in(group, view)
        if not group.unfinished or group.whole < rows_of(view) - tail:
            return ()
        running = sorted(group.running)
        # A group of which some were kept has its sample already; looking again would thin it out.
        if not group.kept.keys().isdisjoint(running):
            return ()
        share = 1.0
        if tail and self._is_solved(group):
            share = self.share
            if rng.random() >= share:
                return Sample(running, {})
        if len(running) <= tail:
            return Sample((), dict.fromkeys(running, share))
        kept = set(rng.permutation(len(running))[:tail].tolist())
        return Sample(
            [rollout for at, rollout in enumerate(running) if at not in kept],
            {running[at]: share * tail / len(running) for at in sorted(kept)},
        )

    def _is_solved(self, group: GroupView) -> bool:
        """By the visits before this one, or what was expected of it: neither changes while the group runs."""
        if self.solved is None:
            return False
        record, predicted = group.record, group.predicted
        if record.attempts:
            return record.successes >= self.solved * record.attempts
        return predicted is not None and predicted >= self.solved

    def promises(self, made: Sequence[int] | Sample, group: GroupView, view: View) -> dict[str, bool]:
        whole = sum(
            not truncated and stage == group.stage
            for truncated, stage in zip(group.truncated_G.tolist(), group.stages_G.tolist(), strict=True)
        )
        stopped, kept = (made.cancel, made.kept) if isinstance(made, Sample) else (made, {})
        running = set(group.running)
        longest = view.longest if group.longest is None else group.longest
        due = whole >= rows_of(view) - longest and not running & set(group.kept)
        left = running - set(stopped)
        share = self.share if longest and self._is_solved(group) else 1.0
        none_kept = share < 1 and due and not left
        return {
            "only rollouts that run are stopped": set(stopped) <= running,
            "none is stopped before K of its stage are there, nor twice": due or not stopped,
            "then just L go on, or none of a solved prompt": (
                not due or none_kept or len(left) == min(longest, len(running))
            ),
            "each that goes on is recorded, with the share of those running that do, of a solved prompt's visits, too": (
                kept == (dict.fromkeys(left, share * len(left) / len(running)) if due and running else {})
            ),
        }


@dataclass(frozen=True, slots=True)
class ShortestOnly(StopRule):
    """Stop a group of which no row is to be the longest once its rows are there that were not truncated; let others run."""

    def least_scored(self, view: View) -> int:
        """The rows of a group: scored rollouts before which nothing is stopped."""
        return rows_of(view)

    @property
    def traits(self) -> Traits:
        return Traits(reads=("truncated_G",), reads_rows=True)

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int]:
        over = not longest_in(group, view) and group.whole >= rows_of(view)
        return sorted(group.running) if over else ()

    def promises(self, made: Sequence[int] | Sample, group: GroupView, view: View) -> dict[str, bool]:
        whole = sum(
            not truncated and stage == group.stage
            for truncated, stage in zip(group.truncated_G.tolist(), group.stages_G.tolist(), strict=True)
        )
        shortest_only = (view.longest if group.longest is None else group.longest) == 0
        return {
            "all that run are stopped once the rows are there, of a group without a longest, and none else": (
                list(made) == (sorted(group.running) if shortest_only and whole >= rows_of(view) else [])
            )
        }
