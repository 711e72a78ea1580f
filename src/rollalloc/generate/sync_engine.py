"""The synchronous engine: all ordered rollouts are generated to their end before the allocator is asked again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Cancelled, Order
from rollalloc.generate.engine import LocalEngine, Scoring
from rollalloc.generate.sampler import Generation, OnFinished, Request, stream
from rollalloc.rewards.function import Outcome


class SyncEngine(LocalEngine):
    """Generates and scores what an allocator orders, wave by wave."""

    def advance(self, allocator: Allocator) -> Actions:
        actions = allocator.ask()
        self.carry_out(actions, allocator)
        return actions

    def carry_out(self, actions: Actions, allocator: Allocator) -> None:
        """Release, generate and score what the actions say, and tell the allocator what happened.

        Rollouts are scored while others are still generated, and told in the order in which they were ordered: what the
        allocator hears does not depend on how long a score takes. Where a stage has a stop rule, what ended is told and the
        core is asked what to stop before generation goes on; a batch that it returns then is the allocator's `batch`.
        """
        self.release(actions)
        allocator.tell([Cancelled(rollout, 0) for rollout in actions.cancel])
        if not actions.generate:
            return
        order_of = {rollout: order for order in actions.generate for rollout in order.rollouts}
        stops = any(order.stage in allocator.recipe.stopping for order in actions.generate)
        scoring: list[Scoring] = []
        running = len(order_of)

        def on_finished(ended: list[Generation]) -> tuple[int, ...]:
            nonlocal running
            running -= len(ended)
            scoring.append((ended, self.score(ended, order_of)))
            return stop() if stops else ()

        def stop() -> tuple[int, ...]:
            [(ended, future)] = scoring
            scoring.clear()
            self.tell(ended, future.result(), order_of, allocator)
            if not running:  # the loop asks next
                return ()
            meanwhile = allocator.ask(capacity=0)
            self.release(meanwhile)
            return meanwhile.cancel

        self.sample(actions.generate, on_finished)
        ended = in_order(scoring, order_of)
        self.tell([made for made, _ in ended], [outcome for _, outcome in ended], order_of, allocator)

    def sample(self, orders: Sequence[Order], on_finished: OnFinished) -> None:
        """Generate what is ordered to its end; `on_finished` as for `sampler.stream`."""
        stream(
            self.behaviour.policy().model,
            [Request(order.prompt, self.prompts.tokens[order.prompt], order.rollouts) for order in _joined(orders)],
            self.sampling,
            on_finished,
            eos_ids=self.policy.eos_ids,
            pad_id=self.policy.pad_id,
            seed=self.seed,
        )


def in_order(scoring: Iterable[Scoring], order_of: Mapping[int, Order]) -> list[tuple[Generation, Outcome]]:
    """What was generated, each with its outcome once that is known, in the order in which the rollouts were ordered."""
    place_of = {rollout: place for place, rollout in enumerate(order_of)}
    ended = [each for generations, future in scoring for each in zip(generations, future.result(), strict=True)]
    return sorted(ended, key=lambda each: place_of[each[0].rollout])


def _joined(orders: Sequence[Order]) -> Iterator[Order]:
    """Orders of the same prompt as one, so that they share a prefill."""
    by_group: dict[int, Order] = {}
    for order in orders:
        before = by_group.get(order.group)
        by_group[order.group] = order if before is None else before._replace(rollouts=before.rollouts + order.rollouts)
    yield from by_group.values()
