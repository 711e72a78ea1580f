"""Prompt rules that say, when they draw a prompt, what they expect of it: a baseline that costs no rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import at_least
from rollalloc.core.rule import Drawn, Memory, PromptRule, PromptTraits, View
from rollalloc.core.table import PromptTable
from rollalloc.predict import quality
from rollalloc.predict.predictor import Predictor
from rollalloc.rules.prompts import Shuffled, prior_counts, some_free

_UNKNOWN = -1.0  # the rate of a prompt of which nothing is known
_LEAST_RATE = 0.01  # a rate is not believed to be nearer to 0 or 1 than this where it decides what is drawn


@dataclass(frozen=True, slots=True)
class RunningMean(PromptRule):
    """Every prompt once an epoch, in random order; the baseline of each is the running mean of all rewards.

        b = Σ w_i r_i / Σ w_i,  w_i = 2^(-rollouts since / half_life)

    REINFORCE's oldest baseline (Williams 1992). None before the first reward.

    Attributes:
        half_life: rollouts after which a reward counts half, above 0.
        order: draws the prompts.

    Raises:
        ValueError: a half-life that is not above 0.
    """

    half_life: float = 500.0
    order: Shuffled = field(default_factory=Shuffled)

    def __post_init__(self) -> None:
        if not 0 < self.half_life < inf:
            raise ValueError(f"half_life must be above 0 and finite, got {self.half_life!r}")

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(reads=("rewards_G",))

    def init(self, table: PromptTable) -> Memory:
        return self.order.init(table) | {"reward_sum": 0.0, "reward_count": 0.0}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        mean = memory["reward_sum"] / memory["reward_count"] if memory["reward_count"] else None
        return [Drawn(prompt, baseline=mean) for prompt in self.order.pick(memory, k, free_N, view, rng)]

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        kept = 0.5 ** (group.scored / self.half_life)
        memory["reward_sum"] = kept * memory["reward_sum"] + float(group.rewards_G.sum())
        memory["reward_count"] = kept * memory["reward_count"] + group.scored

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """The memory for another data set: a new order, and the same mean."""
        return self.init(table) | {name: memory[name] for name in ("reward_sum", "reward_count")}

    def promises(
        self, picked: Sequence[Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        total, count = before["reward_sum"], before["reward_count"]
        promised = self.order.promises([each.prompt for each in picked], before, k, free_N, view)
        return promised | {
            "the baseline is the mean of the rewards so far, and none before the first": all(
                each.baseline is None
                if not count
                else abs((each.baseline or 0.0) * count - total) <= 1e-9 * (1 + abs(total))
                for each in picked
            )
        }


@dataclass(frozen=True, slots=True)
class LastVisit(PromptRule):
    """Every prompt once an epoch, in random order; its mean metric at its last visit is what is expected of it.

    Nothing before the first visit, but for the table's prior; a visit without a score changes nothing. What Knapsack RL
    allocates by, arXiv 2509.25849.

    Attributes:
        order: draws the prompts.
    """

    order: Shuffled = field(default_factory=Shuffled)

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(reads_rate=True, reads=("metrics_G",))

    def init(self, table: PromptTable) -> Memory:
        prior_N = np.full(len(table), np.nan) if table.prior_N is None else np.asarray(table.prior_N)
        return self.order.init(table) | {"rate_N": np.where(np.isnan(prior_N), _UNKNOWN, prior_N).astype(np.float32)}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        picked = self.order.pick(memory, k, free_N, view, rng)
        rates: list[float] = memory["rate_N"][picked].tolist()
        return [Drawn(prompt, None if rate < 0 else rate) for prompt, rate in zip(picked, rates, strict=True)]

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if group.scored:
            memory["rate_N"][group.prompt] = min(max(float(group.metrics_G.mean()), 0.0), 1.0)

    def promises(
        self, picked: Sequence[Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        expected = [float(before["rate_N"][each.prompt]) for each in picked]
        return self.order.promises([each.prompt for each in picked], before, k, free_N, view) | {
            "what is expected of each is how its last visit went, and nothing before the first": all(
                rate < 0 if each.predicted is None else abs(each.predicted - rate) < 1e-6
                for each, rate in zip(picked, expected, strict=True)
            )
        }


@dataclass(frozen=True, slots=True)
class Tracker(PromptRule):
    """A success rate tracked for each prompt, forgotten as the weights move, and prompts drawn where it is least certain.

        v = α / (α + β);  after a rollout of metric r:  α ← ρα + r,  β ← ρβ + 1 - r
        ρ = 2^(-D / half_way), kept in [least, most];  D: how far the weights moved since the prompt's last visit
        drawn with probability ∝ √(v(1 - v)) + spread

    SPO, arXiv 2509.13232: its "KL-adaptive value tracker" and prioritised sampling. Before its first visit α + β is
    1 / (1 - least), with the table's prior for v, or 1/2, and what it counts for beside (`prior_counts`): the paper rolls
    every prompt out first. Where `Updated` never
    told how far the weights moved, ρ is `least`. Nothing moves between the rollouts of a visit: ρ is `most` from the
    second on. v is expected of the metric and of the reward alike, as in the paper, where both are one number.

    Attributes:
        half_way: divergence, in nats per token, at which half is forgotten; above 0.
        least: lowest ρ, in (0, 1).
        most: highest ρ, in [least, 1).
        spread: share of every prompt in the draw, above 0.
        pool: candidates for each prompt drawn, at least 1.

    Raises:
        ValueError: a value out of its range.
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

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(predicts=True, reads_rate=True, reads_kl=True, reads=("metrics_G",))

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
        at = _without_replacement(chance_K, k, rng)
        odds_K = chance_K / chance_K.sum() * chance_K.size
        return [Drawn(int(pool[i]), float(rate_K[i]), float(rate_K[i]), float(odds_K[i])) for i in at]

    @staticmethod
    def _rates(memory: Memory, prompts_K: NDArray[np.int64]) -> NDArray[np.float64]:
        hits_K, misses_K = memory["hits_N"][prompts_K], memory["misses_N"][prompts_K]
        return (hits_K / (hits_K + misses_K)).astype(np.float64)

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if not group.scored:  # what the weights moved since the last visit is still to be forgotten
            return
        prompt, hits_N, misses_N = group.prompt, memory["hits_N"], memory["misses_N"]
        moved = max(0.0, view.kl_sum - float(memory["kl_N"][prompt]))  # which was rounded, up perhaps
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
        return {
            "as many as asked, or all that are free": len(picked) == min(k, free),
            "each is expected to do as its record says": all(
                abs((each.predicted or 0.0) - before["hits_N"][each.prompt] / _weight(before, each.prompt)) < 1e-6
                and each.baseline == each.predicted
                for each in picked
            ),
            "the less certain it is, the likelier it is drawn": _rises(
                picked, [-abs((each.predicted or 0.0) - 0.5) for each in picked]
            ),
        }


def _weight(memory: Memory, prompt: int) -> float:
    return float(memory["hits_N"][prompt]) + float(memory["misses_N"][prompt])


def _rises(picked: Sequence[Drawn], score_K: Sequence[float]) -> bool:
    """Whether of two that were drawn together the one of higher score had no smaller sampling_ratio."""
    chance_K = np.array([each.sampling_ratio or 0.0 for each in picked])[np.argsort(score_K, kind="stable")]
    return bool((np.diff(chance_K) >= -1e-6).all() and (chance_K > 0).all())


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
        at = _without_replacement(chance_K, k, rng)
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
            or _rises(picked, [_score(each.predicted or 0.0, self.exponent) for each in picked]),
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


def _without_replacement(chance_K: NDArray[np.float64], k: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """At most k indices, one after the other by their chances among those left (Gumbel's trick), in order of their draw."""
    key_K = np.log(chance_K) + rng.gumbel(size=chance_K.size)
    return np.argsort(-key_K, kind="stable")[:k]
