"""Stops: which rollouts of a group are cancelled before they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import View, at_least


@dataclass(frozen=True, slots=True)
class SampledTail:
    """Once `enough` rollouts are there that were not truncated, keep `tail` random ones of those running, stop the rest.

    With tail 0 nothing is kept. With tail 1 or more the longest rollouts are replaced by a random sample of the late
    ones: no rollout can be known to be the longest while others run.

    Attributes:
        enough: K, at least 1.
        tail: L, 0 or more.
    """

    reads: ClassVar = ("truncated_G",)

    enough: int
    tail: int

    def __post_init__(self) -> None:
        at_least("enough", self.enough, 1)
        at_least("tail", self.tail, 0)

    @property
    def least_scored(self) -> int:
        """Scored rollouts before which nothing is stopped."""
        return self.enough

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int]:
        # A group of which some were stopped has its sample already; looking again would thin it out.
        if group.scored < self.enough or group.cancelled or group.unfinished <= self.tail:
            return ()
        # Only this stage's own rollouts count: pilots that are there before it begins would stop it at once.
        if group.whole < self.enough:
            return ()
        running = sorted(group.running)
        kept = set(rng.permutation(len(running))[: self.tail].tolist())
        return [rollout for at, rollout in enumerate(running) if at not in kept]

    def promises(self, stopped: Sequence[int], group: GroupView, view: View) -> dict[str, bool]:
        whole = sum(
            not truncated and stage == group.stage
            for truncated, stage in zip(group.truncated_G.tolist(), group.stages_G.tolist(), strict=True)
        )
        running, due = len(group.running), whole >= self.enough and not group.cancelled
        return {
            "only rollouts that run are stopped": set(stopped) <= group.running.keys(),
            "none is stopped before `enough` of its stage are there, nor twice": due or not stopped,
            "then just `tail` go on": not due or running - len(stopped) == min(self.tail, running),
        }
