"""Averaged weights under TRL: what generates, is evaluated and is saved is the running mean of what is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rollalloc.core.recipe import at_least
from rollalloc.drivers.trl.checks import steps_per_batch
from rollalloc.drivers.trl.failures import uninterrupted
from rollalloc.models.weights import check_weights, load_weights, trained, weights_of
from rollalloc.train.averaging import kept_share
from rollalloc.train.checkpoint import TRAINED


class AveragedWeights(TrainerCallback):
    """The running mean of a trainer's weights, as rollalloc's own trainer has it (`rollalloc.train.averaging`).

    While gradients are taken the model has the weights that are trained; `sampling` lets it have the mean, which it also has
    when training is over. A checkpoint's model is the mean; the folder `rollalloc` in it has the weights that are trained.

    Args:
        trainer: the trainer, on every process with the whole model.
        window: rows that the mean spans, at most, 0 or more; 0: the model's weights are what they are.

    Attributes:
        window: as given.

    Raises:
        ValueError: a window out of its range, a model of which each process has a part, or one that is not in float32.
    """

    def __init__(self, trainer: Any, window: int) -> None:
        at_least("averaging", window, 0)
        if window and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ValueError(
                f"averaging={window} needs the whole model on every process, but FSDP or DeepSpeed shard it; leave it out, "
                'and let the learning rate fall (lr_scheduler_type="linear")'
            )
        rounded = (
            {str(each.dtype) for _, each in trained(trainer.model) if each.dtype != torch.float32} if window else ()
        )
        if rounded:
            raise ValueError(
                f"averaging={window} needs weights in float32, for in {', '.join(rounded)} a mean stands still; load the "
                "model in float32 (model_init_kwargs={'dtype': 'float32'}) and let bf16=True compute in half precision"
            )
        self.window, self._trainer = window, trainer
        self._other: list[Tensor] = []  # the mean while the model has the trained weights, and the other way round
        self._has_mean = False  # whether the model has the mean

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within it the model has the weights that sample; after it, whatever was raised, those that it had before."""
        had_mean = self._has_mean
        try:
            self._give(mean=True)
            yield
        finally:
            self._give(mean=had_mean)

    def begin(self, saved: Mapping[str, Tensor] | None) -> None:
        """Training begins: let the model have the weights that are trained.

        Args:
            saved: those of the checkpoint that is resumed from, whose mean the model has; None: training starts, or goes on
                after `train` ended or was broken off.
        """
        if saved is not None:
            with uninterrupted():
                self._other, self._has_mean = self._copies(), False
                load_weights(self._model, saved)
        elif self.window and not self._other:
            self._other = self._copies()
        self._give(mean=False)

    def check(self, saved: Mapping[str, Tensor] | None, place: Path) -> None:
        """Refuse a checkpoint that cannot be gone on from.

        Args:
            saved: its weights that are trained; None: it has none.
            place: its folder.

        Raises:
            ValueError: it has such weights and the run averages none, or the other way round, or they are of another model.
        """
        if (saved is not None) != bool(self.window):
            was = "without averaging" if saved is None else "with averaging"
            raise ValueError(
                f"averaging={self.window}, but {place} was saved {was}; resume with the setting it was saved with"
            )
        if saved is not None:
            check_weights(self._model, saved, f"{place}: {TRAINED} weights")

    def to_save(self) -> dict[str, Tensor] | None:
        """The weights that are trained, for a checkpoint; None where none are averaged."""
        return weights_of(self._model) if self.window else None

    @property
    def _model(self) -> torch.nn.Module:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in trained(self._model)]

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters()]

    def _give(self, *, mean: bool) -> None:
        """Let the model have the mean or what is trained: all tensors or, if anything is raised, none."""
        if not self._other or mean == self._has_mean:
            return
        parameters = self._parameters()
        before = [parameter.data for parameter in parameters]
        with uninterrupted():  # a signal's exception is raised at its end, when the swap is whole
            try:
                for parameter, tensor in zip(parameters, self._other, strict=True):
                    parameter.data = tensor
            except BaseException:
                for parameter, tensor in zip(parameters, before, strict=True):
                    parameter.data = tensor
                raise
            self._other, self._has_mean = before, mean

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        batch = self._trainer.allocation.allocator.batch
        if self.window and batch is not None:
            new, rows = [parameter.data for parameter in self._parameters()], len(batch.rows) / steps_per_batch(args)
            torch._foreach_lerp_(self._other, new, 1 - kept_share(self.window, state.global_step + 1, rows))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._give(mean=True)
