"""What a verdict chooses from: recipes, each in a shape of batch, and the methods of the evidence that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe in a shape of batch.

    Attributes:
        recipe: a key of `rollalloc.named.RECIPES`.
        groups: prompts of a batch, at least 1.
        n: rollouts of each, at least 1.
    """

    recipe: str
    groups: int
    n: int

    @property
    def name(self) -> str:
        """As evidence has it: "grpo_n4", or the recipe alone where it needs no groups."""
        return self.recipe if self.n == 1 else f"{self.recipe}_n{self.n}"

    @property
    def words(self) -> str:
        """As a sentence has it: "GRPO n = 4", or the recipe alone."""
        named = {"grpo": "GRPO", "reinforce": "REINFORCE", "raft": "RAFT"}.get(self.recipe, self.recipe)
        return named if self.n == 1 else f"{named} n = {self.n}"

    def with_rollouts(self, rollouts: int) -> Choice:
        """The same in batches of about so many rollouts."""
        return replace(self, groups=max(1, round(rollouts / self.n)))


BATCH = 64  # rollouts of a batch in the evidence, and where only the size of a group is known
METHODS = ("grpo_n2", "grpo_n4", "grpo_n16", "reinforce", "raft", "foresight")  # that were run
SIZES = (2, 4, 16)  # of GRPO's groups among them
CHOICES: Mapping[str, Choice] = {  # that a verdict ranks, in batches as the evidence has them
    choice.name: choice
    for choice in (
        *(Choice("grpo", 1, n).with_rollouts(BATCH) for n in (2, 4, 8, 16)),
        *(Choice(recipe, 1, 1).with_rollouts(BATCH) for recipe in ("reinforce", "raft", "foresight")),
    )
}


def mix_of(choice: Choice) -> dict[str, float]:
    """Methods that were run → weights, of sum 1: a size of GRPO's groups lies between its neighbours, in log n.

    Beyond the sizes that were run the nearest stands.

    Raises:
        ValueError: a choice that there is no evidence on.
    """
    if choice.recipe != "grpo":
        if choice.name not in CHOICES:
            raise ValueError(
                f"there is no evidence on {choice.words}; there is on {', '.join(CHOICES)}, and other n for grpo"
            )
        return {choice.name: 1.0}
    if choice.n < 2:
        raise ValueError(f"GRPO needs groups of 2 at least, got n = {choice.n}; reinforce is for single rollouts")
    n = min(choice.n, SIZES[-1])
    below, above = max(size for size in SIZES if size <= n), min(size for size in SIZES if size >= n)
    share = 0.0 if above == below else log2(n / below) / log2(above / below)
    return {f"grpo_n{below}": 1 - share} | ({f"grpo_n{above}": share} if share else {})
