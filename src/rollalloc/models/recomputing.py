"""Gradient checkpointing of a model in eval mode, where transformers' own does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """What is computed within keeps the inputs of the model's layers only; the backward pass computes the rest again.

    Training deep nets with sublinear memory cost, arXiv 1604.06174. Give the model no cache: a layer that is computed
    again would append to it again.

    Raises:
        ValueError: the model has no layers that transformers can checkpoint.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        what = f"{type(model).__name__} has no layers that can be computed again"
        raise ValueError(f"{what}; train it without gradient checkpointing, with a smaller tokens_per_forward")
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        # Nothing is drawn in eval mode, so that there is no random state to keep.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
