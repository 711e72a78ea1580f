"""One simulated run under audit: a simulated world answers the allocator's orders."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Batch, Cancelled, Event, Failed, Moved, Offered, Updated
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe
from rollalloc.core.rule import OfferedPromptRule
from rollalloc.testing.audit import Auditor, expect
from rollalloc.testing.promises import watched
from rollalloc.testing.world import World


class AuditedRun:
    """One simulated run under audit. Every rule of the recipe is watched.

    Args:
        recipe: the recipe to run.
        prompts: the data set, or its size.
        world: decides the results of rollouts.
        seed: seed of the allocator and of the order in which rollouts end.
        allocator: the allocator's class.
        like: the recipe whose promises are checked. None: no promises are checked.
        reload: if above 0, a second allocator gets the same events, but in lists instead of one by one, and must give the
            same answers. With this probability, an `ask` saves the second allocator and replaces it by a loaded copy.
    """

    def __init__(
        self,
        recipe: Recipe,
        prompts: int | PromptTable,
        world: World,
        *,
        seed: int = 0,
        allocator: type[Allocator] = Allocator,
        like: Recipe | None = None,
        reload: float = 0.0,
    ) -> None:
        self.world = world
        under_watch, verdicts = watched(recipe, like)
        self.allocator = allocator(under_watch, prompts, seed)
        self.audit = Auditor(recipe, verdicts)
        self.rng = np.random.default_rng([world.seed, 3, seed])
        self.reload = reload
        self.twin = self._copy(self.allocator) if reload else None
        self.running: dict[int, tuple[int, int]] = {}  # rollout -> (prompt, version at its first token)
        self.finished: str | None = None
        self.next_offer = 0
        # The loader's epochs are shorter than the data set, so that a new epoch begins while groups are waiting.
        self.offered_epoch = max(recipe.groups, len(self.allocator.table) // 4) + 1

    def synchronous(self, batches: int) -> Iterator[Actions]:
        """Run in waves: all requested rollouts end before the next `ask`. No rollout fails."""
        while batches and not self.finished:
            actions = self.ask(None)
            yield actions
            batches -= actions.batch is not None
            events = [self.end(rollout) for rollout in list(self.running)]
            self.tell(events + [self.update()] * (actions.batch is not None))

    def asynchronous(self, batches: int, trouble: float, slots: int = 24) -> Iterator[Actions]:
        """Report one or a few completions at a time, in random order, with failures, cancellations and a slow trainer."""
        training = False
        while batches and not self.finished:
            room = slots - len(self.running)
            actions = self.ask(int(self.rng.integers(0, room + 1)) if self.running and room > 0 else max(room, 0))
            yield actions
            training |= actions.batch is not None
            events = [self.terminal(trouble) for _ in range(min(len(self.running), int(self.rng.integers(1, 5))))]
            if training and (self.rng.random() < 0.2 or not events):
                events.append(self.update())
                training, batches = False, batches - 1
            self.tell(events)

    def ask(self, capacity: int | None) -> Actions:
        """Ask, and check the answer."""
        self._offer()
        reload = self.twin is not None and self.rng.random() < self.reload
        if self.twin is not None and reload:
            self.twin = self._copy(self.twin)
        actions = self.allocator.ask(capacity)
        if self.twin is not None:
            expect(6, self.twin.ask(capacity) == actions, "an allocator that was saved and loaded gives another answer")
            self.twin.rest()  # the other one never does, and its draws must be the same
        if reload:
            self._check_outstanding(actions)
        self.audit.answered(actions, capacity)
        self.audit.accounts(self.allocator.accounts())
        expect(12, self.allocator.replayed == self.audit.replayed, f"`replayed` is wrong: {self.allocator.replayed}")
        if actions.batch is not None:
            self._measure(actions.batch)
        for order in actions.generate:
            self.running |= dict.fromkeys(order.rollouts, (order.prompt, self.allocator.version))
        self.finished = actions.finished if actions.batch is None and not self.audit.in_batch else None
        return actions

    def _measure(self, batch: Batch) -> None:
        """Act as a trainer with a gate: tell how far the replayed rows have moved, and check what is left of the batch."""
        if self.allocator.recipe.gate is None or not any(row.replays for row in batch.rows):
            return
        self.tell([Moved(float(self.rng.random()))])
        left = self.allocator.batch
        trained = set[int]() if left is None else {row.rollout for row in left.rows}
        expect(12, trained == self.audit.in_batch, "the gate left out other rows than the replayed ones")
        expect(12, self.allocator.left_out == self.audit.left_out, f"`left_out` is wrong: {self.allocator.left_out}")
        expect(12, self.allocator.replayed == self.audit.replayed, f"`replayed` is wrong: {self.allocator.replayed}")

    def _offer(self) -> None:
        """Act as a framework's data loader: offer prompts until the allocator wants no more."""
        if not isinstance(self.allocator.recipe.prompts, OfferedPromptRule):
            return
        while wanted := self.allocator.wanted():
            epoch, at = divmod(self.next_offer, self.offered_epoch)
            count = min(wanted, self.offered_epoch - at)
            prompts = tuple((self.next_offer + more) % len(self.allocator.table) for more in range(count))
            self.next_offer += count
            self.tell([Offered(prompts, epoch)])

    def tell(self, events: list[Event]) -> None:
        """Pass the events to the auditor, then to the allocator."""
        for event in events:
            self.audit.told(event)
            self.allocator.tell([event])
        if self.twin is not None:
            self.twin.tell(events)

    def update(self) -> Updated:
        """The next `Updated`. Every third update has no KL divergence, and every other one leaves truncated rows out."""
        version, batch = self.allocator.version + 1, self.allocator.batch
        rollouts = [row.rollout for row in batch.rows] if batch is not None and version % 2 else []
        masked = tuple(rollout for rollout in rollouts if self.audit.done[rollout].truncated)
        return Updated(version, 0.02 * (version % 5) if version % 3 else None, masked)

    def terminal(self, trouble: float) -> Event:
        """End a random running rollout: mostly with a result, sometimes with a failure or a cancellation."""
        rollout = list(self.running)[int(self.rng.integers(len(self.running)))]
        named = rollout in self.audit.cancelled
        if self.rng.random() < (0.7 if named else trouble):
            del self.running[rollout]
            failed = self.rng.random() < 0.5
            return Failed(rollout, "simulated", 3) if failed else Cancelled(rollout, 5)
        return self.end(rollout)

    def end(self, rollout: int) -> Event:
        """End a running rollout and return its result."""
        prompt, version = self.running.pop(rollout)
        limit = self.audit.order_of[rollout].limit
        return self.world.end(rollout, prompt, version, self.allocator.version, limit)

    def _copy(self, allocator: Allocator) -> Allocator:
        """A copy of the allocator, made by a round trip through JSON."""
        copy = type(allocator)(allocator.recipe, allocator.table, allocator.seed)
        copy.load_state_dict(json.loads(json.dumps(allocator.state_dict())))
        return copy

    def _check_outstanding(self, actions: Actions) -> None:
        """Check that a loaded copy's `outstanding` repeats all actions that are not done yet."""
        repeated = self._copy(self.allocator).outstanding()
        ordered = {rollout for order in repeated.generate for rollout in order.rollouts}
        now = {rollout for order in actions.generate for rollout in order.rollouts}
        stopped = (self.audit.cancelled & self.audit.live) | set(actions.cancel)
        expect(4, ordered == (self.audit.live | now) - stopped, "outstanding() does not repeat the orders in flight")
        expect(4, set(repeated.cancel) == stopped, "outstanding() does not repeat the cancellations")
        expect(4, actions.batch in (None, repeated.batch), "outstanding() does not repeat the batch")
