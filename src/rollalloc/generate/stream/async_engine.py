"""The asynchronous engine: each rollout starts, ends and is scored on its own, while others run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from rollalloc.core.events import Order
from rollalloc.generate.engine import LocalEngine, Scoring
from rollalloc.generate.outcomes import RolloutResult
from rollalloc.generate.sampler import Generation, pack_generations, unpack_generations
from rollalloc.generate.stream.backend import Backend, BackendDied, Pausable, RunningRow
from rollalloc.models.settings import Streaming
from rollalloc.models.weights import weights_of
from rollalloc.rewards.function import Unscored

_SOON_S = 0.005  # maximum seconds to wait for generation while a score may arrive
_LATER_S = 1.0  # maximum seconds to wait for generation while no score can arrive
_STEPS = 10_000  # number of newest decoding steps in `steps`


class AsyncEngine(LocalEngine):
    """Generates through a back-end, with as many rollouts in flight as the back-end has room for.

    Args:
        shared: the arguments of `LocalEngine`.
        begin: creates the back-end; it is called with the version of the policy's weights.
        streaming: whether generation overlaps with training.

    Attributes:
        steps: (rows, seconds) of the newest decoding steps.
    """

    streams = True
    limits = True

    def __init__(self, *shared: Any, begin: Callable[[int], Backend], streaming: Streaming) -> None:
        super().__init__(*shared)
        self._begin, self._streaming = begin, streaming
        self._backend: Backend | None = None
        self._loaded = _InFlight()  # rollouts from a checkpoint, until a back-end is created
        # Rollouts from a checkpoint that had ended when it was saved.
        self._ended_before: list[Generation] = []
        self._died: BackendDied | None = None  # the back-end's error, to be raised when the current batch is trained
        self._running: set[int] = set()  # rollouts that the back-end is generating, not those that are being scored
        self._scoring: list[Scoring] = []
        self._room = 0  # the last result of `capacity`
        self._straddled = 0  # number of rollouts that began before an update and ended after it
        self._paces = np.zeros(3)  # sums over decoding steps: steps, rows, seconds
        self.steps: deque[tuple[int, float]] = deque(maxlen=_STEPS)

    # ---------------------------------------------------------------------------------------------------- the protocol

    def capacity(self) -> int:
        self._room = 0 if self._died is not None else self._opened.capacity()
        return self._room

    def submit(self, orders: Sequence[Order]) -> None:
        rows: list[RunningRow] = []
        for order in orders:
            for rollout in order.rollouts:
                if rollout not in self._order_of:  # the back-end already has the rollouts from a checkpoint
                    self._order_of[rollout] = order
                    self._running.add(rollout)
                    rows.append(RunningRow(rollout, order.prompt, self.prompts.tokens[order.prompt], limit=order.limit))
        if rows:
            self._opened.submit(rows)

    def _cancel_running(self, rollouts: Sequence[int]) -> None:
        if running := [rollout for rollout in rollouts if rollout in self._running]:
            self._opened.cancel(running)

    def poll(self, *, wait: bool = True) -> list[RolloutResult]:
        """Return the rollouts that were scored, stopped or failed.

        Raises:
            BackendDied: the back-end died. With `wait` False, the error is kept for a later call, so that a batch that is
                being trained is finished first. Until then, the capacity is 0.
            RuntimeError: nothing is in flight although there is room. This is a bug.
        """
        results, self._ended = self._ended, []
        if self._died is not None:
            if wait:
                raise self._died
            return results
        if wait and self._room and not (results or self._order_of):
            raise RuntimeError(
                f"nothing is in flight and nothing is ordered, although there is room for {self._room} "
                "rollouts; this is a bug in rollalloc: please report it"
            )
        try:
            return results + self._take_in(wait=wait and not results)
        except BackendDied as died:
            if wait:
                raise
            self._died = died
            return results

    def load_weights(self, version: int) -> None:
        """Pass the weights to the back-end. The first call creates the back-end; later, running rollouts continue."""
        self._version = version
        if self._backend is None:
            self._open(version)
        elif self._died is None:
            try:
                self._backend.load_weights(weights_of(self.behaviour.policy().model), version)
            except BackendDied as died:
                self._died = died

    def pause(self) -> None:
        """Pause the running rollouts, so that a checkpoint can contain them. With overlap, do nothing."""
        self._in_flight()

    def close(self) -> None:
        """Close the back-end. Rollouts in flight are lost; the allocator's `outstanding` lists them."""
        if self._backend is not None:
            self._backend.close()
        self._backend = self._died = None
        for _, future in self._scoring:
            future.cancel()
        self._scoring.clear()
        self._order_of.clear()
        self._running.clear()
        self._ended.clear()

    def figures(self) -> dict[str, Any]:
        """The metrics of `LocalEngine`, and metrics of streaming, since the last call."""
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
            [rollout, length, made.cancelled, *order[:3], order.limit, [*map(list, made.spans)]]
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
        for at, (rollout, _, stopped, group, prompt, stage, limit, spans) in enumerate(stream["in_flight"]):
            orders.append(Order(group, prompt, stage, (rollout,), limit))
            spans = tuple((version, count) for version, count in spans)
            made[at] = replace(made[at], cancelled=stopped, spans=spans)
        self._loaded = _InFlight(tuple(made), tuple(orders))
        self._straddled, self._paces = stream["straddled"], np.array(stream["paces"], np.float64)

    def _in_flight(self) -> _InFlight:
        """Pause the back-end and return its rollouts. With overlap, or if the back-end cannot pause, return no rollouts."""
        if self._backend is None:
            return self._loaded
        if self._streaming.overlap or not isinstance(self._backend, Pausable):
            return _InFlight()
        paused = self._backend.pause()
        made = [replace(row.sampled, rollout=row.rollout) for row in paused.rows]
        made += [*self._ended_before, *paused.ended]
        return _InFlight(tuple(made), tuple(self._order_of[each.rollout] for each in made))

    @property
    def _opened(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the engine has no weights to sample with; call `load_weights` first")
        return self._backend

    def _open(self, version: int) -> None:
        """Create a back-end. Rollouts from a checkpoint continue after their last token."""
        self._backend = backend = self._begin(version)
        rows: list[RunningRow] = []
        for generation, order in zip(self._loaded.generations, self._loaded.orders, strict=True):
            rollout = generation.rollout
            self._order_of[rollout] = order
            self._running.add(rollout)
            if generation.cancelled:
                self._ended_before.append(generation)
            else:
                prompt = order.prompt
                rows.append(RunningRow(rollout, prompt, self.prompts.tokens[prompt], generation, order.limit))
        if rows:
            backend.submit(rows)
        self._loaded = _InFlight()

    # ------------------------------------------------------------------------------------------------------- taking in

    def _take_in(self, *, wait: bool) -> list[RolloutResult]:
        """Take ended rollouts from the back-end and pass them to the scorer. Return the scored or stopped rollouts."""
        wait_s = (_SOON_S if self._scoring else _LATER_S) if wait else 0.0
        backend = self._opened
        ended = [*self._ended_before, *backend.poll(wait_s)]
        self._ended_before.clear()
        for rows, seconds in backend.paces():
            self._paces += (1, rows, seconds)
            self.steps.append((rows, seconds))
        results: list[RolloutResult] = []
        if ended:
            results = self._sort(sorted(ended, key=lambda each: each.rollout))
        elif wait and not self._running:
            self._wait_for_others()
        return results + self._scored()

    def _wait_for_others(self) -> None:
        """Wait for a score, or for the back-end to have room, because nothing is being generated."""
        if self._scoring:
            wait_for([future for _, future in self._scoring], _LATER_S, FIRST_COMPLETED)
        else:
            time.sleep(_SOON_S)

    def _sort(self, ended: Sequence[Generation]) -> list[RolloutResult]:
        """Pass complete rollouts to the scorer. Return the stopped rollouts."""
        self._running.difference_update(each.rollout for each in ended)
        stopped = [each for each in ended if each.cancelled]
        if complete := [each for each in ended if not each.cancelled]:
            self._straddled += sum(len(each.spans) > 1 for each in complete)
            self._scoring.append((complete, self._score(complete)))
        return self._finish(stopped, [Unscored("stopped")] * len(stopped))

    def _scored(self) -> list[RolloutResult]:
        """Return the rollouts that are scored. Without overlap, wait for all scores: the run must not depend on timing."""
        if not self._streaming.overlap:
            wait_for([future for _, future in self._scoring])
        done = [scoring for scoring in self._scoring if scoring[1].done()]
        self._scoring = [scoring for scoring in self._scoring if not scoring[1].done()]
        return [result for ended, future in done for result in self._finish(ended, future.result())]


@dataclass(frozen=True)
class _InFlight:
    """Unfinished rollouts with the tokens sampled so far, and the `Order` of each rollout."""

    generations: tuple[Generation, ...] = ()
    orders: tuple[Order, ...] = ()
