"""The asynchronous engine's rollouts: each is started, scored and told by itself, while others run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Cancelled, Order
from rollalloc.core.latency import Curve
from rollalloc.generate.results import Rollouts, Scoring
from rollalloc.generate.sampler import Generation
from rollalloc.generate.stream.backend import Backend, BackendDied, Ended, Row, Span
from rollalloc.generate.stream.pace import measured_curve
from rollalloc.generate.stream.partial import Partials
from rollalloc.generate.stream.settings import Streaming
from rollalloc.models.weights import weights_of
from rollalloc.rewards.function import Outcome, Unscored

_SOON_S = 0.005  # how long generation is waited for where scores may come first
_LATER_S = 1.0  # and where nothing else can happen
_STEPS = 10_000  # newest decoding steps that are kept
_ENOUGH = 64  # of them for a curve


class Streamer(Rollouts):
    """Generates through a back-end, with as many rollouts in flight as it has room for.

    Args:
        shared: as for `Rollouts`.
        begin: makes the back-end, for the version of the weights that the policy has then.
        streaming: what overlaps, and what becomes of rollouts that an update finds running.

    Attributes:
        meanwhile: called where generation is waited for and no rollout waits for a slot; does a piece of other work and says
            whether there was any.
        steps: (rows, seconds) of the newest decoding steps.
    """

    def __init__(self, *shared: Any, begin: Callable[[int], Backend], streaming: Streaming) -> None:
        super().__init__(*shared)
        self._begin, self._streaming = begin, streaming
        self._backend: Backend | None = None
        self._died: BackendDied | None = None  # while a batch was trained, which comes to its end first
        self._order_of: dict[int, Order] = {}  # of each rollout in flight: with the back-end, or being scored
        self._running: set[int] = set()  # of these, with the back-end
        self._restarting: set[int] = set()  # of these, aborted to begin again
        self._scoring: list[Scoring] = []
        self._begun: dict[int, Generation] = {}  # of rollouts that went on from a prefix, that prefix
        self._partials = Partials(streaming.keep_stopped, self.sampling, self.policy.eos_ids)
        self._version = 0
        self._counts = dict.fromkeys(("straddled", "restarted", "stopped", "resumed", "discarded_tokens"), 0)
        self.meanwhile: Callable[[], bool] = _nothing
        self._paces = np.zeros(3)  # decoding steps, rows in them, seconds
        self.steps: deque[tuple[int, float]] = deque(maxlen=_STEPS)

    # ------------------------------------------------------------------------------------------------------- the loop

    def advance(self, allocator: Allocator) -> Actions:
        """Ask and carry out, until there is a batch or the run is over.

        Raises:
            BackendDied: what generates is gone, or gave no sign of life for too long.
            RuntimeError: the core waits for rollouts of which nothing is in flight.
        """
        while True:
            actions = self.turn(allocator, beside=False)
            if actions.batch is not None or actions.finished is not None:
                return actions

    def turn(self, allocator: Allocator, *, beside: bool = True) -> Actions:
        """Ask once and carry out; unless there is a batch or the run is over, take in what ends, and wait for it a moment.

        Where somebody else trains the batch that is outstanding meanwhile (`beside`), there may be nothing to do.
        """
        backend = self._open(allocator)
        room = backend.capacity()
        actions = self._ask(allocator, backend, room)
        if actions.batch is not None or actions.finished is not None:
            return actions
        idle = not (self._order_of or actions.cancel or actions.release or (beside and allocator.batch is not None))
        if room and idle:
            what = f"nothing is in flight and nothing is ordered, although there is room for {room} rollouts"
            raise RuntimeError(f"{what}; an error of rollalloc's, accounts: {allocator.accounts()}")
        worked = not actions.generate and room > 0 and self.meanwhile()
        self._take_in(allocator, backend, wait=not (actions.generate or worked))
        return actions

    def go_on(self, allocator: Allocator) -> None:
        """One turn, without waiting; a back-end that died is said at the next `advance` or `turn`."""
        if self._died is not None:
            return
        try:
            backend = self._open(allocator)
            self._take_in(allocator, backend, wait=False)
            self._ask(allocator, backend, backend.capacity())
        except BackendDied as died:
            self._died = died

    def updated(self, version: int) -> None:
        """Hand the weights on, and do with what runs as the settings say; of a back-end that died as `go_on`."""
        self._version = version
        if self._backend is None or self._died is not None:
            return
        if self._streaming.on_weight_update != "continue":
            running = sorted(self._running)
            if self._streaming.on_weight_update == "restart":
                self._restarting.update(running)
            else:
                self._counts["stopped"] += len(running)
            self._backend.abort(running)
        try:
            self._backend.load(weights_of(self.behaviour.policy().model), version)
        except BackendDied as died:
            self._died = died

    def close(self) -> None:
        """Let the back-end go; should the run go on, what was in flight is what the allocator calls outstanding."""
        if self._backend is not None:
            self._backend.close()
        self._backend = self._died = None
        for _, future in self._scoring:
            future.cancel()
        self._scoring.clear()
        for held in (self._order_of, self._running, self._restarting, self._begun):
            held.clear()

    def latency(self) -> Curve | None:
        """A curve through the newest decoding steps; None before there are enough."""
        steps = [(rows, seconds) for rows, seconds in self.steps if rows > 0 and seconds > 0]
        return measured_curve(steps) if len(steps) >= _ENOUGH else None

    def figures(self) -> dict[str, Any]:
        """As of every engine, and what streamed since the last call."""
        steps, rows, seconds = self._paces.tolist()
        streamed = self._counts | {
            "in_flight": len(self._running),
            "rows_mean": rows / steps if steps else None,
            "step_seconds": seconds / steps if steps else None,
            **({} if self._backend is None else self._backend.figures()),
        }
        self._counts, self._paces = dict.fromkeys(self._counts, 0), np.zeros(3)
        return super().figures() | {"streaming": streamed}

    def _open(self, allocator: Allocator) -> Backend:
        """The back-end; a new one is given what the allocator has outstanding, after a load or a pause."""
        if self._died is not None:
            raise self._died
        if self._backend is None:
            self._version = allocator.version
            self._backend = self._begin(allocator.version)
            outstanding = allocator.outstanding()
            allocator.tell([Cancelled(rollout, 0) for rollout in outstanding.cancel])
            self._start(outstanding.generate, self._backend)
        return self._backend

    # ---------------------------------------------------------------------------------------------------------- asking

    def _ask(self, allocator: Allocator, backend: Backend, room: int) -> Actions:
        actions = allocator.ask(capacity=room)
        self.release(actions)
        if actions.cancel:
            self._restarting.difference_update(actions.cancel)
            backend.abort([rollout for rollout in actions.cancel if rollout in self._running])
        self._start(actions.generate, backend)
        return actions

    def _start(self, orders: Sequence[Order], backend: Backend) -> None:
        rows: list[Row] = []
        for order in orders:
            for rollout in order.rollouts:
                self._order_of[rollout] = order
                begun = self._partials.take(order.prompt, self._version)
                if begun is not None:
                    self._begun[rollout] = begun
                    self._counts["resumed"] += 1
                rows.append(self._row(rollout))
        if rows:
            backend.start(rows)

    def _row(self, rollout: int) -> Row:
        order, begun = self._order_of[rollout], self._begun.get(rollout)
        self._running.add(rollout)
        return Row(rollout, order.prompt, self.prompts.tokens[order.prompt], () if begun is None else begun.tokens)

    # ------------------------------------------------------------------------------------------------------- taking in

    def _take_in(self, allocator: Allocator, backend: Backend, *, wait: bool) -> None:
        """What ended goes to be scored, what is scored is told."""
        ended = backend.step((_SOON_S if self._scoring else _LATER_S) if wait else 0.0)
        for rows, seconds in backend.paces():
            self._paces += (1, rows, seconds)
            self.steps.append((rows, seconds))
        if ended:
            self._sort(sorted(ended, key=lambda each: each.rollout), allocator, backend)
        elif wait and not self._running:
            self._wait_for_others()
        self._tell_scored(allocator)

    def _wait_for_others(self) -> None:
        """Nothing is generated: a score comes next, or the back-end has no room at the moment."""
        if self._scoring:
            wait([future for _, future in self._scoring], _LATER_S, return_when="FIRST_COMPLETED")
        else:
            time.sleep(_SOON_S)

    def _sort(self, ended: Sequence[Ended], allocator: Allocator, backend: Backend) -> None:
        """What was generated is scored, what was stopped or failed is told, and what is to begin again does."""
        whole: list[Generation] = []
        stopped: list[Generation] = []
        again: list[Row] = []
        for each in ended:
            self._running.discard(each.rollout)
            made = self._made(each)
            if each.end == "aborted" and each.rollout in self._restarting:
                self._counts["restarted"] += 1
                self._counts["discarded_tokens"] += len(made.tokens)
                self._begun.pop(each.rollout, None)
                again.append(self._row(each.rollout))
            elif each.end == "aborted":
                stopped.append(made)
            elif each.end == "failed":
                self._finish([made], [Unscored(each.reason)], allocator)
            else:
                whole.append(made)
                self._counts["straddled"] += len(made.spans) > 1
            self._restarting.discard(each.rollout)
        if again:
            backend.start(again)
        self._tell_stopped(stopped, allocator)
        if whole:
            self._scoring.append((whole, self.score(whole, self._order_of)))

    def _made(self, ended: Ended) -> Generation:
        """The whole of a rollout: what it began with, and what was sampled now."""
        truncated, cancelled = ended.end == "length", ended.end == "aborted"
        made = Generation(ended.rollout, ended.tokens, ended.logprobs, truncated, cancelled, ended.spans)
        begun = self._begun.get(ended.rollout)
        if begun is None:
            return made
        return replace(
            made,
            tokens=begun.tokens + made.tokens,
            logprobs=np.concatenate([begun.logprobs, made.logprobs]),
            spans=joined(begun.spans, made.spans),
        )

    def _tell_stopped(self, stopped: Sequence[Generation], allocator: Allocator) -> None:
        for made in stopped:
            self._partials.keep(self._order_of[made.rollout].prompt, made, allocator.recipe.max_staleness)
        if stopped:
            self._finish(stopped, [Unscored("stopped")] * len(stopped), allocator)

    def _tell_scored(self, allocator: Allocator) -> None:
        """Tell what is scored; where nothing overlaps, wait for it, so that what is told when depends on no clock."""
        if not self._streaming.overlap:
            wait([future for _, future in self._scoring])
        there = [scoring for scoring in self._scoring if scoring[1].done()]
        self._scoring = [scoring for scoring in self._scoring if not scoring[1].done()]
        for made, future in there:
            self._finish(made, future.result(), allocator)

    def _finish(self, ended: Sequence[Generation], outcomes: Sequence[Outcome], allocator: Allocator) -> None:
        self.tell(ended, outcomes, self._order_of, allocator)
        for made in ended:
            self._order_of.pop(made.rollout, None)
            self._begun.pop(made.rollout, None)


def _nothing() -> bool:
    return False


def joined(before: Sequence[Span], after: Sequence[Span]) -> tuple[Span, ...]:
    """Spans one after the other; two of the same version that meet are one."""
    spans: list[Span] = []
    for version, count in chain(before, after):
        if spans and spans[-1][0] == version:
            count += spans.pop()[1]
        spans.append((version, count))
    return tuple(spans)
