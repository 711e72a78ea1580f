"""A change of `recipes.reinforce` that benchmarks/against_trl.py tried. It gained nothing and is not in the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollalloc import Recipe, recipes
from rollalloc.core.group import GroupView
from rollalloc.core.prompt_pool import NOW
from rollalloc.core.rule import Drawn, Memory, PromptTraits, View
from rollalloc.core.table import PromptTable
from rollalloc.rules import judges
from rollalloc.rules.prompts import Shuffled


@dataclass(frozen=True, slots=True)
class FailedAgain(Shuffled):
    """Draw each prompt once an epoch, and prompts that failed once more, oldest failure first.

    Kimi k1.5 (arXiv 2501.12599) samples prompts in proportion to 1 - success rate.

    Attributes:
        share: largest share of a draw that is of failed prompts.
        classes: the baseline is the running mean reward of first visits, or of later ones; otherwise there is none.
        half_life: rollouts after which the weight of a reward in that mean has halved.
    """

    share: float = 0.5
    classes: bool = False
    half_life: float = 250.0

    traits = PromptTraits(reads=("rewards_G", "metrics_G"), reads_rate=True)

    def init(self, table: PromptTable) -> Memory:
        return Shuffled.init(self, table) | {
            "failed": [],
            "again_N": np.zeros(len(table), np.bool_),
            "sums": [0.0, 0.0],
            "counts": [0.0, 0.0],
        }

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        most = int(self.share * k)
        failed = [prompt for prompt in memory["failed"] if free_N[prompt]][:most]
        memory["failed"] = [prompt for prompt in memory["failed"] if prompt not in failed]
        fresh = self.beside(failed, memory, k - len(failed), free_N, rng)
        memory["again_N"][failed] = True
        memory["again_N"][fresh] = False
        return [Drawn(prompt, baseline=self._expected(memory, prompt)) for prompt in [*failed, *fresh]]

    def _expected(self, memory: Memory, prompt: int) -> float | None:
        kind = int(memory["again_N"][prompt])
        count = memory["counts"][kind]
        return memory["sums"][kind] / count if self.classes and count > 0 else None

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if not group.scored:
            return
        kind, kept = int(memory["again_N"][group.prompt]), 0.5 ** (group.scored / self.half_life)
        for name, more in (("sums", float(group.rewards_G.sum())), ("counts", float(group.scored))):
            memory[name] = [kept * old + more if at == kind else old for at, old in enumerate(memory[name])]
        if not kind and group.metrics_G.mean() < 0.5 and group.prompt not in memory["failed"]:
            memory["failed"] = [*memory["failed"], group.prompt]


def failed_again(groups: int, classes: bool = False) -> Recipe:
    """REINFORCE that draws each prompt that failed once more."""
    base = recipes.reinforce(groups)
    stage = replace(base.stages[0], judge=judges.Complete(NOW))
    return replace(base, stages=(stage,), prompts=FailedAgain(classes=classes))
