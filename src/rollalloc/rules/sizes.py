"""Size rules: how many rollouts each group gets in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import PromptTable
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


@dataclass(frozen=True, slots=True)
class InAll(SizeRule):
    """Give each group as many rollouts as another rule does, less those that earlier stages gave it; at least 1.

        max(1, M - rollouts of earlier stages)    M: the other rule's number

    For a rule whose numbers are of whole groups, in the last of several stages.

    Attributes:
        rule: the other rule.
    """

    rule: SizeRule

    @property
    def traits(self) -> SizeTraits:
        return self.rule.traits

    def init(self, table: PromptTable) -> Memory:
        return self.rule.init(table)

    def observe(self, memory: Memory, group: GroupView) -> None:
        self.rule.observe(memory, group)

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        return self.rule.remap(memory, source_N, table)

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]:
        sizes = self.rule(groups, view, memory)
        return [max(1, size - group.size) for group, size in zip(groups, sizes, strict=True)]

    def promises(
        self, sizes: Sequence[int], groups: Sequence[GroupView], view: View, memory: Memory
    ) -> dict[str, bool]:
        whole = self.rule(groups, view, memory)
        in_all = [group.size + size for group, size in zip(groups, sizes, strict=True)]
        own = {
            "with the rollouts of earlier stages, the other rule's number or, if that is already reached, one more": all(
                mine == number or (size == 1 and mine > number)
                for mine, number, size in zip(in_all, whole, sizes, strict=True)
            )
        }
        return own | dict(self.rule.promises(whole, groups, view, memory))
