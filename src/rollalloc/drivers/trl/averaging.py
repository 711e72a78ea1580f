"""Averaged weights under TRL: generates, evaluates and saves with a moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rollalloc.core.recipe import at_least
from rollalloc.drivers.trl.distributed import is_sharded, uninterrupted
from rollalloc.drivers.trl.generation import steps_per_batch
from rollalloc.models.checkpoint import TRAINED
from rollalloc.models.weights import check_weights, kept_share, load_weights, trained, weights_of


class AveragedWeights(TrainerCallback):
    """A moving average of a trainer's weights, as in rollalloc's own trainer (`rollalloc.models.weights`).

    During a training step the model has the trained weights. Within `sampling`, and after training, the model has the
    averaged weights. The model in a checkpoint has the averaged weights, too. The trained weights are in the checkpoint's
    folder `rollalloc`.

    Args:
        trainer: TRL's trainer. Every process must have the whole model.
        window: maximum number of rows over which the average is taken, at least 0. 0: no averaging.

    Attributes:
        window: the argument of this name.

    Raises:
        ValueError: `window` is negative, the model is sharded, or its weights are not in float32.
    """

    def __init__(self, trainer: Any, window: int) -> None:
        at_least("averaging", window, 0)
        if window and is_sharded(trainer):
            raise ValueError(
                f"averaging={window} needs the whole model on every process, but FSDP or DeepSpeed shard it; set "
                'averaging=0, and let the learning rate fall (lr_scheduler_type="linear")'
            )
        rounded = {str(each.dtype) for _, each in trained(trainer.model) if each.dtype != torch.float32}
        if window and rounded:
            raise ValueError(
                f"averaging={window} needs weights in float32: in {', '.join(rounded)}, rounding would keep "
                "the average from changing; load the model in float32 (model_init_kwargs={'dtype': 'float32'}) and let "
                "bf16=True compute in half precision"
            )
        self.window, self._trainer = window, trainer
        # The parameters are listed only once, when training begins, because searching the model is slow.
        self._parameters: list[torch.nn.Parameter] = []
        self._other: list[Tensor] = []  # the trained weights while the model has the average, otherwise the average
        self._has_mean = False  # whether the model has the average now

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """A context in which the model has the averaged weights. At its end, even after an error, the model gets its
        previous weights back.
        """
        had_mean = self._has_mean
        try:
            self._give(mean=True)
            yield
        finally:
            self._give(mean=had_mean)

    def begin(self, saved: Mapping[str, Tensor] | None) -> None:
        """Give the model the trained weights when training begins.

        Args:
            saved: the trained weights of the checkpoint that the run resumes from. (The model has the checkpoint's
                averaged weights.) None: the run does not resume.
        """
        self._parameters = [parameter for _, parameter in trained(self._model)]
        if saved is not None:
            with uninterrupted():
                self._other, self._has_mean = self._copies(), False
                load_weights(self._model, saved)
        elif self.window and not self._other:
            self._other = self._copies()
        self._give(mean=False)

    def check(self, saved: Mapping[str, Tensor] | None, place: Path) -> None:
        """Raise an error if the run cannot resume from a checkpoint.

        Args:
            saved: the trained weights in the checkpoint; None if the checkpoint was saved without averaging.
            place: folder of the checkpoint.

        Raises:
            ValueError: the checkpoint and the run differ in whether they use averaging, or the weights are of another model.
        """
        if (saved is not None) != bool(self.window):
            was = "without averaging" if saved is None else "with averaging"
            raise ValueError(
                f"averaging={self.window}, but {place} was saved {was}; resume with the setting it was saved with"
            )
        if saved is not None:
            check_weights(self._model, saved, f"{place}: {TRAINED} weights")

    def to_save(self) -> dict[str, Tensor] | None:
        """The trained weights, for a checkpoint; None without averaging."""
        return weights_of(self._model) if self.window else None

    @property
    def _model(self) -> torch.nn.Module:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    def _give(self, *, mean: bool) -> None:
        """Swap weights if needed, so that the model has the averaged or the trained weights. An error undoes the swap."""
        if not self._other or mean == self._has_mean:
            return
        before = [parameter.data for parameter in self._parameters]
        with uninterrupted():  # a signal must not interrupt the swap
            try:
                for parameter, tensor in zip(self._parameters, self._other, strict=True):
                    parameter.data = tensor
            except BaseException:
                for parameter, tensor in zip(self._parameters, before, strict=True):
                    parameter.data = tensor
                raise
            self._other, self._has_mean = before, mean

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        batch = self._trainer.allocation.allocator.batch
        if self.window and batch is not None:
            new, rows = [parameter.data for parameter in self._parameters], len(batch.rows) / steps_per_batch(args)
            torch._foreach_lerp_(self._other, new, 1 - kept_share(self.window, state.global_step + 1, rows))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._give(mean=True)
