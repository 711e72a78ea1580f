"""Foresight: predict the success rate of each prompt before any rollout of it is generated.

For runs with many prompts. One rollout of each prompt is compared with a prediction instead of with other rollouts, so
every rollout gives a learning signal. Prompts from which the model can learn much are drawn more often.

This method is ours; docs/foresight.md explains it and has its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import NEXT_EPOCH, NOW, PromptTable
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import Drawn, Memory, PromptRule, PromptTraits, View
from rollalloc.predict import quality
from rollalloc.predict.predictor import Predictor
from rollalloc.recipes.grpo import grpo, replayed
from rollalloc.recipes.reinforce import shape
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, judges
from rollalloc.rules.prompts import rises, some_free, without_replacement


@sized(shape)
def foresight(
    groups: int = 32,
    n: int = 1,
    exponent: float | None = 3.0,
    neg: float | None = None,
    floor: float = 0.1,
    once: bool = True,
    replay: int = 0,
    replay_staleness: int = 12,
    replay_moved: float | None = None,
    replay_pause: int = 4,
) -> Recipe:
    """Foresight: predict success rates, to draw prompts and to compute baselines. docs/foresight.md.

        probability to draw a prompt  ∝  (1 - floor) · p̂(1 - p̂)^exponent + floor · uniform
        A = r - b(p̂),  multiplied by neg if it is negative

    1. Predict the success rate p̂ of candidate prompts from the table's features, from their earlier rollouts and from
       the mean metric of all rollouts.
    2. Draw `groups` prompts by the probability above, and generate n rollouts of each.
    3. Subtract the expected reward b(p̂) from each reward. Multiply negative advantages by `neg`.
    4. Train on all rollouts, and learn from their metrics to predict better.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        exponent: exponent of 1 - p̂ in the probability, 0 or more; larger values draw harder prompts. None: draw
            uniformly, each prompt once an epoch; only the baseline then uses the prediction.
        neg: weight of negative advantages, 0 or more. None: computed from each batch, see `reinforce`.
        floor: share of the draws that is uniform, in [0, 1].
        once: True: draw no prompt twice in an epoch. False: a prompt may be drawn again as soon as its visit has ended.
        replay: maximum number of rows of earlier batches to train on again in each batch; 0 or more. Only rollouts that
            did better than expected are replayed.
        replay_staleness: maximum age of a replayed rollout, in updates of the weights; at least 1.
        replay_moved: leave the replayed rows of a batch out if the policy has moved away from more than this share of
            their tokens, in [0, 1]; see docs/train.md. None: never.
        replay_pause: number of batches without replay after a batch whose replayed rows were left out; 0 or more.
    """
    base = replace(grpo(groups, n), replay=replayed(replay, replay_staleness, replay_moved, replay_pause))
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NEXT_EPOCH if once or exponent is None else NOW)),),
        prompts=Foresight(exponent, floor),
        advantage=advantages.Rewards(),
        over_batch=advantages.BatchMean(neg),
    )


_LEAST_RATE = 0.01  # for the probabilities of draws, predicted rates are clipped to [0.01, 0.99]


@dataclass(frozen=True, slots=True)
class Foresight(PromptRule):
    """Predict a success rate for each candidate prompt, and draw prompts by the prediction.

        probability of a draw  ∝  (1 - floor) · p̂(1 - p̂)^exponent + floor · uniform, without replacement
        baseline  b = c + s · p̂;  c and s minimise Σ (r_i - c - s · m_i)² + c² + (s - 1)² over all rollouts so far

    p̂ comes from `Predictor`, which reads the table's features, each prompt's own record and the running mean of all
    metrics. For a prompt without features and without a record, p̂ is the running mean. b converts a predicted metric
    into a predicted reward. If rewards equal metrics, b = p̂.

    Attributes:
        exponent: exponent of 1 - p̂ in the probability, 0 or more. 1: prompts are drawn in proportion to the variance of
            their outcomes. Larger values draw harder prompts. None: all prompts are equally likely, and only the baseline
            uses the prediction.
        floor: share of the draws that is uniform, in [0, 1].
        pool: number of candidates for each prompt that is drawn, at least 1. Rates are predicted only for candidates.
        warm: all prompts are equally likely until this number of rollouts has been scored; 0 or more.
        predictor: predicts the success rates.

    Raises:
        ValueError: a value is out of its range.
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
            raise ValueError(
                f"floor must be in [0, 1], got {self.floor}; and exponent must be None, or finite and 0 or more, got "
                f"{self.exponent}"
            )

    traits = PromptTraits(
        predicts=True, reads_rate=True, reads_features=True, reads=("rewards_G", "metrics_G"), gives_baseline=True
    )

    def init(self, table: PromptTable) -> Memory:
        # Sums over all rollouts of 1, m, m², r - m and m(r - m), for the regression of r - m on the metric m.
        made = self.predictor.init(len(table), table.widths, table.prior_N)
        return made | {"line": [0.0] * 5}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        features = view.table.features
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
        """The probability with which each candidate is drawn first, shape (K,), sum 1."""
        if self.exponent is None:
            return _uniform(belief_K.size)
        rate_K = np.clip(belief_K, _LEAST_RATE, 1 - _LEAST_RATE)
        log_K = np.log(rate_K) + self.exponent * np.log1p(-rate_K)
        score_K = np.exp(log_K - log_K.max())  # the largest score is 1, so that scores do not all underflow to 0
        share_K = (1 - self.floor) * score_K / score_K.sum() + self.floor / belief_K.size
        return np.maximum(share_K, np.finfo(np.float64).tiny)

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if not group.scored:
            return
        metrics_G, over_G = group.metrics_G, group.rewards_G - group.metrics_G
        hits = min(max(float(metrics_G.sum()), 0.0), float(group.scored))
        predicted = group.predicted  # may be 0 or 1 if another prompt rule drew the prompt, before a change of recipe
        predicted = None if predicted is None else min(max(predicted, quality.LEAST), 1 - quality.LEAST)
        self.predictor.observe(memory, group.prompt, predicted, hits, group.scored)
        sums = (group.scored, metrics_G.sum(), metrics_G @ metrics_G, over_G.sum(), metrics_G @ over_G)
        memory["line"] = [before + float(more) for before, more in zip(memory["line"], sums, strict=True)]

    def prepare(self, memory: Memory, view: View) -> None:
        if self.predictor.due(memory):
            self.predictor.refit(memory, view.table.features)

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """Return the memory for another data set. Features with the same name and width must have the same meaning."""
        return self.predictor.remap(memory, source_N, table.widths, table.prior_N)

    def figures(self, memory: Memory) -> dict[str, float]:
        """Return measures of the predictions, see `Predictor.figures`."""
        return self.predictor.figures(memory)

    def promises(
        self, picked: Sequence[Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        free = int(np.count_nonzero(free_N))
        count, of_m, of_mm, of_d, of_md = before["line"]
        offset, slope = np.linalg.solve([[count + 1, of_m], [of_m, of_mm + 1]], [of_d, of_md])
        scale = 1e-6 * (1 + abs(offset) + abs(slope))
        return {
            "as many as asked, or all free prompts": len(picked) == min(k, free),
            "each prompt has a predicted success rate, and the expected reward at this rate": all(
                each.predicted is not None
                and abs((each.baseline or 0.0) - (offset + each.predicted + slope * each.predicted)) < scale
                for each in picked
            ),
            "prompts with a higher score are drawn with a higher probability": self.exponent is None
            or rises(picked, [_score(each.predicted or 0.0, self.exponent) for each in picked]),
        }


def _uniform(count: int) -> NDArray[np.float64]:
    return np.full(count, 1 / count)


def _score(predicted: float, exponent: float) -> float:
    rate = min(max(predicted, _LEAST_RATE), 1 - _LEAST_RATE)
    return float(np.log(rate) + exponent * np.log1p(-rate))


def _line(sums: Sequence[float]) -> tuple[float, float]:
    """Return offset and slope of the regression of reward on metric. A penalty draws the line towards reward = metric."""
    count, of_m, of_mm, of_d, of_md = sums
    weight = count + 1.0
    slope = (weight * of_md - of_m * of_d) / (weight * (of_mm + 1.0) - of_m * of_m)
    return (of_d - slope * of_m) / weight, 1 + slope
