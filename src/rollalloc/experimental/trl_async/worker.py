"""TRL's rollout worker under a recipe: asks the core, has its orders carried out, and puts batches on the queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from math import inf
from queue import Empty, Queue, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from torch import Tensor
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from rollalloc.core.events import Batch
from rollalloc.drivers.trl.allocation import Allocation
from rollalloc.drivers.trl.figures import batch_figures, generated_figures, running_totals
from rollalloc.drivers.trl.steps import OptimizerSteps
from rollalloc.experimental.trl_async.judge import Judge
from rollalloc.experimental.trl_async.roller import Roller
from rollalloc.experimental.trl_async.samples import samples_of
from rollalloc.experimental.trl_async.weights import WeightMailbox, take_over

log = logging.getLogger(__name__)

_IDLE_S = 0.02  # where the run is over, or the trainer waits
_STOP_S = 30.0  # for the thread to end: at most a turn, in which nothing is waited for longer than a second
_T = TypeVar("_T")


class AllocatedWorker:
    """TRL's `RolloutWorkerProtocol`, under a recipe.

    One thread has the core to itself. It asks for orders with what slots are free, tells each rollout when it is scored, and
    puts a batch's rows on the queue at once; it goes on with the next batch as far as the recipe's `max_staleness` lets it.
    The batch counts as trained, and the core hears `Updated`, when the trainer says that its weights have a new version.

    Args:
        allocation: the recipe at work.
        begin: makes what generates, once the prompts' features are there.
        mailbox: gives the trainer's weights.
        steps: micro-batches of an optimizer step, and rows of each; a full batch of the recipe.
        end_id: a token of the vocabulary.
        max_staleness: updates; the trainer drops older rows unseen.

    Attributes:
        allocation: the same.
        rollout_buffer: batches' rows; as many as the core lets be outstanding.
        metrics_queue: figures of each batch, once it is trained.
        optimizer: whether it began a step on the outstanding batch.
    """

    def __init__(
        self,
        allocation: Allocation,
        begin: Callable[[Judge], Roller],
        mailbox: WeightMailbox,
        steps: tuple[int, int],
        end_id: int,
        max_staleness: int,
    ) -> None:
        self._max_staleness = max_staleness
        self.allocation, self._begin, self._mailbox = allocation, begin, mailbox
        self._steps, self._end_id = steps, end_id
        self.rollout_buffer: Queue[RolloutSample] = Queue()
        self.metrics_queue: Queue[dict[str, float]] = Queue()
        self.optimizer = OptimizerSteps()
        self._thread: threading.Thread | None = None
        self._judge: Judge | None = None
        self._stopping = threading.Event()
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any] | None]] = SimpleQueue()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._beat = 0.0
        self._version, self._offset = 0, 0  # TRL's version of the weights, and what it is ahead of the core's
        self._figures: dict[str, float] = {}  # of the outstanding batch

    # -------------------------------------------------------------------------------------------- what TRL calls

    def start(self) -> None:
        """Begin, or begin again; a batch that was not trained comes first. Does nothing where it is at work.

        Raises:
            RuntimeError: the thread of a run before has not ended.
        """
        if self.running:
            if self._stopping.is_set():
                raise RuntimeError(
                    "the rollout worker of the run before has not ended: what generates does not answer; begin a new "
                    "program and resume from the newest checkpoint"
                )
            return
        self._drain()
        self._error, self.allocation.finished = None, None
        self._stopping.clear()
        self._beat, self._judge = inf, Judge()  # there is no turn yet: features take the time that they take
        self._offset = self._version - self.allocation.allocator.version
        self._thread = threading.Thread(
            target=self._run, args=(self._judge, self._mailbox.newest), name="rollalloc rollout worker", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End what generates and scores; what was in flight is generated again should the run go on."""
        self._stopping.set()
        if self._judge is not None:
            self._judge.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                log.warning("the rollout worker has not ended within %.0f s; what generates does not answer", _STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """The trainer's weights have a new version, and are sent: the outstanding batch is trained.

        Raises:
            RuntimeError: there was no optimizer step since the version before.
        """
        trained, self.optimizer.began = self.optimizer.began, False
        if self.running and not trained:
            raise RuntimeError(
                f"the trainer's weights have version {model_version} without an optimizer step, and a batch would count as "
                "trained that is not; let the trainer alone send them, once after each step"
            )
        self._version = model_version
        if self.running and not self._stopping.is_set():
            figures, self._figures = self._figures, {}
            if figures:
                self.metrics_queue.put(figures)
            self._asked.put((partial(self._update, model_version, self._mailbox.newest), None))
        elif trained:  # the thread died meanwhile
            self.allocation.trained()

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the worker, if anything did.

        Args:
            stale_after_s: seconds, above 0, that one reward call or one step of generation may take.

        Raises:
            Exception: that of a reward function, of a rule or of what generates, as it was raised there.
            RuntimeError: the worker is not running, or hangs.
        """
        if self._error is not None:
            raise self._error
        if not self.running:
            raise RuntimeError("the rollout worker is not running, so that no rows will come; train() starts it")
        busy = 0.0 if self._judge is None else self._judge.busy_s()
        if busy > stale_after_s:
            raise RuntimeError(
                f"a reward function has not answered for {busy:.0f} s, and heartbeat_stale_after_s={stale_after_s:g}; give "
                "one that cannot hang: rollalloc.rewards.frameworks.Reward(WorkerScorer(...)) calls it in processes that "
                "are killed"
            )
        if (quiet := monotonic() - self._beat - busy) > stale_after_s:  # a turn may wait for a reward
            raise RuntimeError(
                f"what generates has not answered for {quiet:.0f} s, and heartbeat_stale_after_s={stale_after_s:g}; let "
                "fewer rollouts run at once (max_inflight_tasks), or raise it"
            )

    # ---------------------------------------------------------------------------------------- what the driver calls

    @property
    def running(self) -> bool:
        """Whether its thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def wait_for_rows(self, stale_after_s: float) -> bool:
        """Wait until there are rows on the queue; False where the recipe has finished and there will be none.

        Raises:
            Exception: as `check_health`.
        """
        while self.rollout_buffer.empty():
            with self._changed:
                over = self.allocation.finished is not None and self.rollout_buffer.empty()
            if over:
                return False
            self.check_health(stale_after_s)
            with self._changed:
                self._changed.wait_for(lambda: not self.rollout_buffer.empty(), _IDLE_S)
        return True

    def between_turns(self, work: Callable[[], _T]) -> _T:
        """Do something with the allocation while the worker does nothing with it; returns what it returns.

        Raises:
            Exception: that of the work, or what ended the worker.
        """
        if self._error is not None:
            raise self._error  # what it left behind may be half of a turn
        if not self.running:
            return work()
        future: Future[_T] = Future()
        self._asked.put((work, future))
        while True:
            try:
                return future.result(timeout=_IDLE_S)
            except TimeoutError:
                if future.done():  # just now, or with such an error of its own
                    return future.result()
                if not self.running and not future.done():
                    return self.between_turns(work)

    # ------------------------------------------------------------------------------------------------- the thread

    def _run(self, judge: Judge, weights: Mapping[str, Tensor]) -> None:
        try:
            self.allocation.prepare()
            self._roller = self._begin(judge)
            take_over(self._roller.policy.model, weights)
            if batch := self.allocation.allocator.batch:
                self._hand_over(batch)
            try:
                while not self._stopping.is_set():
                    self._do_asked()
                    self._turn()
                self._do_asked()
            finally:
                self._roller.close()
        except CancelledError as error:
            if self._stopping.is_set():  # `stop` cancelled what was waited for
                self._do_asked()
            else:  # a reward function's own
                self._error = error
        except BaseException as error:
            self._error = error
        finally:
            judge.close()

    def _turn(self) -> None:
        self._beat = monotonic()
        if self.allocation.finished is not None:
            self._stopping.wait(_IDLE_S)
            return
        actions = self._roller.turn(self.allocation.allocator)
        if actions.batch is not None:
            self._hand_over(actions.batch)
        if actions.finished is not None:
            self.allocation.end(actions.finished)

    def _hand_over(self, batch: Batch) -> None:
        """Put a batch on the queue, and keep its figures until it is trained."""
        allocation = self.allocation
        if (oldest := max(batch.version - row.version for row in batch.rows)) > self._max_staleness:
            raise ValueError(
                f"a row of the batch is {oldest} updates old, and TRL drops rows older than "
                f"max_staleness={self._max_staleness} unseen; set it to {oldest} or more, as in the run before"
            )
        self._figures = generated_figures(allocation) | batch_figures(allocation, batch) | running_totals(allocation)
        allocation.generated, allocation.logged, allocation.failed = [], {}, 0
        rows = samples_of(
            batch,
            allocation.rollouts_of(batch.rows),
            allocation.rewards,
            steps=self._steps,
            offset=self._offset,
            end_id=self._end_id,
        )
        if batch.short_because is not None or len(batch.rows) < len(rows):
            log.warning(
                "a batch has %d rows of %d and is filled up with rows that teach nothing: %s",
                len(batch.rows),
                len(rows),
                batch.short_because or "rollouts failed, or groups had fewer rows",
            )
        with self._changed:
            for row in rows:
                self.rollout_buffer.put(row)
            self._changed.notify_all()

    def _update(self, model_version: int, weights: Mapping[str, Tensor]) -> None:
        """The batch is trained: the core hears of it, what generates gets the weights."""
        take_over(self._roller.policy.model, weights)
        self.allocation.trained()
        version = self.allocation.allocator.version
        if version + self._offset != model_version:
            raise RuntimeError(
                f"the trainer's weights have version {model_version}, and a batch of the recipe was to make it "
                f"{version + self._offset}; weights are sent once after each optimizer step, and by the trainer alone"
            )
        if not self._stopping.is_set():
            self._roller.updated(version)

    def _do_asked(self) -> None:
        while True:
            try:
                work, future = self._asked.get_nowait()
            except Empty:
                return
            if future is None:  # nobody waits for it: its error ends the worker
                work()
                continue
            try:
                made = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(made)

    def _drain(self) -> None:
        for queue in (self.rollout_buffer, self.metrics_queue, self._asked):
            while True:
                try:
                    queue.get_nowait()
                except Empty:
                    break
