"""What the core's tests share: a tiny driver that answers orders from a table of rewards."""

from dataclasses import dataclass, field

import pytest

from rollalloc import Allocator
from rollalloc.core.events import Actions, Done, Failed
from updates import update


@dataclass
class Driver:
    """Answers each order in full: the g-th rollout of a prompt gets `rewards[prompt][g]`, cyclically; None is no score."""

    allocator: Allocator
    rewards: dict[int, list[float]] = field(default_factory=dict)
    default: tuple[float, ...] = (1.0, 0.0)
    seen: dict[int, int] = field(default_factory=dict)
    log: list[Actions] = field(default_factory=list)

    def ask(self, capacity=None):
        self.log.append(self.allocator.ask(capacity))
        return self.log[-1]

    def results(self, orders, version=None):
        """The Done of every rollout of these orders."""
        version = self.allocator.version if version is None else version
        events = []
        for order in orders:
            values = self.rewards.get(order.prompt, self.default)
            for rollout in order.rollouts:
                index = self.seen[order.prompt] = self.seen.get(order.prompt, -1) + 1
                value = values[index % len(values)]
                if value is None:
                    events.append(Failed(rollout, "no score", 10))
                else:
                    events.append(Done(rollout, float(value), float(value), 10, version))
        return events

    def answer(self, orders, version=None):
        self.allocator.tell(self.results(orders, version))

    def update(self):
        update(self.allocator)

    def until_batch(self, limit=1000):
        """Ask and answer until a batch or the end; returns those actions."""
        for _ in range(limit):
            actions = self.ask()
            if actions.batch is not None or actions.finished is not None:
                return actions
            self.answer(actions.generate)
        raise AssertionError(f"neither a batch nor an end in {limit} rounds")

    def until_end(self, limit=1000):
        """Train batch after batch; returns the reason for the end."""
        for _ in range(limit):
            actions = self.until_batch()
            if actions.finished is not None:
                return actions.finished
            self.update()
        raise AssertionError(f"no end in {limit} batches")


@pytest.fixture
def drive():
    """A driver for a recipe: `drive(recipe, prompts, rewards, seed=0)`."""

    def make(recipe, prompts=100, rewards=None, *, default=(1.0, 0.0), seed=0):
        return Driver(Allocator(recipe, prompts, seed), dict(rewards or {}), default)

    return make
