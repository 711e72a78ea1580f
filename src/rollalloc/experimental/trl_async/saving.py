"""Checkpoints of the asynchronous trainer: the allocator's state, and the rollouts whose rows the trainer has not seen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rollalloc.drivers.trl.callback import AllocationCallback, checkpoint_of, save
from rollalloc.experimental.trl_async.worker import AllocatedWorker

log = logging.getLogger(__name__)


class AsyncAllocationCallback(AllocationCallback):
    """Saves a worker's allocation with the trainer's checkpoints, and loads it when the trainer resumes.

    It has to be among the callbacks before TRL's own that starts the worker. What is saved is of a moment between two turns
    of the worker: a batch that is outstanding then is on the queue again after a load; what was being generated is
    generated again.

    Args:
        worker: TRL's.
        again: starts the worker where TRL's own callback will not, as in a second training.
        accept_recipe: as `AllocationCallback`, like what follows.
    """

    def __init__(
        self, worker: AllocatedWorker, again: Callable[[], None], *, accept_recipe: bool, accept_data: bool
    ) -> None:
        super().__init__(
            worker.allocation, accept_recipe=accept_recipe, accept_data=accept_data, steps=worker.optimizer
        )
        self._worker, self._again = worker, again

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        self.begin(args, state, optimizer)
        self._again()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing: a recipe that is over has no rows on the queue."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing: the worker hears of each step by the version of the weights."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save:
            self._worker.between_turns(lambda: save(self.allocation, checkpoint_of(args, state)))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if why := self.allocation.finished:
            log.warning("the recipe has finished: %s", why)
