"""Knapsack RL, arXiv 2509.25849: divide a fixed number of rollouts among the prompts of a batch by their value.

For runs in which prompts differ much in difficulty: hard prompts get more rollouts, and solved prompts get few.

How this differs from the released code: rollouts are given one at a time; the code's dynamic program has the same optimum.
Surplus rollouts go only to failed prompts, if there are any. See PAPERS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import (
    Drawn,
    Memory,
    PromptTraits,
    SizeRule,
    Traits,
    View,
)
from rollalloc.recipes.grpo import grpo, shape
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages
from rollalloc.rules.prompts import Shuffled


@sized(shape)
def knapsack(
    groups: int = 16,
    n: int = 4,
    least: int = 2,
    most: int = 128,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Knapsack RL: GRPO with n rollouts per prompt on average, more for prompts of higher value. arXiv 2509.25849.

        maximise Σ (1 - p^N - (1 - p)^N) · p (1 - p)²    N: rollouts of a prompt;  p: its success rate at the last visit

    1. Draw `groups` prompts, in random order and each once an epoch.
    2. Divide n · groups rollouts among the prompts by the formula. The first factor is the probability of seeing both
       outcomes; p (1 - p)² is the value of a prompt. New prompts get n rollouts. Solved prompts get `least`. Failed
       prompts get the rollouts that the other prompts do not need.
    3. Train on all rollouts as GRPO does.

    In a mixture with `foresight` or `spo`, p is the success rate that the other method predicts.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt on average, at least `least`. A prompt that was never visited gets exactly n.
        least: minimum number of rollouts per prompt, 1 or more. Solved prompts get this number.
        most: maximum number of rollouts per prompt, at least n.
        deviation: the kind of standard deviation, see `grpo`.
    """
    size = Knapsack(n, least, most)
    base = grpo(groups, n, deviation)
    return replace(base, stages=(replace(base.stages[0], size=size),), prompts=LastVisit())


@dataclass(frozen=True, slots=True)
class Knapsack(SizeRule):
    """Divide a fixed total of rollouts among the groups, so that the total value is largest.

        maximise Σ (1 - p^N - (1 - p)^N) · p (1 - p)²  over whole N in [least, most], for the prompts with 0 < p < 1

    p is the success rate that the prompt rule predicts (`group.predicted`). The first factor is the probability that
    both outcomes occur. The value is concave in N, so it is optimal to give rollouts one at a time to the group that
    gains most.

    A prompt without a prediction gets `mean_n`, and a prompt with p = 1 gets `least`. A prompt with 0 < p < 1 needs
    min(most, log(1 - sure) / log max(p, 1 - p)) rollouts to show both outcomes with probability `sure`. Rollouts beyond
    the total need of these prompts are divided evenly among the prompts with p = 0.

    Knapsack RL, arXiv 2509.25849; see PAPERS.md.

    Attributes:
        mean_n: rollouts per group on average, in [least, most].
        least: minimum number of rollouts per group, 1 or more.
        most: maximum number of rollouts per group.
        sure: a probability in (0, 1). A prompt needs no more rollouts if both outcomes occur with this probability.

    Raises:
        ValueError: a number is out of its range.
    """

    mean_n: int
    least: int = 2
    most: int = 128
    sure: float = 0.9

    def __post_init__(self) -> None:
        at_least("least", self.least, 1)
        at_least("mean_n", self.mean_n, self.least, "the minimum per group")
        at_least("most", self.most, self.mean_n, "the mean per group")
        if not 0 < self.sure < 1:
            raise ValueError(f"sure must be in (0, 1), got {self.sure!r}")

    traits = Traits(reads_rate=True)

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
        """Number of rollouts that all prompts with 0 < p < 1 need to show both outcomes with probability `sure`."""
        rates = [
            max(predicted, 1 - predicted) for predicted in predictions if predicted is not None and 0 < predicted < 1
        ]
        return sum(int(min(self.most, log(1 - self.sure) / log(rate))) if rate < 1 else self.most for rate in rates)

    def _where_most_is_gained(
        self, sizes: list[int], contested: Sequence[int], predictions: Sequence[float | None], spare: int
    ) -> int:
        """Give rollouts one at a time to the contested group that gains most. Return the number of rollouts left over."""
        gains = [(-_gain(predictions[g] or 0.0, sizes[g]) if sizes[g] < self.most else inf, g) for g in contested]
        heapify(gains)
        while spare and gains and gains[0][0] < inf:
            g = gains[0][1]
            sizes[g] += 1
            spare -= 1
            heapreplace(gains, (-_gain(predictions[g] or 0.0, sizes[g]) if sizes[g] < self.most else inf, g))
        return spare

    def _evenly(self, sizes: list[int], among: Sequence[int], spare: int) -> int:
        """Give rollouts one at a time to the smallest of these groups. Return the number of rollouts left over."""
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
            "moving a rollout from one contested prompt to another would not raise the value": not contested_G.any()
            or bool(gain_G.max() <= loss_G.min() + 1e-12),
            "a prompt without a prediction gets at least the mean": bool(
                (size_G[np.isnan(rate_G)] >= self.mean_n).all()
            ),
            "a solved prompt gets more than `least` only if no other prompt could take the rollouts": (
                not (size_G[solved_G] > self.least).any() or (full and bool((size_G[failed_G] == self.most).all()))
            ),
            "failed prompts get the rollouts that contested prompts do not need": (
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
    """The gain in value from one more rollout after n, for a prompt of success rate p."""
    return (p**n * (1 - p) + (1 - p) ** n * p) * p * (1 - p) ** 2


def _values(rate_G: NDArray[np.float64], size_G: NDArray[np.int64]) -> NDArray[np.float64]:
    """The value of groups of these sizes, for prompts of these success rates, shape (G,)."""
    return (1 - rate_G**size_G - (1 - rate_G) ** size_G) * rate_G * (1 - rate_G) ** 2


_UNKNOWN = -1.0  # marks a prompt without a success rate


@dataclass(frozen=True, slots=True)
class LastVisit(Shuffled):
    """Draw every prompt once an epoch, in random order. Predict the mean metric of the prompt's last visit.

    At the first visit, the prediction is the prompt's prior rate in the table, if known. A visit without a score changes
    nothing. Used by Knapsack RL, arXiv 2509.25849.
    """

    traits = PromptTraits(reads_rate=True, reads=("metrics_G",), gives_baseline=False)

    def init(self, table: PromptTable) -> Memory:
        prior_N = np.full(len(table), np.nan) if table.prior_N is None else np.asarray(table.prior_N)
        return Shuffled.init(self, table) | {
            "rate_N": np.where(np.isnan(prior_N), _UNKNOWN, prior_N).astype(np.float32)
        }

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        picked = self.beside([], memory, k, free_N, rng)
        rates: list[float] = memory["rate_N"][picked].tolist()
        return [Drawn(prompt, None if rate < 0 else rate) for prompt, rate in zip(picked, rates, strict=True)]

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if group.scored:
            memory["rate_N"][group.prompt] = min(max(float(group.metrics_G.mean()), 0.0), 1.0)

    def promises(
        self, picked: Sequence[Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        expected = [float(before["rate_N"][each.prompt]) for each in picked]
        return Shuffled.promises(self, picked, before, k, free_N, view) | {
            "each prediction is the mean metric of the last visit, or the prior rate before the first": all(
                rate < 0 if each.predicted is None else abs(each.predicted - rate) < 1e-6
                for each, rate in zip(picked, expected, strict=True)
            )
        }
