"""Intake: how many groups to open now. What is held and running is bounded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollalloc.core.recipe import at_least
from rollalloc.core.rule import IntakeRule, IntakeTraits, Memory, View


@dataclass(frozen=True, slots=True)
class Fill(IntakeRule):
    """Just as many groups as the batch still needs."""

    def __call__(self, view: View, memory: Memory) -> int:
        return view.need - view.on_the_way

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        return {"what is on its way and what is opened fill the batch": view.on_the_way + opened == view.need}


@dataclass(frozen=True, slots=True)
class KeepInFlight(IntakeRule):
    """Keep `groups` groups running in the first stage while those further on do not suffice.

    Opens groups - running[0] while held + running in later stages < need + a batch where it looks ahead. So at most need +
    that + groups are held at any time.

    Attributes:
        groups: at least 1.
        ahead: whether, where the recipe allows staleness, a batch beyond the one in the making is wanted: the first stage
            for the next batch is then generated together with the last stage for this one, at the price of one version of
            staleness.
    """

    groups: int
    ahead: bool = False

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)
        if type(self.ahead) is not bool:
            raise ValueError(
                f"ahead must be True or False: how many groups a batch has the recipe says, got {self.ahead!r}"
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
        """Groups wanted beyond the batch in the making."""
        return view.groups if self.ahead and view.max_staleness else 0

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        running, wanted = view.running_S[0] + max(0, opened), view.need + self._ahead(view)
        later = sum(view.running_S[1:]) + sum(view.held_S[:-1])
        return {
            "no more than `groups` run in the first stage": opened <= 0 or running <= self.groups,
            "none is opened where those further on suffice": opened <= 0 or later < wanted,
            "where they do not, and the batch lacks groups, the first stage is full": (
                later >= wanted or view.need == 0 or running >= self.groups
            ),
        }


@dataclass(frozen=True, slots=True)
class Ahead(IntakeRule):
    """What another rule would open if a batch had `groups` more, where the recipe allows staleness.

    For trainers that take a batch while rollouts go on: with `Fill` a batch is then the first of so many
    groups to end, and the others are the next one's.

    Attributes:
        of: the other rule.
        groups: at least 1.

    Raises:
        ValueError: groups out of its range.
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
        """The view that the other rule is shown."""
        if not view.max_staleness:
            return view
        # Those ready beyond the batch are of the next: where the trainer is slower nothing more is opened to grow stale.
        return view._replace(need=max(0, view.groups + self.groups - view.held_S[-1]))

    def promises(self, opened: int, view: View, memory: Memory) -> Mapping[str, bool]:
        return self.of.promises(opened, self._seen(view), memory)
