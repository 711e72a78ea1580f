"""Gradient checkpointing for models in eval mode. The implementation of transformers works only in train mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """A context in which only the inputs of the model's layers are stored. The backward pass recomputes the rest.

    Call the model without a cache, because a recomputed layer would append to the cache a second time. Source: Training
    deep nets with sublinear memory cost, arXiv 1604.06174.

    Raises:
        ValueError: the model has no layers that transformers can checkpoint.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        problem = f"{type(model).__name__} has no layers that can be computed again"
        raise ValueError(f"{problem}; train it without gradient checkpointing, with a smaller tokens_per_forward")
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        # In eval mode nothing is random, so the random state need not be saved.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
