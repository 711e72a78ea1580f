"""Checks whether the sampler can generate with a model. It must be able to select and repeat rows of the model's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rollalloc.files.text import error_text
from rollalloc.models.likelihood import cache_argument, evaluating


def why_not(model: PreTrainedModel) -> str | None:
    """The reason why the sampler cannot generate with a model; None if it can.

    The check lets the model fill a cache with two rows of two tokens, and selects three rows. Then every state in the
    cache must have three rows. Keys and values pass this check. The state of linear attention does not, nor does a state
    outside of the cache.
    """
    rows_B = torch.tensor([1, 0, 1], device=model.device)
    ids_BS = torch.zeros((2, 2), dtype=torch.int64, device=model.device)
    try:
        cache = DynamicCache(config=model.config)
        (name,) = given = cache_argument(model, cache)
        with evaluating(model):
            output = model(
                input_ids=ids_BS,
                position_ids=torch.arange(2, device=model.device).expand(2, 2),
                **given,
                use_cache=True,
                logits_to_keep=1,
            )
    except (AttributeError, TypeError, ValueError) as error:
        return f"a model that takes no cache ({error_text(error)})"
    if getattr(output, name, None) is not cache:
        return "a model that keeps its state outside the cache it is given"
    layers: list[Any] = cache.layers
    for layer in layers:
        select = getattr(layer, "batch_select_indices", lambda rows_B: None)
        select(rows_B)
        if any(len(state) != len(rows_B) for state in _states(layer)):
            return f"a cache whose rows cannot be selected and repeated ({type(layer).__name__})"
    if max((layer.get_seq_length() for layer in layers if hasattr(layer, "get_seq_length")), default=0) != 2:
        return "a cache that holds other tokens than the model was given"
    return None


def _states(layer: object) -> Iterator[Tensor]:
    """All tensors with at least one axis in a layer of a cache, directly or in dictionaries."""
    for value in vars(layer).values():
        for held in value.values() if isinstance(value, dict) else [value]:
            if isinstance(held, Tensor) and held.ndim:
                yield held
