"""One run of the real allocator on logged outcomes.

A visit of a prompt draws its rollouts from one logged group of that prompt, without replacement, in random order. So pilots
are a random part of a group that really was, and where groups are large enough no model of the success rates stands in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.allocator import Allocator, NoProgress
from rollalloc.core.events import Done, Event, Failed, Order, Updated
from rollalloc.core.recipe import Recipe
from rollalloc.lab.waste.groups import Groups

_BATCHES = 6  # a run makes at least, if it can
_NO_ADVANTAGE = 1e-9  # an advantage of no more teaches nothing

Visits = Sequence[NDArray[np.int64]]  # of each prompt: indices of its logged groups


@dataclass(slots=True)
class Paid:
    """What was paid and trained between a run's first batch and its last, so that what is held for later is held at both
    ends; and of all that was ordered, what the log did not answer (see `forecast.Price`)."""

    rollouts: float = 0.0
    tokens: float = 0.0
    rows: int = 0
    ordered: int = 0
    again: int = 0
    guessed: int = 0

    def price(self, currency: str) -> float:
        """Of a row that teaches; infinite where there was none."""
        return getattr(self, currency) / self.rows if self.rows else np.inf


def replay(
    recipe: Recipe, groups: Groups, prompts: Visits, openings: int, random: np.random.Generator, paid: Paid
) -> None:
    """Run the allocator once and add up what it paid.

    Args:
        recipe: one that draws its prompts itself.
        groups: of the log.
        prompts: at least as many as a batch has groups.
        openings: visits to make, up to eight times as many where they give too few batches.
        random: shuffles.
        paid: added to.
    """
    allocator = Allocator(recipe, len(prompts), int(random.integers(1 << 31)))
    deck = _Deck(groups, prompts, random, paid)
    first = now = np.zeros(3)  # rollouts paid and no longer open, tokens, rows that teach
    batches = 0
    while deck.opened < openings or (batches < _BATCHES and deck.opened < 8 * openings):
        try:
            actions = allocator.ask()
        except NoProgress:  # every prompt failed too often, say
            break
        if actions.batch:
            accounts = allocator.accounts()
            settled = sum(accounts.values()) - accounts["open"]
            teaching = sum(abs(row.advantage) > _NO_ADVANTAGE and not row.replays for row in actions.batch.rows)
            now = np.array([settled, allocator.tokens_paid, now[2] + teaching])
            first = now if batches == 0 else first
            batches += 1
            allocator.tell([Updated(allocator.version + 1)])
        if actions.finished:
            break
        allocator.tell([event for order in actions.generate for event in deck.deal(order, allocator.version)])
    rollouts, tokens, rows = (now - first).tolist()
    paid.rollouts, paid.tokens, paid.rows = paid.rollouts + rollouts, paid.tokens + tokens, paid.rows + int(rows)


class _Deck:
    """Deals the outcomes of logged visits: those of one group of a prompt at each of its visits."""

    def __init__(self, groups: Groups, prompts: Visits, random: np.random.Generator, paid: Paid) -> None:
        self._groups, self._prompts, self._random, self._paid = groups, prompts, random, paid
        self._waiting: dict[int, list[int]] = {}  # by prompt: its groups that were not dealt yet
        self._left: dict[int, list[int]] = {}  # by the allocator's group: rollouts of the log
        self._rate: dict[int, float] = {}  # by the allocator's group, where its rollouts did not suffice
        self._again: set[int] = set()  # the allocator's groups that get what was dealt before
        self.opened = 0

    def deal(self, order: Order, version: int) -> list[Event]:
        """An event for each rollout ordered."""
        if order.group not in self._left:
            self._open(order)
        left = self._left[order.group]
        self._paid.ordered += len(order.rollouts)
        self._paid.again += min(len(left), len(order.rollouts)) if order.group in self._again else 0
        return [
            self._logged(rollout, left.pop(), version) if left else self._guessed(rollout, order, version)
            for rollout in order.rollouts
        ]

    def _open(self, order: Order) -> None:
        self.opened += 1
        waiting = self._waiting.get(order.prompt)
        if not waiting:
            if waiting is not None:
                self._again.add(order.group)
            waiting = self._waiting[order.prompt] = self._random.permutation(self._prompts[order.prompt]).tolist()
        self._left[order.group] = self._random.permutation(self._rollouts(waiting.pop())).tolist()

    def _rollouts(self, visit: int) -> NDArray[np.int64]:
        """Those of a logged group that were ordered before any result was known."""
        begin = int(self._groups.begin_V[visit])
        return np.arange(begin, begin + int(self._groups.first_V[visit]))

    def _logged(self, rollout: int, at: int, version: int) -> Event:
        reward = float(self._groups.rewards_R[at])
        tokens = max(0, int(self._groups.tokens_R[at]))
        if np.isnan(reward):
            return Failed(rollout, "unscored in the log", tokens)
        return Done(rollout, reward, min(max(reward, 0.0), 1.0), tokens, version)

    def _guessed(self, rollout: int, order: Order, version: int) -> Event:
        self._paid.guessed += 1
        at = np.concatenate([self._rollouts(visit) for visit in self._prompts[order.prompt].tolist()])
        rewards = self._groups.rewards_R[at]
        hits, count = float(np.nansum(rewards)), int((~np.isnan(rewards)).sum())
        if order.group not in self._rate:
            self._rate[order.group] = float(self._random.beta(1 + max(0.0, hits), 1 + max(0.0, count - hits)))
        metric = float(self._random.random() < self._rate[order.group])
        return Done(rollout, metric, metric, max(0, round(float(self._groups.tokens_R[at].mean()))), version)
