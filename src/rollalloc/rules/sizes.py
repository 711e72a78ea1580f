"""Sizes: how many rollouts each group gets in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import ClassVar

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Memory, View, at_least, rows_of


@dataclass(frozen=True, slots=True)
class Fixed:
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
class Redundant:
    """More rollouts than are trained on, most where lengths vary most.

    Minimises Σ σ_i / M_i subject to Σ M_i = mean_factor · rows · groups and rows ≤ M_i ≤ max_factor · rows, where σ_i is
    the running standard deviation of prompt i's lengths and rows is how many of a group the recipe trains on. The objective
    is separable and convex, so giving one rollout after the other to the group that gains most, σ / (M (M + 1)), is
    optimal. A prompt without a record gets the mean σ.

    DARTS, arXiv 2605.30859.

    Attributes:
        mean_factor: rollouts for each row on average, in [1, max_factor].
        max_factor: rollouts for each row at most.
    """

    reads_rows: ClassVar = True

    mean_factor: float
    max_factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean_factor <= self.max_factor:
            raise ValueError(f"expected 1 <= mean_factor <= max_factor, got {self.mean_factor} and {self.max_factor}")

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        rows = rows_of(view)
        most = int(self.max_factor * rows + 1e-9)  # 1.15 * 100 is a little less than 115
        spare = min(round(self.mean_factor * rows * len(groups)), most * len(groups)) - rows * len(groups)
        if len(groups) == 1:  # all that is to spare is its own
            return [rows + spare]
        std_G = view.ledger.length_std_N[[group.prompt for group in groups]].astype(np.float64)
        known = std_G[~np.isnan(std_G)]
        std_G[np.isnan(std_G)] = known.mean() if known.size else 1.0
        std_G = np.maximum(std_G, 1e-9 * max(1.0, float(std_G.max())))  # equal lengths: the spare rollouts go round
        sizes = [rows] * len(groups)
        gains = [(-std / (rows * (rows + 1)), g) for g, std in enumerate(std_G.tolist())]
        heapify(gains)
        for _ in range(spare):
            g = gains[0][1]
            sizes[g] += 1
            gain = -std_G[g] / (sizes[g] * (sizes[g] + 1)) if sizes[g] < most else np.inf
            heapreplace(gains, (float(gain), g))
        return sizes

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        size_G, rows = np.asarray(sizes, np.float64), rows_of(view)
        std_G = np.array([view.ledger.record(group.prompt).length_std for group in groups])
        std_G = np.where(np.isnan(std_G), np.nanmean(std_G) if np.isfinite(std_G).any() else 1.0, std_G)
        most = np.floor(self.max_factor * rows + 1e-9)
        gain_G = np.where(size_G < most, std_G / (size_G * (size_G + 1)), -np.inf)  # of one rollout more
        loss_G = np.where(size_G > rows, std_G / (size_G * np.maximum(1, size_G - 1)), np.inf)  # of one less
        return {
            "`mean_factor` rollouts for each row on average": (
                size_G.sum() == min(round(self.mean_factor * rows * size_G.size), most * size_G.size)
            ),
            "at least the rows and at most `max_factor` times as many": bool(
                ((size_G >= rows) & (size_G <= most)).all()
            ),
            "no rollout would help more in another group": bool(
                gain_G.max() <= loss_G.min() + 1e-6 * max(1.0, float(std_G.max()))
            ),
        }
