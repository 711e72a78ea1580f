"""MoPPS, arXiv 2507.04632: draw prompts whose success rate is near one half, by a posterior of each prompt's rate.

For runs in which many prompts are too easy or too hard. The method avoids such prompts without generating rollouts.

How this differs from the released code: candidates are drawn at random from all free prompts instead of from a data
loader. The prior comes from the table's prior rates, if known. With one rollout per prompt, the code differs from the
formula in the paper; we follow the paper. See PAPERS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import NOW, PromptTable
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import Memory, PromptRule, PromptTraits, View
from rollalloc.recipes.grpo import grpo, shape
from rollalloc.recipes.shapes import sized
from rollalloc.rules import judges
from rollalloc.rules.prompts import prior_counts, prior_rate, some_free


@sized(shape)
def mopps(groups: int = 16, n: int = 4, target: float = 0.5, decay: float = 0.5, pool: int = 8) -> Recipe:
    """MoPPS: draw the prompts whose success rate, sampled from a posterior, is nearest to a target. arXiv 2507.04632.

        rate ~ Beta(α, β);  after s successes in n rollouts  α ← λα + (1 - λ)α₀ + s,  β ← λβ + (1 - λ)β₀ + n - s

    1. For each prompt of the batch, take `pool` random candidates.
    2. Sample a success rate of each candidate from its posterior Beta(α, β).
    3. Draw the `groups` candidates whose sampled rates are nearest to `target`, and generate n rollouts of each.
    4. Train as GRPO does, and update α and β of these prompts.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, as in `grpo`.
        target: the success rate to look for, in (0, 1).
        decay: λ in [0, 1]. At every visit, earlier counts are multiplied by λ. 1: nothing is forgotten.
        pool: random candidates for each prompt that is drawn, at least 1.
    """
    base = grpo(groups, n)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NOW)),),
        prompts=Posterior(target=target, decay=decay, pool=pool),
    )


# To make posteriors sharp, `promises` multiplies counts by _SURE, on data sets of at most _MOST_SURE prompts.
_SURE, _MOST_SURE = 1e7, 10_000


@dataclass(frozen=True, slots=True)
class Posterior(PromptRule):
    """Thompson sampling: draw the candidates whose rates, sampled from Beta posteriors, are nearest to a target.

    After a visit with s successes in n rollouts, α ← λα + (1 - λ)α₀ + s and β ← λβ + (1 - λ)β₀ + n - s. The prior α₀, β₀
    comes from the table's prior rates and has the weight of `prior_weight` rollouts. MoPPS, arXiv 2507.04632; see PAPERS.md.

    Attributes:
        target: the success rate to look for, in (0, 1).
        decay: λ in [0, 1]. At every visit, earlier counts are multiplied by λ.
        pool: number of random free candidates for each prompt that is drawn, at least 1.
        prior_weight: weight of the prior, as a number of rollouts; above 0.
    """

    target: float = 0.5
    decay: float = 0.5
    pool: int = 16
    prior_weight: float = 2.0

    def __post_init__(self) -> None:
        at_least("pool", self.pool, 1)
        if not (0 < self.target < 1 and 0 <= self.decay <= 1 and self.prior_weight > 0):
            raise ValueError(f"expected target in (0, 1), decay in [0, 1] and prior_weight above 0, got {self}")

    traits = PromptTraits(reads_rate=True, reads=("metrics_G",), gives_baseline=False)

    def init(self, table: PromptTable) -> Memory:
        hits_N, misses_N = prior_counts(table, self.prior_weight)
        # A prior of exactly 0 or 1 could not be changed by any evidence, so priors are moved away from 0 and 1.
        least_N = 0.02 * (hits_N + misses_N)
        return {
            "hits_N": (least_N + 0.96 * hits_N).astype(np.float32),
            "misses_N": (least_N + 0.96 * misses_N).astype(np.float32),
        }

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        pool = some_free(free_N, self.pool * k, rng)
        rate = rng.beta(memory["hits_N"][pool], memory["misses_N"][pool])
        return pool[np.argsort(np.abs(rate - self.target), kind="stable")[:k]].tolist()

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if not group.metrics_G.size:
            return
        hits_N, misses_N, prompt = memory["hits_N"], memory["misses_N"], group.prompt
        successes = float(group.metrics_G.sum())
        hits_0 = (0.02 + 0.96 * prior_rate(view.table, prompt)) * self.prior_weight  # as in `init`
        before, fresh = self.decay, 1 - self.decay
        hits_N[prompt] = before * hits_N[prompt] + fresh * hits_0 + max(0.0, successes)
        missed = max(0.0, group.metrics_G.size - successes)
        misses_N[prompt] = before * misses_N[prompt] + fresh * (self.prior_weight - hits_0) + missed

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        free = np.flatnonzero(free_N)
        promised = {"as many as asked, or all free prompts": len(picked) == min(k, free.size)}
        if free.size > _MOST_SURE or len(picked) == free.size:
            return promised
        # With sharp posteriors and all free prompts as candidates, the prompts nearest to the target must be drawn.
        sure = {name: before[name].astype(np.float64) * _SURE for name in ("hits_N", "misses_N")}
        every = replace(self, pool=free.size)
        nearest = every.pick(sure, k, free_N, view, np.random.Generator(np.random.Philox(0)))
        off_N = np.abs(before["hits_N"] / (before["hits_N"] + before["misses_N"]) - self.target)
        left = np.setdiff1d(free, nearest)
        return promised | {
            "with sharp posteriors, exactly the prompts nearest to the target are drawn": bool(
                not left.size or off_N[list(nearest)].max() <= off_N[left].min() + 0.01
            )
        }
