"""Weights in memory that two processes share: one writes them, the other copies them into its model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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
