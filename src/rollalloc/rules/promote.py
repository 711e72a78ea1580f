"""Promote rules: they choose which groups go on if more passed a stage than are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pvariance
from typing import ClassVar

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.rule import PromoteRule, PromoteTraits, View


class _ByAge(PromoteRule):
    """Sort groups by the age of their rollouts. With `sign` 1, the oldest go first; with -1, the newest."""

    __slots__ = ()
    sign: ClassVar[int]
    traits = PromoteTraits(reads=())

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        return sorted(held, key=lambda group: (self.sign * group.first_version, self.sign * group.group))[:k]

    def promises(self, chosen: Sequence[GroupView], held: Sequence[GroupView], k: int, view: View) -> dict[str, bool]:
        ages = [self.sign * group.first_version for group in chosen]
        left = [self.sign * group.first_version for group in _left(chosen, held)]
        return {
            "k groups go on, or all if fewer wait": len(chosen) == min(k, len(held)),
            "groups go on in the order of age": not left or not ages or max(ages) <= min(left),
        }


@dataclass(frozen=True, slots=True)
class Oldest(_ByAge):
    """Groups with the oldest rollouts go first. If ages are equal, groups that were drawn first go first."""

    sign: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class MostRecent(_ByAge):
    """Groups with the newest rollouts go first. If ages are equal, groups that were drawn last go first."""

    sign: ClassVar[int] = -1


@dataclass(frozen=True, slots=True)
class RandomOrder(PromoteRule):
    """Groups go on in random order."""

    traits = PromoteTraits(reads=())

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        return [held[index] for index in sorted(rng.choice(len(held), min(k, len(held)), replace=False).tolist())]

    def promises(self, chosen: Sequence[GroupView], held: Sequence[GroupView], k: int, view: View) -> dict[str, bool]:
        return {"k groups go on, or all if fewer wait": len(chosen) == min(k, len(held))}


@dataclass(frozen=True, slots=True)
class TopVariance(PromoteRule):
    """Groups with the highest variance of metrics go first. If variances are equal, groups that were drawn last go first.

    This is Pilot-Commit's published order, arXiv 2605.26606, except that no group goes on while a group is running in the
    stage, because the running group may have the highest variance.

    Attributes:
        always: if True, the rule is kept even if rollouts stream, so that the run waits for whole stages. If None, `Oldest`
            replaces this rule when rollouts stream.
        expiring_first: if True, groups that would be too old after the next update go before all others, because their
            rollouts would otherwise be lost. If more groups pass than a batch needs, again and again, this turns the order
            into a queue: every group waits until its last chance, and variance no longer matters. Without staleness, no
            group has priority.
    """

    always: bool | None = None
    expiring_first: bool = False

    @property
    def traits(self) -> PromoteTraits:
        return PromoteTraits(reads=("metrics_G",), in_waves=not self.always)

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        if view.running_S[held[0].stage]:
            return ()
        return sorted(held, key=lambda group: self._rank(group, view))[:k]

    def _rank(self, group: GroupView, view: View) -> tuple[bool, float, int]:
        variance = round(float(np.var(group.metrics_G)), 12)
        return (not self._goes_before(group, view), -variance, -group.group)

    def _goes_before(self, group: GroupView, view: View) -> bool:
        """Whether the group goes before others whatever its variance: it is at its last chance."""
        return self.expiring_first and view.version - group.first_version >= view.max_staleness > 0

    def promises(self, chosen: Sequence[GroupView], held: Sequence[GroupView], k: int, view: View) -> dict[str, bool]:
        awaited = view.running_S[held[0].stage] > 0
        left = _left(chosen, held)
        by_variance = [_variance(group) for group in chosen if not self._goes_before(group, view)]
        best_left = max((_variance(group) for group in left), default=0.0)
        return {
            "k groups go on, or all if fewer wait; none while a group runs in the stage": len(chosen)
            == (0 if awaited else min(k, len(held))),
            "with `expiring_first`, a group that is about to be too old goes before all others": not by_variance
            or not any(self._goes_before(group, view) for group in left),
            "all others go in the order of their variance": not by_variance or min(by_variance) >= best_left - 1e-9,
        }


def _left(chosen: Sequence[GroupView], held: Sequence[GroupView]) -> list[GroupView]:
    ids = {group.group for group in chosen}
    return [group for group in held if group.group not in ids]


def _variance(group: GroupView) -> float:
    return pvariance(group.metrics_G.tolist())
