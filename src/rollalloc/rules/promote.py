"""Promotion: which of the groups that passed a stage go on when there are more than needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import View, at_least


@dataclass(frozen=True, slots=True)
class Oldest:
    """Those with the oldest rollouts first, then those drawn first."""

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        return sorted(held, key=lambda group: (group.first_version, group.group))[:k]


@dataclass(frozen=True, slots=True)
class MostRecent:
    """Those with the newest rollouts first, then those drawn last."""

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        return sorted(held, key=lambda group: (-group.first_version, -group.group))[:k]


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """Any k, at random."""

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        return [held[index] for index in sorted(rng.choice(len(held), min(k, len(held)), replace=False).tolist())]


@dataclass(frozen=True, slots=True)
class TopVariance:
    """Those whose metrics have the highest variance first, then the newest.

    Two things differ from the published order. Groups that would be too old at the next update go first: highest variance
    first would starve them until their paid rollouts expire. And it waits while groups are still running in its stage,
    because what is highest is known only when all are in; the intake rules stop opening groups while enough are held, so
    the wait ends.

    Attributes:
        max_staleness: the recipe's.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        at_least("max_staleness", self.max_staleness, 0)

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        if view.running_S[held[0].stage]:
            return ()
        return sorted(held, key=lambda group: self._rank(group, view))[:k]

    def _rank(self, group: GroupView, view: View) -> tuple[bool, float, int]:
        lasts = view.version - group.first_version < self.max_staleness
        # With staleness 0 every group is at its last chance, and none needs to go before the others.
        variance = round(float(np.var(group.metrics_G)), 12)
        return (lasts if self.max_staleness else True, -variance, -group.group)
