"""Size rules: how many rollouts each group gets in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import at_least
from rollalloc.core.rule import Memory, SizeRule, SizeTraits, View


@dataclass(frozen=True, slots=True)
class Fixed(SizeRule):
    """Give every group n rollouts."""

    n: int

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)

    @property
    def traits(self) -> SizeTraits:
        return SizeTraits(most=self.n)

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        return [self.n] * len(groups)

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        return {"n rollouts for each group": list(sizes) == [self.n for _ in groups]}
