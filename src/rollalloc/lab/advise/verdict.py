"""The verdict: which recipe to train with, what it would save, and when it would be otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


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

    def with_rollouts(self, rollouts: int) -> Choice:
        """The same in batches of about so many rollouts."""
        return replace(self, groups=max(1, round(rollouts / self.n)))


CHOICES: Mapping[str, Choice] = {  # that a verdict ranks, in the batches of 64 that the evidence is of
    choice.name: choice
    for choice in (
        *(Choice("grpo", 64 // n, n) for n in (2, 4, 8, 16)),
        *(Choice(recipe, 64, 1) for recipe in ("reinforce", "raft", "foresight")),
    )
}


@dataclass(frozen=True, slots=True)
class Ranked:
    """A row of the verdict's table.

    Attributes:
        choice: in batches as large as the present ones.
        saving: rollouts to equal learning under the present setting over those under this one, expected; above 1 it is
            cheaper.
        interval: of the saving, 80%, between tasks and seeds.
        ruled_out: why it must not be used here; empty: it may be.
        why: what speaks for or against it on these prompts, in one sentence.
    """

    choice: Choice
    saving: float
    interval: tuple[float, float]
    ruled_out: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do.

    Attributes:
        kind: go over to another recipe, keep the present one, or sample more first.
        sentence: the verdict in words.
        choice: what to train with; None where it is too early to tell.
        present: the setting that savings are over.
        ranked: best first; what is ruled out comes last.
        otherwise: when it would be otherwise, in sentences.
        notes: what a reader should know of the evidence and of these prompts, in sentences.
        more: rollouts to sample before one can tell; 0: none.
    """

    kind: Literal["switch", "keep", "too few"]
    sentence: str
    choice: Choice | None
    present: Choice
    ranked: tuple[Ranked, ...]
    otherwise: tuple[str, ...]
    notes: tuple[str, ...]
    more: int = 0
