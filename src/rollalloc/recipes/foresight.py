"""Foresight: the success rate of a prompt is predicted before any rollout is paid for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompt_pool import NEXT_EPOCH, NOW
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import Drawn, Memory, PromptRule, PromptTraits, View
from rollalloc.core.table import PromptTable
from rollalloc.predict import quality
from rollalloc.predict.predictor import Predictor
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, judges
from rollalloc.rules.prompts import rises, some_free, without_replacement


@sized
def foresight(
    groups: int = 32,
    n: int = 1,
    exponent: float | None = 3.0,
    neg: float | None = None,
    floor: float = 0.1,
    once: bool = True,
    replay: int = 0,
    replay_staleness: int = 12,
) -> Recipe:
    """Foresight: each prompt's success rate is predicted before it is paid for; it is the baseline, and says what to draw.

        prompts drawn ∝ p̂(1 - p̂)^exponent, `floor` of them uniformly;  A = r - b(p̂), times neg where that is below 0

    Ours; see docs/foresight.md. What the predictor knows are the table's features, each prompt's own record, and the mean.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        exponent: the larger, the more hard prompts; None: drawn uniformly, once an epoch, only the baseline is predicted.
        neg: as for `reinforce`.
        floor: share of uniform draws, in [0, 1].
        once: no prompt is drawn a second time before all were; False: each may come again at once.
        replay: rows of earlier batches, of rollouts that did better than expected, trained on again in each batch, at most.
        replay_staleness: updates of the weights after which they are not, at least 1.
    """
    base = grpo(groups, n, replay=replay, replay_staleness=replay_staleness)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NEXT_EPOCH if once or exponent is None else NOW)),),
        prompts=Foresight(exponent, floor),
        advantage=advantages.Rewards(),
        over_batch=advantages.BatchMean(neg),
    )


_LEAST_RATE = 0.01  # a rate is not believed to be nearer to 0 or 1 than this where it decides what is drawn


@dataclass(frozen=True, slots=True)
class Foresight(PromptRule):
    """A success rate predicted for each prompt before a rollout of it is paid for, and prompts drawn where one teaches most.

        drawn with probability ∝ (1 - floor) · p̂(1 - p̂)^exponent + floor · uniform, without replacement
        baseline  b = c + s · p̂,  c and s the least of Σ (r_i - c - s · m_i)² + c² + (s - 1)² over all rollouts so far

    p̂ is `Predictor`'s: from the table's features, each prompt's own record and the running mean. Where there are no
    features, prompts without a record are all expected to do as well as the mean.

    Attributes:
        exponent: 1 favours prompts of much variance, more of it hard ones; None: every prompt is as likely, and only
            the baseline is predicted.
        floor: share of the draws that is uniform, in [0, 1].
        pool: candidates for each prompt drawn, at least 1; only for them a rate is predicted.
        warm: rollouts before which every prompt is as likely, 0 or more.
        predictor: predicts.

    Raises:
        ValueError: a value out of its range.
    """

    exponent: float | None = 3.0
    floor: float = 0.1
    pool: int = 16
    warm: int = 256
    predictor: Predictor = field(default_factory=Predictor)

    def __post_init__(self) -> None:
        at_least("pool", self.pool, 1)
        at_least("warm", self.warm, 0)
        if not 0 <= self.floor <= 1 or not (self.exponent is None or 0 <= self.exponent < inf):
            raise ValueError(f"expected a floor in [0, 1] and an exponent of 0 or more, or None, got {self}")

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(predicts=True, reads_rate=True, reads_features=True, reads=("rewards_G", "metrics_G"))

    def init(self, table: PromptTable) -> Memory:
        # Sums over all rollouts for the line from metric m to what reward r has beyond it: 1, m, m², r - m, m(r - m).
        made = self.predictor.init(len(table), table.widths, table.prior_N)
        return made | {"line": [0.0] * 5}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        features = view.table.features
        if self.predictor.due(memory):
            self.predictor.refit(memory, features)
        selects = self.exponent is not None and memory["paid"] >= self.warm
        pool = some_free(free_N, self.pool * k if selects else k, rng)
        if not pool.size:
            return []
        belief_K = self.predictor(memory, features, pool)
        chance_K = self.chances(belief_K) if selects else _uniform(pool.size)
        at = without_replacement(chance_K, k, rng)
        offset, slope = _line(memory["line"])
        odds_K = chance_K * pool.size
        return [
            Drawn(int(pool[i]), float(belief_K[i]), offset + slope * float(belief_K[i]), float(odds_K[i])) for i in at
        ]

    def chances(self, belief_K: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probability of drawing each candidate first, shape (K,), sum 1."""
        if self.exponent is None:
            return _uniform(belief_K.size)
        rate_K = np.clip(belief_K, _LEAST_RATE, 1 - _LEAST_RATE)
        log_K = np.log(rate_K) + self.exponent * np.log1p(-rate_K)
        score_K = np.exp(log_K - log_K.max())  # however large the exponent, the best has 1
        share_K = (1 - self.floor) * score_K / score_K.sum() + self.floor / belief_K.size
        return np.maximum(share_K, np.finfo(np.float64).tiny)

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if not group.scored:
            return
        metrics_G, over_G = group.metrics_G, group.rewards_G - group.metrics_G
        hits = min(max(float(metrics_G.sum()), 0.0), float(group.scored))
        predicted = group.predicted  # another rule's, where the recipe was changed meanwhile, may be 0 or 1
        predicted = None if predicted is None else min(max(predicted, quality.LEAST), 1 - quality.LEAST)
        self.predictor.observe(memory, group.prompt, predicted, hits, group.scored)
        sums = (group.scored, metrics_G.sum(), metrics_G @ metrics_G, over_G.sum(), metrics_G @ over_G)
        memory["line"] = [before + float(more) for before, more in zip(memory["line"], sums, strict=True)]

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """The memory for another data set; features of the same names and widths must be made by the same means."""
        return self.predictor.remap(memory, source_N, table.widths, table.prior_N)

    def figures(self, memory: Memory) -> dict[str, float]:
        """What the predictions were worth, see `Predictor.figures`."""
        return self.predictor.figures(memory)

    def promises(
        self, picked: Sequence[Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        free = int(np.count_nonzero(free_N))
        count, of_m, of_mm, of_d, of_md = before["line"]
        offset, slope = np.linalg.solve([[count + 1, of_m], [of_m, of_mm + 1]], [of_d, of_md])
        scale = 1e-6 * (1 + abs(offset) + abs(slope))
        return {
            "as many as asked, or all that are free": len(picked) == min(k, free),
            "a success rate is expected of each, and the reward that goes with it": all(
                each.predicted is not None
                and abs((each.baseline or 0.0) - (offset + each.predicted + slope * each.predicted)) < scale
                for each in picked
            ),
            "the more it may teach, the likelier it is drawn": self.exponent is None
            or rises(picked, [_score(each.predicted or 0.0, self.exponent) for each in picked]),
        }


def _uniform(count: int) -> NDArray[np.float64]:
    return np.full(count, 1 / count)


def _score(predicted: float, exponent: float) -> float:
    rate = min(max(predicted, _LEAST_RATE), 1 - _LEAST_RATE)
    return float(np.log(rate) + exponent * np.log1p(-rate))


def _line(sums: Sequence[float]) -> tuple[float, float]:
    """Offset and slope of reward over metric: the identity, and what least squares, drawn to it, find beyond it."""
    count, of_m, of_mm, of_d, of_md = sums
    weight = count + 1.0
    slope = (weight * of_md - of_m * of_d) / (weight * (of_mm + 1.0) - of_m * of_m)
    return (of_d - slope * of_m) / weight, 1 + slope
