"""A model's weights by name: those that are trained, as they are saved, sent and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rollalloc.core.packing import exact_keys


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters that are trained, and saved buffers, by name; those that are tied once."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in saved}
    return dict(trained(model)) | buffers


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A model's parameters that are not frozen, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def load_weights(model: torch.nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Let a model have the weights that `weights_of` gave of one like it; `ValueError` where they are of another one."""
    check_weights(model, saved)
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            tensor.copy_(saved[name])


def check_weights(model: torch.nn.Module, saved: Mapping[str, Tensor], what: str = "weights") -> None:
    """Refuse, by a `ValueError`, weights that are not of a model like this; `what` names them."""
    here = weights_of(model)
    exact_keys(saved, here, what)
    for name, tensor in here.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"{what}: {name} must have shape {tuple(tensor.shape)}, got {tuple(saved[name].shape)}; of another model"
            )
