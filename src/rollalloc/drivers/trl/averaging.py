"""Averaged weights under TRL: what generates, is evaluated and is saved is the running mean of what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from rollalloc.core.recipe import at_least
from rollalloc.drivers.trl.checks import checkpoint_of, steps_per_batch
from rollalloc.models.weights import check_weights, load_weights, trained, weights_of
from rollalloc.train.averaging import kept_share

_TRAINED = "rollalloc-trained.safetensors"  # in a checkpoint, whose model is the mean


class AveragedWeights(TrainerCallback):
    """The running mean of a trainer's weights, as rollalloc's own trainer has it (`rollalloc.train.averaging`).

    While gradients are taken the model has the weights that are trained; `sampling` lets it have the mean, which it also has
    when training is over. A checkpoint's model is the mean, and a file beside it has the weights that are trained.

    Args:
        trainer: the trainer, on every process with the whole model.
        window: rows that the mean spans, at most, 0 or more; 0: the model's weights are what they are.

    Attributes:
        window: as given.
        resume_from: the checkpoint that the trainer is about to resume from; None: the one of that step in its folder.

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
        self.resume_from: Path | None = None
        self._other: list[Tensor] = []  # the mean while the model has what is trained, else that
        self._depth = 0  # of `sampling`
        self._over = False  # training is, and the model has the mean

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within it the model has the weights that sample."""
        outermost = bool(self._other) and not self._over and self._depth == 0
        self._depth += 1
        if outermost:
            self._swap()
        try:
            yield
        finally:
            self._depth -= 1
            if outermost:
                self._swap()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in trained(self._model)]

    @property
    def _model(self) -> torch.nn.Module:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def _swap(self) -> None:
        for at, parameter in enumerate(self._parameters()):
            parameter.data, self._other[at] = self._other[at], parameter.data

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin with the weights of now, or go on with those that are trained of the checkpoint that is resumed from."""
        place = (self.resume_from or checkpoint_of(args, state)) if state.global_step else None
        saved = None if place is None else self._trained_in(place)
        if self._over and place is None:  # else the model has what was loaded, the mean
            self._swap()
        elif self.window and (saved is not None or not self._other):
            self._other = [parameter.detach().clone() for parameter in self._parameters()]
        if saved is not None:
            load_weights(self._model, saved)
        self._over = False

    def _trained_in(self, place: Path) -> dict[str, Tensor] | None:
        """The weights that are trained in a checkpoint; None where none are averaged.

        Raises:
            ValueError: it has them and should not, or the other way round, or they are corrupt or of another model.
        """
        file = place / _TRAINED
        if file.exists() != bool(self.window):
            said = f"it has {'a' if file.exists() else 'no'} {_TRAINED}"
            raise ValueError(
                f"averaging={self.window}, but {place} was saved otherwise: {said}; resume as it was begun"
            )
        if not self.window:
            return None
        try:
            saved = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is no safetensors file ({error}); resume from another checkpoint") from None
        check_weights(self._model, saved, f"{file}: weights")
        return saved

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        batch = self._trainer.allocation.allocator.batch
        if self.window and batch is not None:
            new, rows = [parameter.data for parameter in self._parameters()], len(batch.rows) / steps_per_batch(args)
            torch._foreach_lerp_(self._other, new, 1 - kept_share(self.window, state.global_step + 1, rows))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.window and args.should_save:
            held = {name: tensor.detach().contiguous() for name, tensor in weights_of(self._model).items()}
            save_file(held, checkpoint_of(args, state) / _TRAINED)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.window and not self._over:
            self._swap()
            self._over = True
