"""A model's trained weights by name: to save, to send and to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rollalloc.core.packing import exact_keys


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers by name. A tied parameter occurs only once."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in saved}
    return dict(trained(model)) | buffers


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A model's parameters that require gradients, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def load_weights(model: torch.nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy weights into a model of the same kind.

    Raises:
        ValueError: names or shapes differ from the model's.
    """
    check_weights(model, saved)
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            tensor.copy_(saved[name])


def check_weights(model: torch.nn.Module, saved: Mapping[str, Tensor], what: str = "weights") -> None:
    """Raise an error if weights do not fit a model.

    Args:
        model: the model.
        saved: weights by name.
        what: name of the weights, for the error message.

    Raises:
        ValueError: names or shapes differ from the model's.
    """
    expected = weights_of(model)
    exact_keys(saved, expected, what)
    for name, tensor in expected.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"{what}: {name} must have shape {tuple(tensor.shape)}, got {tuple(saved[name].shape)}; "
                "these are the weights of another model"
            )
