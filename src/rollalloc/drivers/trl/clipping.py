"""Clips gradients under TRL by the running mean of their norms, in addition to TRL's constant `max_grad_norm`."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rollalloc.train.clipping import NormLimit


class AdaptiveClip(TrainerCallback):
    """Clips gradients to a multiple of the running mean of their norms, as rollalloc's own trainer does.

    See `rollalloc.train.clipping.NormLimit`. TRL has clipped to `max_grad_norm` before, so a larger norm counts as that.

    Args:
        trainer: TRL's trainer. Every process must have the whole model.
        factor: the multiple, at least 1; None turns it off.

    Attributes:
        factor: as given.

    Raises:
        ValueError: `factor` is out of its range, the model is sharded, or `max_grad_norm` is 0.
    """

    def __init__(self, trainer: Any, factor: float | None) -> None:
        if factor is not None and not 1 <= factor < inf:
            raise ValueError(
                f"adaptive_clip must be a multiple of the mean gradient norm, at least 1 and finite, or None; got {factor!r}"
            )
        if factor is not None and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ValueError(
                f"adaptive_clip={factor} needs the whole gradient on every process, but FSDP or DeepSpeed shard it; leave "
                "it out"
            )
        if factor is not None and not trainer.args.max_grad_norm > 0:
            raise ValueError(
                f"adaptive_clip={factor} goes with a max_grad_norm above 0, got {trainer.args.max_grad_norm}; TRL's default "
                "is 1.0"
            )
        self.factor = factor
        self._limit = self._begun()

    def _begun(self, mean: float | None = None) -> NormLimit:
        return NormLimit(most=inf, factor=self.factor, mean=mean)

    def begin(self, saved: Tensor | None = None) -> None:
        """Begin a run, or go on from the mean norm that `to_save` returned."""
        self._limit = self._begun(None if saved is None else float(saved))

    def to_save(self) -> Tensor | None:
        """The mean norm, for a checkpoint; None if it is off, or before the first step."""
        mean = self._limit.mean
        return None if self.factor is None or mean is None else torch.tensor(mean, dtype=torch.float64)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
        if self.factor is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self._limit.value)
            self._limit.saw(float(norm))
