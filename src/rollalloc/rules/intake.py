"""Intake rules: they say how many groups to open now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollalloc.core.recipe import at_least
from rollalloc.core.rule import IntakeRule, IntakeTraits, Memory, View


@dataclass(frozen=True, slots=True)
class Fill(IntakeRule):
    """Open exactly as many groups as the batch still needs."""

    def __call__(self, view: View, memory: Memory) -> int:
        return view.need - view.on_the_way

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        return {"unfinished and new groups fill the batch exactly": view.on_the_way + opened == view.need}


@dataclass(frozen=True, slots=True)
class KeepInFlight(IntakeRule):
    """Keep `groups` groups running in the first stage. While enough groups have passed that stage, open none.

    Groups that are ready for a batch do not count. `view.need` groups are enough. If `ahead` is True and the recipe allows
    staleness, one batch more is needed.

    Attributes:
        groups: number of groups in the first stage, at least 1.
        ahead: whether to open groups for the batch after the current batch too, if the recipe allows staleness. The first
            stage of the next batch then runs at the same time as the last stage of this batch. The rollouts of that first
            stage are one version older than without `ahead`.
    """

    groups: int
    ahead: bool = False

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)
        if type(self.ahead) is not bool:
            raise ValueError(
                "ahead must be True or False, not a number: the recipe sets the number of groups in a batch; got "
                f"{self.ahead!r}"
            )

    @property
    def traits(self) -> IntakeTraits:
        return IntakeTraits(looks_ahead=self.ahead)

    def __call__(self, view: View, memory: Memory) -> int:
        ahead = self._ahead(view)
        if view.need == 0 and not ahead:
            return 0
        further_on = view.on_the_way - view.running_S[0]
        return self.groups - view.running_S[0] if further_on < view.need + ahead else 0

    def _ahead(self, view: View) -> int:
        """Number of groups that are needed for the next batch."""
        return view.groups if self.ahead and view.max_staleness else 0

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        running, wanted = view.running_S[0] + max(0, opened), view.need + self._ahead(view)
        later = sum(view.running_S[1:]) + sum(view.held_S[:-1])
        return {
            "no more than `groups` run in the first stage": opened <= 0 or running <= self.groups,
            "no group is opened while enough groups have passed the first stage": opened <= 0 or later < wanted,
            "if too few groups have passed and the batch is not full, the first stage is full": (
                later >= wanted or view.need == 0 or running >= self.groups
            ),
        }


@dataclass(frozen=True, slots=True)
class Ahead(IntakeRule):
    """Open as many groups as another rule, `of`, would open if a batch had `groups` more groups.

    Use this rule for trainers that take a batch while rollouts are running. With `of=Fill()`, a batch then consists of
    the groups that end first. Later groups go into the next batch. Without staleness, `groups` has no effect.

    Attributes:
        of: the wrapped rule.
        groups: number of groups that are added to the batch, at least 1.

    Raises:
        ValueError: `groups` is out of its range.
    """

    of: IntakeRule
    groups: int

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)

    @property
    def traits(self) -> IntakeTraits:
        return replace(self.of.traits, looks_ahead=True)

    def __call__(self, view: View, memory: Memory) -> int:
        return self.of(self._seen(view), memory)

    def _seen(self, view: View) -> View:
        """The view for the wrapped rule: its `need` includes the additional groups."""
        if not view.max_staleness:
            return view
        # All ready groups are subtracted, also if there are more than a batch needs. Otherwise a slow trainer would let
        # more groups become stale.
        return view._replace(need=max(0, view.groups + self.groups - view.held_S[-1]))

    def promises(self, opened: int, view: View, memory: Memory) -> Mapping[str, bool]:
        return self.of.promises(opened, self._seen(view), memory)
