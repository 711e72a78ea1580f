"""The asynchronous engine: each rollout is started, scored and told on its own, while others run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Cancelled, Order
from rollalloc.core.latency import Curve
from rollalloc.generate.engine import LocalEngine, Scoring
from rollalloc.generate.sampler import Generation, pack_generations, unpack_generations
from rollalloc.generate.sampling import Streaming
from rollalloc.generate.stream.backend import Backend, BackendDied, Ended, Pausable, RunningRow, SampledTokens
from rollalloc.models.weights import weights_of
from rollalloc.rewards.function import Outcome, Unscored

_SOON_S = 0.005  # how long generation is waited for where scores may come first
_LATER_S = 1.0  # and where nothing else can happen
_STEPS = 10_000  # newest decoding steps that are kept
_ENOUGH = 64  # of them for a curve


class AsyncEngine(LocalEngine):
    """Generates through a back-end, with as many rollouts in flight as it has room for.

    Args:
        shared: as for `LocalEngine`.
        begin: makes the back-end, for the version of the weights that the policy has then.
        streaming: what overlaps.

    Attributes:
        steps: (rows, seconds) of the newest decoding steps.
    """

    def __init__(self, *shared: Any, begin: Callable[[int], Backend], streaming: Streaming) -> None:
        super().__init__(*shared)
        self._begin, self._streaming = begin, streaming
        self._backend: Backend | None = None
        self._loaded = _InFlight()  # of a checkpoint, until there is a back-end
        self._ended_before: list[Ended] = []  # of these, what had ended and was not taken in
        self._died: BackendDied | None = None  # while a batch was trained, which comes to its end first
        self._order_of: dict[int, Order] = {}  # of each rollout in flight: with the back-end, or being scored
        self._running: set[int] = set()  # of these, with the back-end
        self._scoring: list[Scoring] = []
        self._straddled = 0  # rollouts that went on over an update
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
            actions = self._turn(allocator)
            if actions.batch is not None or actions.finished is not None:
                return actions

    def _turn(self, allocator: Allocator) -> Actions:
        """Ask once and carry out; unless there is a batch or the run is over, take in what ends; wait for it a moment."""
        backend = self._open(allocator)
        room = backend.capacity()
        actions = self._ask(allocator, backend, room)
        if actions.batch is not None or actions.finished is not None:
            return actions
        idle = not (self._order_of or actions.cancel or actions.release)
        if room and idle:
            what = f"nothing is in flight and nothing is ordered, although there is room for {room} rollouts"
            raise RuntimeError(f"{what}; an error of rollalloc's, accounts: {allocator.accounts()}")
        self._take_in(allocator, backend, wait=not actions.generate)
        return actions

    def go_on(self, allocator: Allocator) -> None:
        """One turn, without waiting; a back-end that died is said at the next `advance`."""
        if self._died is not None:
            return
        try:
            backend = self._open(allocator)
            self._take_in(allocator, backend, wait=False)
            self._ask(allocator, backend, backend.capacity())
        except BackendDied as died:
            self._died = died

    def updated(self, version: int) -> None:
        """Hand the weights on, under which what runs goes on; of a back-end that died as `go_on`."""
        if self._backend is None or self._died is not None:
            return
        try:
            self._backend.load(weights_of(self.behaviour.policy().model), version)
        except BackendDied as died:
            self._died = died

    def before_evaluation(self, allocator: Allocator) -> None:
        """Let the back-end generate meanwhile, or, where nothing overlaps, pause it: the run may be saved from here."""
        if self._streaming.overlap:
            self.go_on(allocator)
        else:
            self._in_flight()

    def close(self) -> None:
        """Let the back-end go; should the run go on, what was in flight is what the allocator calls outstanding."""
        if self._backend is not None:
            self._backend.close()
        self._backend = self._died = None
        for _, future in self._scoring:
            future.cancel()
        self._scoring.clear()
        self._order_of.clear()
        self._running.clear()

    def latency(self) -> Curve | None:
        """A curve through the newest decoding steps; None before there are enough."""
        steps = [(rows, seconds) for rows, seconds in self.steps if rows > 0 and seconds > 0]
        return measured_curve(steps) if len(steps) >= _ENOUGH else None

    def figures(self) -> dict[str, Any]:
        """As of every engine, and what streamed since the last call."""
        steps, rows, seconds = self._paces.tolist()
        streamed = {
            "straddled": self._straddled,
            "in_flight": len(self._running),
            "rows_mean": rows / steps if steps else None,
            "step_seconds": seconds / steps if steps else None,
            **({} if self._backend is None else self._backend.figures()),
        }
        self._straddled, self._paces = 0, np.zeros(3)
        return super().figures() | {"streaming": streamed}

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        state, tensors = super().state()
        now = self._in_flight()
        described, sampled = pack_generations(now.generations)
        entries = [
            [*(rollout, length, made.cancelled, order.prompt, order.group, order.stage), [*map(list, made.spans)]]
            for (rollout, length, _), made, order in zip(described, now.generations, now.orders, strict=True)
        ]
        state["stream"] = {"in_flight": entries, "straddled": self._straddled, "paces": self._paces.tolist()}
        return state, tensors | {f"stream_{name}": tensor for name, tensor in sampled.items()}

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state(state, tensors)
        if (stream := state["stream"]) is None:
            return
        described = [(rollout, length, 0) for rollout, length, *_ in stream["in_flight"]]
        sampled = {name: tensors[f"stream_{name}"] for name in ("tokens", "logprobs")}
        made = unpack_generations(described, sampled)
        orders: list[Order] = []
        for at, (rollout, _, stopped, prompt, group, stage, spans) in enumerate(stream["in_flight"]):
            orders.append(Order(group, prompt, stage, (rollout,)))
            spans = tuple((version, count) for version, count in spans)
            made[at] = replace(made[at], cancelled=stopped, spans=spans)
        self._loaded = _InFlight(tuple(made), tuple(orders))
        self._straddled, self._paces = stream["straddled"], np.array(stream["paces"], np.float64)

    def _in_flight(self) -> _InFlight:
        """What the back-end has, which is paused for that; nothing where one has no pause, or goes on by a clock."""
        if self._backend is None:
            return self._loaded
        if self._streaming.overlap or not isinstance(self._backend, Pausable):
            return _InFlight()
        paused = self._backend.pause()
        made = [_partial(row.rollout, row.sampled) for row in paused.rows]
        made += [_partial(each.rollout, each, stopped=True) for each in (*self._ended_before, *paused.ended)]
        return _InFlight(tuple(made), tuple(self._order_of[each.rollout] for each in made))

    def _continue(self, backend: Backend) -> set[int]:
        """Start what a checkpoint had in flight, each rollout after the tokens that it has; returns their ids."""
        rows: list[RunningRow] = []
        for made, order in zip(self._loaded.generations, self._loaded.orders, strict=True):
            self._order_of[made.rollout] = order
            if made.cancelled:
                self._ended_before.append(Ended(made.rollout, made.tokens, made.logprobs, made.spans, "aborted"))
                continue
            sampled = SampledTokens(made.tokens, made.logprobs, made.spans)
            rows.append(RunningRow(made.rollout, order.prompt, self.prompts.tokens[order.prompt], sampled))
        self._running |= {made.rollout for made in self._loaded.generations}
        if rows:
            backend.start(rows)
        known = {made.rollout for made in self._loaded.generations}
        self._loaded = _InFlight()
        return known

    def _open(self, allocator: Allocator) -> Backend:
        """The back-end; a new one is given what the allocator has outstanding, after a load or a pause."""
        if self._died is not None:
            raise self._died
        if self._backend is None:
            self._backend = self._begin(allocator.version)
            known = self._continue(self._backend)
            outstanding = allocator.outstanding()
            allocator.tell([Cancelled(rollout, 0) for rollout in outstanding.cancel if rollout not in known])
            self._start(_without(outstanding.generate, known), self._backend)
        return self._backend

    # ---------------------------------------------------------------------------------------------------------- asking

    def _ask(self, allocator: Allocator, backend: Backend, room: int) -> Actions:
        actions = allocator.ask(capacity=room)
        self.release(actions)
        if actions.cancel:
            backend.abort([rollout for rollout in actions.cancel if rollout in self._running])
        self._start(actions.generate, backend)
        return actions

    def _start(self, orders: Sequence[Order], backend: Backend) -> None:
        rows: list[RunningRow] = []
        for order in orders:
            for rollout in order.rollouts:
                self._order_of[rollout] = order
                self._running.add(rollout)
                rows.append(RunningRow(rollout, order.prompt, self.prompts.tokens[order.prompt]))
        if rows:
            backend.start(rows)

    # ------------------------------------------------------------------------------------------------------- taking in

    def _take_in(self, allocator: Allocator, backend: Backend, *, wait: bool) -> None:
        """What ended goes to be scored, what is scored is told."""
        ended = [*self._ended_before, *backend.step((_SOON_S if self._scoring else _LATER_S) if wait else 0.0)]
        self._ended_before.clear()
        for rows, seconds in backend.paces():
            self._paces += (1, rows, seconds)
            self.steps.append((rows, seconds))
        if ended:
            self._sort(sorted(ended, key=lambda each: each.rollout), allocator)
        elif wait and not self._running:
            self._wait_for_others()
        self._tell_scored(allocator)

    def _wait_for_others(self) -> None:
        """Nothing is generated: a score comes next, or the back-end has no room at the moment."""
        if self._scoring:
            wait([future for _, future in self._scoring], _LATER_S, return_when="FIRST_COMPLETED")
        else:
            time.sleep(_SOON_S)

    def _sort(self, ended: Sequence[Ended], allocator: Allocator) -> None:
        """What was generated is scored, what was stopped or failed is told."""
        whole: list[Generation] = []
        stopped: list[Generation] = []
        for each in ended:
            self._running.discard(each.rollout)
            truncated, cancelled = each.end == "length", each.end == "aborted"
            made = Generation(each.rollout, each.tokens, each.logprobs, truncated, cancelled, each.spans)
            if cancelled:
                stopped.append(made)
            elif each.end == "failed":
                self._finish([made], [Unscored(each.reason)], allocator)
            else:
                whole.append(made)
                self._straddled += len(made.spans) > 1
        if stopped:
            self._finish(stopped, [Unscored("stopped")] * len(stopped), allocator)
        if whole:
            self._scoring.append((whole, self.score(whole, self._order_of)))

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


@dataclass(frozen=True)
class _InFlight:
    """Unfinished rollouts, with the tokens sampled so far and the order of each; `cancelled` ones were stopped."""

    generations: tuple[Generation, ...] = ()
    orders: tuple[Order, ...] = ()


def _partial(rollout: int, sampled: SampledTokens | Ended, *, stopped: bool = False) -> Generation:
    return Generation(rollout, sampled.tokens, sampled.logprobs, False, stopped, sampled.spans)


def _without(orders: Sequence[Order], rollouts: set[int]) -> list[Order]:
    """Orders without these rollouts."""
    left = (order._replace(rollouts=tuple(each for each in order.rollouts if each not in rollouts)) for order in orders)
    return [order for order in left if order.rollouts]


def measured_curve(steps: Sequence[tuple[int, float]], points: int = 8) -> Curve:
    """How long a decoding step takes, by how many rollouts are in it: a curve through an engine's own steps.

    The steps are sorted by rollouts and cut into groups of equal size. Each group gives a point: its mean number of
    rollouts, rounded, and its median seconds. Neighbouring points are pooled until seconds increase with rollouts
    (isotonic regression), since a step of more rollouts is not cheaper.

    Args:
        steps: (rollouts, seconds) of each step; at least one step, rollouts at least 1.
        points: the most that the curve may have.
    """
    found: dict[int, tuple[float, int]] = {}
    for part in np.array_split(np.array(sorted(steps), np.float64), min(points, len(steps))):
        at = max(1, round(float(part[:, 0].mean())))
        seconds, count = found.get(at, (0.0, 0))
        both = count + len(part)
        found[at] = (seconds * count + float(np.median(part[:, 1])) * len(part)) / both, both
    pooled: list[tuple[list[int], float, int]] = []
    for at, (seconds, count) in sorted(found.items()):
        pooled.append(([at], seconds, count))
        while len(pooled) > 1 and pooled[-2][1] >= pooled[-1][1]:
            there, more, many = pooled.pop()
            before, earlier, few = pooled.pop()
            pooled.append((before + there, (earlier * few + more * many) / (few + many), few + many))
    return tuple((at, seconds) for places, seconds, _ in pooled for at in places)
