"""SPO, arXiv 2509.13232: track the success rate of each prompt and use it as the prompt's baseline.

For runs with one rollout per prompt. The record of earlier visits takes the place of other rollouts of the prompt.

How this differs from the paper: the tracked rate starts at the table's prior rate or 1/2. (The paper first generates
rollouts of every prompt.) The distance that the weights moved is the sum of the updates' KL divergences. Prompts are
drawn from a random pool of candidates. The tracker learns from the metric. See PAPERS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import NOW, PromptTable
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import Drawn, Memory, PromptRule, PromptTraits, View
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.reinforce import shape
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, judges
from rollalloc.rules.prompts import prior_counts, rises, some_free, without_replacement


@sized(shape)
def spo(groups: int = 32, n: int = 1, half_way: float = 0.06, spread: float = 0.05) -> Recipe:
    """SPO: each prompt's tracked success rate is its baseline; advantages are normalised per batch. arXiv 2509.13232.

        a_i = r_i - v,  A_i = (a_i - mean of a) / std of a over the batch;  v: the prompt's tracked success rate

    1. Draw `groups` prompts with probability ∝ √(v(1 - v)) + spread, and generate n rollouts of each.
    2. Subtract the prompt's v from each reward. v does not depend on these rollouts.
    3. Normalise the advantages over the batch, and train on all rollouts.
    4. Update v of these prompts. Earlier rollouts lose more weight if the policy has moved more since the last visit.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        half_way: KL divergence, in nats per token, after which half of a prompt's record is forgotten; above 0.
        spread: constant in the draw's probability, above 0; larger values draw more uniformly.
    """
    base = grpo(groups, n)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NOW)),),
        prompts=Tracker(half_way=half_way, spread=spread),
        advantage=advantages.AgainstBaseline(),
        over_batch=advantages.BatchNormalised(),
    )


@dataclass(frozen=True, slots=True)
class Tracker(PromptRule):
    """Track a success rate of each prompt, forget old rollouts as the weights move, and prefer uncertain prompts.

        v = α / (α + β);  after a rollout with metric m:  α ← ρα + m,  β ← ρβ + 1 - m
        ρ = 2^(-D / half_way), clipped to [least, most];  D: KL divergence of the updates since the prompt's last visit
        drawn with probability ∝ √(v(1 - v)) + spread

    This is the "KL-adaptive value tracker" with prioritised sampling of SPO, arXiv 2509.13232. Before the first visit,
    α + β is 1 / (1 - least), and v is the table's prior rate or 1/2. If updates report no KL divergence, ρ is `least`. From
    the second rollout of a visit on, ρ is `most`, because the weights have not moved. v predicts the metric and is the
    baseline of the reward. In the paper, metric and reward are the same number.

    Attributes:
        half_way: KL divergence, in nats per token, at which half of a record is forgotten; above 0.
        least: smallest value of ρ, in (0, 1).
        most: largest value of ρ, in [least, 1).
        spread: constant in the draw's probability, above 0.
        pool: number of candidates for each prompt that is drawn, at least 1.

    Raises:
        ValueError: a value is out of its range.
    """

    half_way: float = 0.06
    least: float = 0.875
    most: float = 0.96
    spread: float = 0.05
    pool: int = 16

    def __post_init__(self) -> None:
        at_least("pool", self.pool, 1)
        if not (0 < self.half_way < inf and 0 < self.least <= self.most < 1 and 0 < self.spread < inf):
            raise ValueError(f"expected half_way and spread above 0 and 0 < least <= most < 1, got {self}")

    traits = PromptTraits(predicts=True, reads_rate=True, reads_kl=True, reads=("metrics_G",), gives_baseline=True)

    def init(self, table: PromptTable) -> Memory:
        hits_N, misses_N = prior_counts(table, 1 / (1 - self.least))
        return {
            "hits_N": hits_N.astype(np.float32),
            "misses_N": misses_N.astype(np.float32),
            "kl_N": np.zeros(len(table), np.float32),
        }

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        pool = some_free(free_N, self.pool * k, rng)
        rate_K = self._rates(memory, pool)
        chance_K = np.sqrt(rate_K * (1 - rate_K)) + self.spread
        at = without_replacement(chance_K, k, rng)
        odds_K = chance_K / chance_K.sum() * chance_K.size
        return [Drawn(int(pool[i]), float(rate_K[i]), float(rate_K[i]), float(odds_K[i])) for i in at]

    @staticmethod
    def _rates(memory: Memory, prompts_K: NDArray[np.int64]) -> NDArray[np.float64]:
        hits_K, misses_K = memory["hits_N"][prompts_K], memory["misses_N"][prompts_K]
        return (hits_K / (hits_K + misses_K)).astype(np.float64)

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if not group.scored:  # keep `kl_N`: the next visit measures the distance from the last scored visit
            return
        prompt, hits_N, misses_N = group.prompt, memory["hits_N"], memory["misses_N"]
        moved = max(0.0, view.kl_sum - float(memory["kl_N"][prompt]))  # rounding to float32 may have increased `kl_N`
        memory["kl_N"][prompt] = view.kl_sum
        kept = min(self.most, max(self.least, 2 ** (-moved / self.half_way))) if view.kl_sum else self.least
        for metric in np.clip(group.metrics_G, 0, 1).tolist():
            hits_N[prompt] = kept * hits_N[prompt] + metric
            misses_N[prompt] = kept * misses_N[prompt] + 1 - metric
            kept = self.most

    def promises(
        self, picked: Sequence[Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        free = int(np.count_nonzero(free_N))
        hits, misses = ([float(before[name][each.prompt]) for each in picked] for name in ("hits_N", "misses_N"))
        return {
            "as many as asked, or all free prompts": len(picked) == min(k, free),
            "each prediction is the tracked success rate": all(
                abs((each.predicted or 0.0) - hit / (hit + missed)) < 1e-6 and each.baseline == each.predicted
                for each, hit, missed in zip(picked, hits, misses, strict=True)
            ),
            "prompts with a less certain outcome are drawn with a higher probability": rises(
                picked, [-abs((each.predicted or 0.0) - 0.5) for each in picked]
            ),
        }
