"""The synchronous engine: all ordered rollouts are generated to their end before the weights change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any

from rollalloc.core.events import Order
from rollalloc.generate.engine import LocalEngine, Scoring
from rollalloc.generate.outcomes import RolloutResult
from rollalloc.generate.sampler import Generation, Request, stream

_Wave = Generator[list[Generation], Iterable[int] | None]


class SyncEngine(LocalEngine):
    """Generates and scores in waves. A wave contains all rollouts that were submitted before a `poll`.

    Rollouts are scored while others are still generated. `poll` returns a wave in the order in which it was submitted, so
    that the allocator's events do not depend on the time that scoring takes. A wave with rollouts of a stage in
    `stopping` is an exception: `poll` returns each rollout after the decoding step in which it ends, so that other
    rollouts can be cancelled.

    Args:
        shared: the arguments of `LocalEngine`.
        stopping: indices of the stages that have a stop rule (`Recipe.stopping`).

    Attributes:
        on_ended: called with the number of rollouts that ended in a decoding step, for a progress display.
    """

    def __init__(self, *shared: Any, stopping: Collection[int] = ()) -> None:
        super().__init__(*shared)
        self._stopping = stopping
        self.on_ended: Callable[[int], None] = lambda count: None
        self._submitted: list[Order] = []
        self._wave: _Wave | None = None
        self._to_cancel: list[int] = []

    @property
    def can_update(self) -> bool:
        return self._wave is None

    def capacity(self) -> int | None:
        return None if self._wave is None else 0

    def submit(self, orders: Sequence[Order]) -> None:
        self._submitted += orders
        self._order_of.update((rollout, order) for order in orders for rollout in order.rollouts)

    def _cancel_running(self, rollouts: Sequence[int]) -> None:
        self._to_cancel += rollouts

    def poll(self, *, wait: bool = True) -> list[RolloutResult]:
        results, self._ended = self._ended, []
        if self._wave is not None:
            to_cancel, self._to_cancel = self._to_cancel, []
            return results + self._scored(self._wave.send(to_cancel))
        if not self._submitted:
            return results
        orders, self._submitted = self._submitted, []
        wave = self._stream(orders)
        if any(order.stage in self._stopping for order in orders):
            self._wave = wave
            return results + self._scored(next(wave))
        self._to_cancel.clear()  # ignored: this wave has no stop rule, so it is generated to its end
        return results + self._whole(wave)

    def load_weights(self, version: int) -> None:
        self._version = version

    def close(self) -> None:
        if self._wave is not None:
            self._wave.close()
        self._wave = None
        self._submitted.clear()
        self._to_cancel.clear()
        self._order_of.clear()

    def _scored(self, ended: list[Generation]) -> list[RolloutResult]:
        """Wait for the scores of rollouts that ended."""
        results = self._finish(ended, self._score(ended).result())
        if not self._order_of:
            self._wave = None
        return results

    def _whole(self, wave: _Wave) -> list[RolloutResult]:
        """Generate a wave to its end. Return its results in the order in which it was submitted."""
        place_of = {rollout: place for place, rollout in enumerate(self._order_of)}
        scoring: list[Scoring] = []
        for ended in wave:
            scoring.append((ended, self._score(ended)))
            self.on_ended(len(ended))
        scored = [each for ended, future in scoring for each in zip(ended, future.result(), strict=True)]
        scored.sort(key=lambda each: place_of[each[0].rollout])
        return self._finish([generation for generation, _ in scored], [outcome for _, outcome in scored])

    def _stream(self, orders: Sequence[Order]) -> _Wave:
        rollouts_of: dict[int, tuple[int, ...]] = {}  # joined by prompt, so that they share a prefill
        for order in orders:
            rollouts_of[order.prompt] = rollouts_of.get(order.prompt, ()) + order.rollouts
        return stream(
            self.behaviour.policy().model,
            [Request(prompt, self.prompts.tokens[prompt], rollouts) for prompt, rollouts in rollouts_of.items()],
            self.sampling,
            eos_ids=self.policy.eos_ids,
            pad_id=self.policy.pad_id,
            seed=self.seed,
        )
