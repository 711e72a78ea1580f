"""Carrying out orders at a service: what is under way, and what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Cancelled, Order
from rollalloc.drivers.tinker.episodes import EndedRollout, Episodes, Wave
from rollalloc.drivers.tinker.service import Service, ServiceFailed
from rollalloc.drivers.tinker.trajectories import Trajectory, pack, unpack
from rollalloc.generate.outcomes import Outcomes, RolloutLog, RolloutResult, tell, uncertainty_of
from rollalloc.generate.sampling import Sampling
from rollalloc.rewards.function import Unscored

log = logging.getLogger(__name__)


_CLOSING_S = 10.0  # that what is under way may take to end once it is cancelled


class Remotely:
    """An event loop in a thread of its own, in which orders are played; begun when something is.

    Args:
        patience_s: that the loop may be held up by what is played in it, which should await instead.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, episodes: Episodes, order: Order, wave: Wave) -> Future[list[EndedRollout]]:
        """Play an order meanwhile."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=self._loop.run_forever, name="rollalloc-tinker", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(episodes.play(order, wave), self._loop)

    def wait(self, futures: Iterable[Future[list[EndedRollout]]], *, one: bool = False) -> None:
        """Until all of these have ended, or one has.

        Raises:
            ServiceFailed: what is played holds the loop up, so that nothing in it ends.
        """
        left = list(futures)
        while left:
            ended, others = wait(left, self._patience_s, FIRST_COMPLETED)
            left = [] if one and ended else list(others)
            if left and not ended:
                self._check_pulse()

    def all_of(self, futures: Iterable[Future[list[EndedRollout]]]) -> list[EndedRollout]:
        """What all of these came to, in their order.

        Raises:
            ServiceFailed: as `wait`.
        """
        futures = list(futures)
        self.wait(futures)
        return [each for future in futures for each in future.result()]

    def _check_pulse(self) -> None:
        assert self._loop is not None
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(self._patience_s)
        except TimeoutError:
            raise ServiceFailed(
                f"something that is played does not return for more than {self._patience_s:g} s, and holds up all else: an "
                "environment must await what it waits for; once that is mended, resume the run"
            ) from None

    def close(self) -> None:
        """End it, and what is under way."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        with suppress(TimeoutError):  # what does not end then is left to itself
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(_CLOSING_S)
        loop.call_soon_threadsafe(loop.stop)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class RemoteEngine:
    """Plays the orders of an allocator at a service (`generate.engine.RolloutEngine`).

    The SDK cannot abort: a rollout that is to be stopped ends by itself, is paid to its end, and is told as cancelled
    with all its tokens. Of several turns, none is begun any more.

    Args:
        service: samples.
        episodes: what the orders' prompts are.
        sampling: how.
        remotely: where they are played.
        path: of a log of rollouts; None: none.

    Attributes:
        generations: by rollout, those that have a score and are not released.
        outcomes: what came of all rollouts.
    """

    def __init__(
        self, service: Service, episodes: Episodes, sampling: Sampling, remotely: Remotely, path: Path | None
    ) -> None:
        self.service, self.episodes, self.sampling, self.remotely = service, episodes, sampling, remotely
        self.generations: dict[int, Trajectory] = {}
        self.outcomes = Outcomes()
        self._log = RolloutLog(path)
        self._under_way: dict[Future[list[EndedRollout]], tuple[Order, int]] = {}
        self._stopped: set[int] = set()
        self._again = Actions()  # of a run that was resumed, what was under way
        self._failures = 0  # requests in a row without an answer

    def capacity(self) -> int | None:
        """How many rollouts may be begun; in waves any number, once the last wave is over."""
        most, under_way = (
            self.service.remote.concurrency,
            sum(len(order.rollouts) for order, _ in self._under_way.values()),
        )
        under_way += sum(len(order.rollouts) for order in self._again.generate)
        if most is not None:
            return max(0, most - under_way)
        return (
            0 if self._again.generate or any(self._is_wanted(order) for order, _ in self._under_way.values()) else None
        )

    def take_up(self, outstanding: Actions) -> None:
        """Have what was under way when a run was saved played again, at the next `carry_out`."""
        self._again = outstanding

    def advance(self, allocator: Allocator) -> Actions:
        """Ask for as much as may be begun, and have it carried out."""
        actions = allocator.ask(self.capacity())
        self.carry_out(actions, allocator)
        return actions

    def carry_out(self, actions: Actions, allocator: Allocator) -> None:
        """Release and begin what the actions say; unless there is a batch to train on, wait for what ends, and tell it.

        In waves all that is wanted is waited for and told in the order of the orders, but for stages with a stop rule,
        which is asked after each end.
        """
        for rollout in actions.release:
            self.generations.pop(rollout, None)
        self._stopped.update(actions.cancel)
        again, self._again = self._again, Actions()
        if again.cancel:  # what it cost is not known, and it need not be paid twice
            allocator.tell([Cancelled(rollout, 0) for rollout in again.cancel])
        for order in (*again.generate, *actions.generate):
            self._begin(order, allocator.version)
        if actions.batch is not None or actions.finished is not None:
            return
        wanted = [future for future, (order, _) in self._under_way.items() if self._is_wanted(order)]
        if not wanted:
            return
        eager = self.service.remote.concurrency is not None or any(
            order.stage in allocator.recipe.stopping for order, _ in self._under_way.values()
        )
        self.remotely.wait(wanted, one=eager)
        self._tell_ended(allocator)

    def drain(self, allocator: Allocator) -> None:
        """Wait for all that is under way, which is paid in any case, and tell it."""
        self.remotely.wait(self._under_way)
        self._tell_ended(allocator)

    def go_on(self, allocator: Allocator) -> None:
        """Nothing: the service goes on by itself."""

    def before_evaluation(self, allocator: Allocator) -> None:
        self.go_on(allocator)

    def updated(self, version: int) -> None:
        """Nothing: the next sampler has the weights."""

    def close(self) -> None:
        """End the thread in which orders are played; what is under way is played again, should the run go on."""
        self.remotely.close()
        broken_off = tuple(order for order, _ in self._under_way.values())
        self._again = self._again._replace(generate=self._again.generate + broken_off)
        self._under_way.clear()

    def latency(self) -> None:
        """Nothing: how fast the service decodes is not known."""

    def figures(self) -> dict[str, Any]:
        """What was scored since the last call, trained on or not."""
        return self.outcomes.figures()

    def _is_wanted(self, order: Order) -> bool:
        return not self._stopped.issuperset(order.rollouts)

    def _begin(self, order: Order, version: int) -> None:
        wave = Wave(self.service, self.service.sampler(), self.sampling, self._stopped.__contains__)
        self._under_way[self.remotely.start(self.episodes, order, wave)] = order, version

    def _tell_ended(self, allocator: Allocator) -> None:
        ended = [(future.result(), *self._under_way[future]) for future in self._under_way if future.done()]
        for played, _, _ in ended:
            self._count_failures(played)
        for future in [future for future in self._under_way if future.done()]:
            del self._under_way[future]
        for played, order, version in ended:
            self._tell(played, order, version, allocator)
        self._log.flush()

    def _count_failures(self, played: Sequence[EndedRollout]) -> None:
        """Give up where the service does not answer any more, before that is told of the prompts."""
        if any(each.answered for each in played):
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= self.service.remote.give_up_after:
            reason = played[0].outcome.reason if isinstance(played[0].outcome, Unscored) else ""
            raise ServiceFailed(
                f"the last {self._failures} requests have no answer, the newest: {reason}; once that is mended, resume"
            )

    def _tell(self, played: Sequence[EndedRollout], order: Order, version: int, allocator: Allocator) -> None:
        results: list[RolloutResult] = []
        for trajectory, outcome, text, _ in played:
            rollout, tokens, cut = trajectory.rollout, trajectory.length, trajectory.truncated
            is_stopped = rollout in self._stopped
            outcome = Unscored("stopped") if is_stopped else outcome
            if self._log.wanted:
                key = self.episodes.keys[order.prompt]
                self._log.add(rollout, order, key, version, outcome, tokens=tokens, truncated=cut, text=text)
            result = RolloutResult(
                rollout=rollout,
                outcome=outcome,
                tokens=tokens,
                version=version,
                truncated=cut,
                cancelled=is_stopped,
                uncertainty=uncertainty_of(trajectory.logprobs),
            )
            results.append(result)
            self._stopped.discard(rollout)
            if result.is_scored:
                self.generations[rollout] = trajectory
        tell(allocator, results, outcomes=self.outcomes)

    # --------------------------------------------------------------------------------------------- saving and loading

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything but what is under way, which is begun again, as plain data and tensors."""
        described, tensors = pack(list(self.generations.values()))
        return {"trajectories": described, **self.outcomes.state()}, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: it does not fit together.
        """
        held = unpack(state["trajectories"], tensors, "rollouts")
        self.outcomes.load_state({name: value for name, value in state.items() if name != "trajectories"})
        self.generations = {each.rollout: each for each in held}
