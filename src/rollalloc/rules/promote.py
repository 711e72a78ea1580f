"""Promote rules: which of the groups that passed a stage go on if there are more than needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pvariance
from typing import ClassVar

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.rule import PromoteRule, PromoteTraits, View


class _ByAge(PromoteRule):
    """Groups in the order of their rollouts' age; `sign` is 1 if the oldest go first, and -1 if the newest go first."""

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
            "none goes before one that comes first by its age": not left or not ages or max(ages) <= min(left),
        }


@dataclass(frozen=True, slots=True)
class Oldest(_ByAge):
    """Groups with the oldest rollouts first; of equally old groups, those drawn first."""

    sign: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class MostRecent(_ByAge):
    """Groups with the newest rollouts first; of equally old groups, those drawn last."""

    sign: ClassVar[int] = -1


@dataclass(frozen=True, slots=True)
class RandomOrder(PromoteRule):
    """Random groups."""

    traits = PromoteTraits(reads=())

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        return [held[index] for index in sorted(rng.choice(len(held), min(k, len(held)), replace=False).tolist())]

    def promises(self, chosen: Sequence[GroupView], held: Sequence[GroupView], k: int, view: View) -> dict[str, bool]:
        return {"k groups go on, or all if fewer wait": len(chosen) == min(k, len(held))}


@dataclass(frozen=True, slots=True)
class TopVariance(PromoteRule):
    """Groups whose metrics have the highest variance first; if variances are equal, those drawn last.

    This differs from Pilot-Commit's published order in two ways. Groups that would be too old after the next update go
    first; otherwise they could wait until the rollouts paid for them are too old to train on. And the rule waits while
    groups are running in its stage, because the highest variance is known only when all have ended. This wait ends,
    because intake rules open no new groups while enough are waiting.

    Attributes:
        always: True: this rule is used even if rollouts stream, and the run waits for the whole stage. None: if
            rollouts stream, `Oldest` replaces this rule.
    """

    always: bool | None = None

    @property
    def traits(self) -> PromoteTraits:
        return PromoteTraits(reads=("metrics_G",), in_waves=not self.always)

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        if view.running_S[held[0].stage]:
            return ()
        return sorted(held, key=lambda group: self._rank(group, view))[:k]

    def _rank(self, group: GroupView, view: View) -> tuple[bool, float, int]:
        lasts = view.version - group.first_version < view.max_staleness
        # With staleness 0, every group would be too old after the next update, so none has priority.
        variance = round(float(np.var(group.metrics_G)), 12)
        return (lasts if view.max_staleness else True, -variance, -group.group)

    def promises(self, chosen: Sequence[GroupView], held: Sequence[GroupView], k: int, view: View) -> dict[str, bool]:
        awaited = view.running_S[held[0].stage] > 0
        left = _left(chosen, held)
        last = [group for group in left if view.version - group.first_version >= view.max_staleness > 0]
        variances = [
            _variance(group)
            for group in chosen
            if not view.version - group.first_version >= view.max_staleness > 0  # too old after the next update
        ]
        best_left = max((_variance(group) for group in left), default=0.0)
        return {
            "k groups go on, or all if fewer wait; none while some still run in the stage": len(chosen)
            == (0 if awaited else min(k, len(held))),
            "no group that is about to be too old is left behind while another one goes on": not last or not variances,
            "of the others, the groups with the highest variance go on": (
                not variances or min(variances) >= best_left - 1e-9
            ),
        }


def _left(chosen: Sequence[GroupView], held: Sequence[GroupView]) -> list[GroupView]:
    ids = {group.group for group in chosen}
    return [group for group in held if group.group not in ids]


def _variance(group: GroupView) -> float:
    return pvariance(group.metrics_G.tolist())
