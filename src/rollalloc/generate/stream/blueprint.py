"""A model's description as plain data, and its weights in shared memory. Another process builds the model from both.

The model itself cannot always be sent to a process. It may have objects that cannot be pickled, such as the hooks that
transformers adds when hidden states are requested.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

_ELSE = "so another process cannot build it: generate in this process (--no-overlap), or use --engine sync"


@dataclass(frozen=True)
class Blueprint:
    """The description of a model, without its weights.

    Attributes:
        kind: the model's class. Only its name is sent.
        config_kind: the class of its configuration.
        config: its configuration.
        attention: name of its attention implementation.
        same: maps each name of a parameter or buffer to the first name of the same tensor. Only tied tensors have
            several names.
        trained: first names of the parameters that are not frozen.
    """

    kind: type[PreTrainedModel]
    config_kind: type[PretrainedConfig]
    config: Mapping[str, Any]
    attention: str | None
    same: Mapping[str, str]
    trained: frozenset[str]

    @staticmethod
    def of(model: PreTrainedModel) -> Blueprint:
        """The description of a model. Raise a ValueError if its class and configuration would give another model."""
        firsts: dict[int, str] = {}
        here = _tensors(model)
        made = Blueprint(
            kind=type(model),
            config_kind=type(model.config),
            config=model.config.to_dict(),
            attention=model.config._attn_implementation,
            same={name: firsts.setdefault(id(tensor), name) for name, tensor in here.items()},
            trained=frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        )
        try:
            there = _tensors(pickle.loads(pickle.dumps(made))._empty())
        except Exception as error:  # a model's class may raise anything
            raise ValueError(
                f"{type(model).__name__} cannot be built from its configuration ({error}), {_ELSE}"
            ) from error
        if others := [name for name in here.keys() | there.keys() if _shape(here, name) != _shape(there, name)]:
            first = min(others)
            what = f"{first} has shape {_shape(here, first)}, not {_shape(there, first)}"
            raise ValueError(
                f"{type(model).__name__} has other weights than a model built from its configuration ({what}), {_ELSE}"
            )
        return made

    def first(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The model's parameters and buffers by their first names, including buffers that are left out of checkpoints."""
        return {name: tensor for name, tensor in _tensors(model).items() if self.same[name] == name}

    def built(self, tensors: Mapping[str, Tensor], device: torch.device) -> PreTrainedModel:
        """Build the model, in eval mode, with copies of `tensors`: parameters and buffers by their first names."""
        model = self._empty()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        made: dict[str, Tensor] = {}
        for name, first in self.same.items():
            if first not in made:
                tensor = tensors[first].to(device, copy=True)
                is_parameter = first in parameters
                made[first] = nn.Parameter(tensor, requires_grad=first in self.trained) if is_parameter else tensor
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made[first])
        return model.eval()

    def _empty(self) -> PreTrainedModel:
        """A model of this kind on the device "meta", so that its weights take no memory."""
        config = self.config_kind.from_dict(dict(self.config))
        config._attn_implementation = self.attention
        with torch.device("meta"):
            return self.kind(config)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. A tied tensor occurs several times, under each of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


class SharedWeights:
    """Shared CPU memory for weights of fixed names, shapes and types. It can be passed to a spawned process.

    Args:
        like: weights with these names, shapes and types; they are stored.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        sizes: dict[torch.dtype, int] = {}
        self._places: dict[str, tuple[torch.dtype, int, torch.Size]] = {}
        for name, tensor in like.items():
            first = sizes.get(tensor.dtype, 0)
            self._places[name] = tensor.dtype, first, tensor.shape
            sizes[tensor.dtype] = first + tensor.numel()
        # One tensor per type instead of one per weight, because each shared tensor needs a file descriptor.
        self._flat = {dtype: torch.empty(size, dtype=dtype).share_memory_() for dtype, size in sizes.items()}
        self.put(like)

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the shared memory."""
        with torch.no_grad():
            for name, here in self.views().items():
                here.copy_(weights[name])

    def views(self) -> dict[str, Tensor]:
        """The stored weights by name, without a copy."""
        return {
            name: self._flat[dtype][first : first + shape.numel()].view(shape)
            for name, (dtype, first, shape) in self._places.items()
        }
