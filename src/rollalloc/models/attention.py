"""Attention on CPUs by plain matrix products, where PyTorch's fused kernel is slower.

That is for a single new token on several threads, and in bfloat16, whose fused backward pass takes half of an update.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_MOST_SCORES = 2**23, 2**26  # with and without a gradient: all of them are kept, or made at once, 4 bytes each and more
DECODING = "rollalloc_decoding"  # among the implementations that transformers knows
# What transformers' own function takes and does something with, beside what is computed here.
_SPECIAL = ("position_bias", "softcap", "cache", "s_aux", "output_attentions")


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within, a model that attends by `sdpa` on several CPU threads does so by two batched matrix products a new token.

    Any other model, and one thread, where the fused kernel is as fast, are left as they are.
    """
    with attention_by_products(model) if torch.get_num_threads() > 1 else nullcontext():
        yield


@contextmanager
def attention_by_products(model: PreTrainedModel) -> Iterator[None]:
    """Within, a model that attends by `sdpa` on a CPU does so by `attend`, under bfloat16's autocast two matrix products.

    Any other model is left as it is. Not for layers that are computed again after it was left.
    """
    config = model.config
    # A model with an attention of its own brings its own register of implementations.
    register = getattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    if (
        model.device.type != "cpu"
        or register is not ALL_ATTENTION_FUNCTIONS
        or config.get_text_config() is not config
        or config._attn_implementation != "sdpa"
    ):
        yield
        return
    AttentionInterface.register(DECODING, attend)
    AttentionMaskInterface.register(DECODING, sdpa_mask)
    config._attn_implementation = DECODING
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def attend(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' `sdpa`; for one query a row, or under bfloat16's autocast, it is

        out[b, h] = softmax(scaling · query[b, h] · key[b, k]ᵀ + mask[b]) · value[b, k],   k = h // (H / K)

    With several queries only while there are not too many scores, which it holds in memory where the kernel holds none.

    Args:
        module: the layer.
        query_BHTD: T queries for each of H heads.
        key_BKSD: S keys for each of K heads, which H / K queries share; values likewise.
        attention_mask: (B, 1, T, S), True where attention goes, or added; None: everywhere, or where the layer is causal to
            what is not later.
        scaling: of the products; None: 1 / √D.
        more: goes to `sdpa`, for what is not computed here.
    """
    batch, heads, queries, size = query_BHTD.shape
    plain = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    most = _MOST_SCORES[not torch.is_grad_enabled()]
    few = batch * heads * queries * key_BKSD.shape[2] <= most
    here = queries == 1 or (torch.is_autocast_enabled("cpu") and few)
    if not here or not plain or more.get("dropout") or any(more.get(name) is not None for name in _SPECIAL):
        return sdpa_attention_forward(module, query_BHTD, key_BKSD, value_BKSD, attention_mask, scaling=scaling, **more)
    if attention_mask is None and queries > 1 and _causal(module, more):
        keys = key_BKSD.shape[2]
        attention_mask = query_BHTD.new_ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    shared = key_BKSD.shape[1]
    query_BKRD = query_BHTD.reshape(batch, shared, -1, size)  # R: the queries of all heads that share their keys
    scores_BKRS = (query_BKRD * (size**-0.5 if scaling is None else scaling)) @ key_BKSD.transpose(2, 3)
    if attention_mask is not None:
        # Not by -inf: padding that sees nothing at all would become NaN, and its keys are read, though for nothing.
        lowest = torch.finfo(scores_BKRS.dtype).min
        scores_BKRS.view(batch, heads, queries, -1).masked_fill_(~attention_mask, lowest)
    out_BKRD = scores_BKRS.softmax(dim=-1, dtype=torch.float32).to(value_BKSD.dtype) @ value_BKSD
    # Values may be narrower than keys.
    return out_BKRD.view(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def _causal(module: nn.Module, more: Mapping[str, Any]) -> bool:
    """Whether a layer attends to nothing later where no mask says so, as `sdpa` finds out."""
    said = more.get("is_causal")
    return bool(getattr(module, "is_causal", True) if said is None else said)
