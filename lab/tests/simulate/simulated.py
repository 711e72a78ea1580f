"""Worlds whose rollouts are given by hand, and costs that leave only what a test is about."""

from collections.abc import Sequence
from typing import Any, Self

from rollalloc_lab.simulate.cost import Costs
from rollalloc_lab.simulate.workload import SimulatedOutcome

FREE = Costs(prefill=0.0, abort=0.0, weight_sync=0.0, logprob=0.0, train=0.0, train_row=0.0, update=0.0)


class Given:
    """Rollouts of given lengths, by their ids; after the last one the first again. It is its own only world."""

    prompts = 64

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    @property
    def longest(self) -> int:
        return max(self.tokens)

    def world(self, seed: int) -> Self:
        return self

    def describe(self) -> dict[str, Any]:
        return {"source": "a test", "prompts": self.prompts}

    def outcome(self, prompt: int, rollout: int) -> SimulatedOutcome:
        return SimulatedOutcome(self.tokens[rollout % len(self.tokens)], False, rollout % 2 == 0)
