"""Checkpoints of the asynchronous trainer: the allocator's state, and the rollouts whose rows the trainer has not seen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rollalloc.drivers.trl.callback import checkpoint_of, load, save
from rollalloc.experimental.trl_async.worker import AllocatedWorker

log = logging.getLogger(__name__)


class AsyncAllocationCallback(TrainerCallback):
    """Saves a worker's allocation with the trainer's checkpoints, and loads it when the trainer resumes.

    It has to be among the callbacks before TRL's own that starts the worker. What is saved is the same as
    `rollalloc.drivers.trl` saves, of a moment between two turns of the worker: a batch that is outstanding then is on the
    queue again after a load; what was being generated is generated again.

    Args:
        worker: TRL's.
        again: starts the worker where TRL's own callback will not, as in a second training.
        accept_recipe: resume under this recipe although the checkpoint was saved under another.
        accept_data: resume although prompts of the checkpoint's data set are gone.

    Attributes:
        resume_from: the checkpoint that the trainer is about to resume from; None: the one of that step in its folder.
    """

    def __init__(
        self, worker: AllocatedWorker, again: Callable[[], None], *, accept_recipe: bool, accept_data: bool
    ) -> None:
        self._worker, self._again = worker, again
        self._accept_recipe, self._accept_data = accept_recipe, accept_data
        self.resume_from: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        allocation, steps = self._worker.allocation, self._worker.optimizer
        if state.global_step:
            load(
                allocation,
                self.resume_from or checkpoint_of(args, state),
                accept_recipe=self._accept_recipe,
                accept_data=self._accept_data,
            )
        elif steps.began and allocation.allocator.batch:
            log.warning("the last training ended between an optimizer step and its end; its batch counts as trained")
            allocation.trained()
        steps.began = False
        steps.watch(optimizer)
        self._again()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._worker.optimizer.begin()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save:
            self._worker.between_turns(lambda: save(self._worker.allocation, checkpoint_of(args, state)))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if why := self._worker.allocation.finished:
            log.warning("the recipe has finished: %s", why)
