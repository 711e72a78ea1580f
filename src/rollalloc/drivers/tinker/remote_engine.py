"""The engine of a run at a service. Starts orders, waits for them, and reports how their rollouts ended."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread

from rollalloc.core.events import Order
from rollalloc.drivers.tinker.episodes import EndedRollout, Episodes, Rewarded, Wave
from rollalloc.drivers.tinker.service import Service, ServiceFailed
from rollalloc.drivers.tinker.trajectories import Trajectory, pack, unpack
from rollalloc.generate.engine import RolloutEngine
from rollalloc.generate.outcomes import Outcomes, RolloutLog, RolloutResult, stopped, uncertainty_of
from rollalloc.models.settings import Sampling
from rollalloc.rewards.function import Unscored

CLOSING_S = 10.0  # seconds that cancelled tasks may take to end


class EpisodeThread:
    """Plays orders in an event loop in its own thread. The thread starts with the first order.

    Args:
        patience_s: seconds for which an environment may block the event loop before the run fails.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, episodes: Episodes, order: Order, wave: Wave) -> Future[list[EndedRollout]]:
        """Start an order in the thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=self._loop.run_forever, name="rollalloc-tinker", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(episodes.play(order, wave), self._loop)

    def wait(self, futures: Iterable[Future[list[EndedRollout]]], *, one: bool = False) -> None:
        """Wait until all of these orders have ended. With `one`, wait only until any of them has ended.

        Raises:
            ServiceFailed: an environment blocks the event loop.
        """
        pending = set(futures)
        while pending:
            ended, pending = wait(pending, self._patience_s, FIRST_COMPLETED)
            if one and ended:
                return
            if pending and not ended:
                self._check_pulse()

    def all_of(self, futures: Iterable[Future[list[EndedRollout]]]) -> list[EndedRollout]:
        """Wait for all of these orders. Return their rollouts in the given order.

        Raises:
            ServiceFailed: an environment blocks the event loop.
        """
        futures = list(futures)
        self.wait(futures)
        return [rollout for future in futures for rollout in future.result()]

    def _check_pulse(self) -> None:
        assert self._loop is not None
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(self._patience_s)
        except TimeoutError:
            raise ServiceFailed(
                f"an environment has blocked the event loop for more than {self._patience_s:g} s, so that no rollout can go "
                "on: the environment must use `await` or a thread for slow work; fix it, then resume the run"
            ) from None

    def close(self) -> None:
        """Cancel the orders in flight and end the thread."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        with suppress(TimeoutError):  # give up a task that ignores its cancellation
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(CLOSING_S)
        loop.call_soon_threadsafe(loop.stop)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class RemoteEngine(RolloutEngine):
    """Plays an allocator's orders at a service.

    The SDK cannot abort a request. A rollout that must stop finishes its current request and starts no further turn. It is
    reported as cancelled, with all tokens that were billed for it.

    Args:
        service: the service that samples.
        episodes: the prompts, and how to sample and score their rollouts.
        sampling: the sampling settings.
        thread: plays the orders.
        stopping: indices of the stages that have a stop rule (`Recipe.stopping`).
        path: file for the log of rollouts; None: no log.
    """

    pack, unpack = staticmethod(pack), staticmethod(unpack)

    def __init__(
        self,
        service: Service,
        episodes: Episodes,
        sampling: Sampling,
        thread: EpisodeThread,
        stopping: Collection[int],
        path: Path | None,
    ) -> None:
        self.service, self.episodes, self.sampling, self.thread = service, episodes, sampling, thread
        self.stopping = stopping
        self.generations: dict[int, Trajectory] = {}
        self.outcomes = Outcomes()
        self._log = RolloutLog(path)
        self._version = 0
        self._in_flight: dict[Future[list[EndedRollout]], tuple[Order, int]] = {}
        self._stopped: set[int] = set()
        self._ended: list[RolloutResult] = []  # results for the next `poll`
        self._failures = 0  # number of orders in a row without an answer

    def capacity(self) -> int | None:
        """Number of rollouts that may start now; None: any number.

        Without `Remote.concurrency`, the result is 0 until all rollouts of the last wave have ended.
        """
        in_flight = [order for order, _ in self._in_flight.values()]
        concurrency = self.service.remote.concurrency
        if concurrency is not None:
            return max(0, concurrency - sum(len(order.rollouts) for order in in_flight))
        return 0 if any(map(self._is_wanted, in_flight)) else None

    def submit(self, orders: Sequence[Order]) -> None:
        for order in orders:
            wave = Wave(self.service, self.service.sampler(), self.sampling, self._stopped.__contains__)
            self._in_flight[self.thread.start(self.episodes, order, wave)] = order, self._version

    def cancel(self, rollouts: Sequence[int]) -> None:
        in_flight = {rollout for order, _ in self._in_flight.values() for rollout in order.rollouts}
        self._stopped.update(in_flight.intersection(rollouts))
        # If a rollout is not in flight, it was stopped before the run was saved. Its number of tokens is unknown.
        self._ended += [stopped(rollout, self._version) for rollout in rollouts if rollout not in in_flight]

    def poll(self, *, wait: bool = True) -> list[RolloutResult]:
        """Wait for rollouts in flight and return them.

        If `Remote.concurrency` is set, or if a stage in flight has a stop rule, wait until one order has ended, so that the
        allocator can react. Otherwise wait for the whole wave, and return the rollouts in the order of submission.
        """
        results, self._ended = self._ended, []
        wanted = [future for future, (order, _) in self._in_flight.items() if self._is_wanted(order)]
        if wait and wanted and not results:
            one_at_a_time = self.service.remote.concurrency is not None or any(
                order.stage in self.stopping for order, _ in self._in_flight.values()
            )
            self.thread.wait(wanted, one=one_at_a_time)
        elif wait and self._in_flight and not results and not self.capacity():
            # All slots are taken by rollouts that were told to stop and have not ended. Wait for one of them, because the
            # caller would otherwise call again at once.
            self.thread.wait(self._in_flight, one=True)
        return results + self._take_in()

    def drain(self) -> list[RolloutResult]:
        """Wait for all rollouts in flight and return them. The service bills these rollouts in any case."""
        self.thread.wait(self._in_flight)
        return self.poll(wait=False)

    def load_weights(self, version: int) -> None:
        self._version = version  # the next `Service.sampler` has the new weights

    def close(self) -> None:
        self.thread.close()
        self._in_flight.clear()
        self._stopped.clear()
        self._ended.clear()

    def _is_wanted(self, order: Order) -> bool:
        return not self._stopped.issuperset(order.rollouts)

    def _take_in(self) -> list[RolloutResult]:
        # Check each order only once. An order that ends during this call is returned by the next call.
        ended = [future for future in self._in_flight if future.done()]
        for future in ended:
            self._count_failures(future.result())
        results: list[RolloutResult] = []
        for future in ended:
            order, version = self._in_flight.pop(future)
            results += self._results(future.result(), order, version)
        self._log.flush()
        return results

    def _count_failures(self, played: Sequence[EndedRollout]) -> None:
        """Raise an error if the service has stopped answering. Otherwise an outage would look like prompts that cannot be
        scored.
        """
        if any(rollout.answered for rollout in played):
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= self.service.remote.give_up_after:
            reason = played[0].outcome.reason if isinstance(played[0].outcome, Unscored) else ""
            raise ServiceFailed(
                f"the last {self._failures} requests have no answer; the newest failed with: {reason}; fix the cause, then "
                "resume the run"
            )

    def _results(self, played: Sequence[EndedRollout], order: Order, version: int) -> list[RolloutResult]:
        results: list[RolloutResult] = []
        for trajectory, outcome, text, _ in played:
            rollout = trajectory.rollout
            is_stopped = rollout in self._stopped
            result = RolloutResult(
                rollout=rollout,
                outcome=Unscored("stopped") if is_stopped else outcome,
                tokens=trajectory.length,
                version=version,
                truncated=trajectory.truncated,
                cancelled=is_stopped,
                uncertainty=uncertainty_of(trajectory.logprobs),
            )
            results.append(result)
            if self._log.wanted:
                asked = (
                    self.episodes.prompts.prompt_set.text(order.prompt) if isinstance(self.episodes, Rewarded) else None
                )
                self._log.add(result, order, self.episodes.keys[order.prompt], text, prompt=asked)
            self._stopped.discard(rollout)
            if result.is_scored:
                self.generations[rollout] = trajectory
        return results
