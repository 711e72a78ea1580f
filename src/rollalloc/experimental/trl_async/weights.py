"""The trainer's weights on their way to what generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class WeightMailbox:
    """TRL's `WeightTransferProtocol`: keeps a copy of what the trainer sent last, for the worker to take when it can.

    So nothing is paused: the trainer goes on as soon as the copy is made, and generation, which takes it between two steps
    of decoding, never sees half of an update.
    """

    def __init__(self) -> None:
        self._newest: dict[str, Tensor] = {}

    @property
    def newest(self) -> Mapping[str, Tensor]:
        """By name, what was sent last; a later sending makes another mapping."""
        return self._newest

    def init_weight_transfer(self) -> None:
        """Nothing is to be set up."""

    def pause(self) -> None:
        """Nothing is to be paused."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Copy what is sent, to the end."""
        self._newest = {name: tensor.detach().clone() for name, tensor in iterator}

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """Free the copy."""
        self._newest = {}


def take_over(model: nn.Module, sent: Mapping[str, Tensor]) -> None:
    """Let the model that generates have the weights that the trainer sent, rounded to its own type.

    Args:
        model: plain, of the same architecture.
        sent: one tensor a parameter, by the names of the plain model.

    Raises:
        ValueError: parameters missing or unknown, or of another shape; names them.
    """
    here = dict(model.named_parameters())
    if missing := sorted(here.keys() ^ sent.keys()):
        raise ValueError(
            f"the trainer's weights are not those of the model that generates: {len(missing)} names are on one side only, "
            f"{', '.join(missing[:5])}; give the trainer a plain causal language model, with LoRA through peft_config"
        )
    with torch.no_grad():
        for name, parameter in here.items():
            if parameter.shape != sent[name].shape:
                raise ValueError(
                    f"expected {name} of shape {tuple(parameter.shape)}, the trainer sent {tuple(sent[name].shape)}; both "
                    "must be of the same model"
                )
            parameter.copy_(sent[name])
