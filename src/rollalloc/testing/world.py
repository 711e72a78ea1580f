"""The simulated world: it decides the results of rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from random import Random

from rollalloc.core.events import Done, Failed

_RATES = (0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0)
_STOPPING = 0.01  # probability that a token is the last one of its rollout


@dataclass(frozen=True)
class World:
    """Decides the result of a rollout, as a pure function of (seed, prompt, rollout).

    The reward has a random part, so it differs from the metric, and a failure may have a larger reward than a success. For
    every third prompt, the reward is a function of the metric, so that groups with equal rewards occur too.

    Attributes:
        seed: seed of the world.
        hard: whether every prompt has a success rate of 1/2, so that metrics vary as much as possible.
        limit: number of tokens at which a rollout is truncated.
        failing: a number k. All rollouts of every k-th prompt fail. If k is 0, no rollout fails.
        rewards: the lowest and the highest reward. Metrics are in [0, 1].
    """

    seed: int
    hard: bool = False
    limit: int = 300
    failing: int = 0
    rewards: tuple[float, float] = (-1.5, 1.0)

    def end(
        self, rollout: int, prompt: int, version: int, last_version: int, limit: int | None = None
    ) -> Done | Failed:
        """The terminal event of a rollout that began at `version` and ended at `last_version`. One that its order's limit
        stops is wrong.
        """
        if self.failing and prompt % self.failing == 0:
            return Failed(rollout, "simulated", 3)
        rate = 0.5 if self.hard else self._draws(1, prompt).choice(_RATES)
        draws = self._draws(2, rollout)
        metric = float(draws.random() < rate)
        tokens = min(1 + int(log(1 - draws.random()) / log(1 - _STOPPING)), self.limit)
        truncated = tokens == self.limit
        if limit is not None and tokens > limit:
            tokens, metric, truncated = limit, 0.0, True
        own = draws.choice((0.0, 0.25, 0.75, 1.0)) if prompt % 3 else metric
        low, high = self.rewards
        reward = low + (high - low) * (0.4 * metric + 0.6 * own)
        uncertainty = tokens * draws.random() if draws.random() < 0.99 else None
        return Done(rollout, reward, metric, tokens, version, last_version, truncated, uncertainty)

    def _draws(self, purpose: int, number: int) -> Random:
        return Random((self.seed << 96) | (purpose << 64) | number)
