"""What another process builds a model of: a description as plain data, and weights in memory that both share.

A live model takes along whatever was hung on it, such as the hooks that transformers leaves where hidden states were asked
for once, and those cannot be sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

_ELSE = "so that no other process can build it: generate in this one (--no-overlap), or use --engine sync"


@dataclass(frozen=True)
class Blueprint:
    """What a model is, without its weights.

    Attributes:
        kind: its class, which is sent by name.
        config_kind: that of its configuration.
        config: its configuration.
        attention: the implementation that it attends by.
        same: by each name of a parameter or buffer, the first name of the same tensor: another one where they are tied.
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
        """A model's; a `ValueError` where its class and configuration do not make a model like it."""
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
        except Exception as error:  # whatever its class may raise
            raise ValueError(f"{type(model).__name__} is not made by its configuration, {_ELSE} ({error})") from error
        if others := [name for name in here.keys() | there.keys() if _shape(here, name) != _shape(there, name)]:
            first = min(others)
            what = f"{first} is {_shape(here, first)}, and would be {_shape(there, first)}"
            raise ValueError(f"{type(model).__name__} has other weights than its configuration makes ({what}), {_ELSE}")
        return made

    def first(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The model's parameters and buffers, those that are not saved included, by their first names."""
        return {name: tensor for name, tensor in _tensors(model).items() if self.same[name] == name}

    def built(self, tensors: Mapping[str, Tensor], device: torch.device) -> PreTrainedModel:
        """The model, in eval mode, of parameters and buffers by their first names, which are copied."""
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
        """A model of this kind whose weights are nowhere."""
        config = self.config_kind.from_dict(dict(self.config))
        config._attn_implementation = self.attention
        with torch.device("meta"):
            return self.kind(config)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, by each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


class SharedWeights:
    """A place for weights of these names, shapes and types, on the CPU; it goes to a process that is spawned as it is.

    Args:
        like: the weights that it holds to begin with.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        sizes: dict[torch.dtype, int] = {}
        self._places: dict[str, tuple[torch.dtype, int, torch.Size]] = {}
        for name, tensor in like.items():
            first = sizes.get(tensor.dtype, 0)
            self._places[name] = tensor.dtype, first, tensor.shape
            sizes[tensor.dtype] = first + tensor.numel()
        # One tensor a type: each that is shared takes a file descriptor.
        self._flat = {dtype: torch.empty(size, dtype=dtype).share_memory_() for dtype, size in sizes.items()}
        self.put(like)

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into it."""
        with torch.no_grad():
            for name, here in self.views().items():
                here.copy_(weights[name])

    def views(self) -> dict[str, Tensor]:
        """What it holds, by name, without a copy."""
        return {
            name: self._flat[dtype][first : first + shape.numel()].view(shape)
            for name, (dtype, first, shape) in self._places.items()
        }
