"""Intake: how many groups to open now. What is held and running is bounded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

from rollalloc.core.recipe import at_least
from rollalloc.core.rule import IntakeRule, IntakeTraits, Memory, View
from rollalloc.rules.prompts import without_variance


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
class EveryRound(IntakeRule):
    """`groups` new groups in every round, however many wait further on; Pilot-Commit's published schedule, arXiv 2605.26606.

    A round begins when everything handed out is over, also where rollouts could stream. What waits is thrown away when it is
    too old, which bounds what is held.

    Attributes:
        groups: at least 1.
    """

    groups: int

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)

    @property
    def traits(self) -> IntakeTraits:
        return IntakeTraits(looks_ahead=True, until_stale=True)

    def __call__(self, view: View, memory: Memory) -> int:
        # Groups that go on in this round were decided before, and are not handed out yet.
        return 0 if view.in_flight or view.running_S[0] else self.groups

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        over = view.in_flight == 0 and view.running_S[0] == 0
        return {"a round has just `groups` new groups, and begins when the last is over": opened == over * self.groups}


@dataclass(frozen=True, slots=True)
class Estimated(IntakeRule):
    """As many groups in the first stage as should fill the batch, while those further on do not suffice; at most `groups`.

        spare · need / (1 - share),  share: of the groups that ended since the last update, those without variance

    Before any of them had variance it is `groups`, and so it is under a prompt rule that does not count them
    (`prompts.Selective` does). GRESO's adaptive batch, arXiv 2506.02177.

    Attributes:
        groups: at least 1.
        spare: above 0 and finite.

    Raises:
        ValueError: a value out of its range.
    """

    groups: int
    spare: float = 1.25

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)
        if not 0 < self.spare < inf:
            raise ValueError(f"spare must be above 0 and finite, got {self.spare!r}")

    def __call__(self, view: View, memory: Memory) -> int:
        if view.on_the_way - view.running_S[0] >= view.need:
            return 0
        met, without = view.held_S[-1], without_variance(memory, view.version)
        enough = ceil(self.spare * view.need * (met + without) / met) if met else self.groups
        return max(0, min(self.groups, enough) - view.running_S[0])

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        met, without = view.held_S[-1], without_variance(memory, view.version)
        share = without / (met + without) if met else 0.0
        running = view.running_S[0] + opened
        later = sum(view.running_S[1:]) + sum(view.held_S[:-1])
        expected, wanted = running * (1 - share), self.spare * view.need
        return {
            "none is opened where those further on suffice": opened == 0 or later < view.need,
            "no more than `groups` run in the first stage": opened == 0 or running <= self.groups,
            "what runs should fill the batch, as far as `groups` allow": (
                later >= view.need or running >= self.groups or (met > 0 and expected >= wanted - 1e-9)
            ),
            "no group more is opened than that takes": opened == 0 or not met or expected - (1 - share) < wanted + 1e-9,
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
