"""Attention of a single new token on CPUs, where PyTorch's fused kernel makes little use of several threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DECODING = "rollalloc_decoding"  # among the implementations that transformers knows
# What transformers' own function takes and does something with, beside what is computed here.
_SPECIAL = ("position_bias", "softcap", "cache", "s_aux", "output_attentions")


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within, a model that attends by `sdpa` on several CPU threads does so by two batched matrix products a new token.

    Any other model, and one thread, where the fused kernel is as fast, are left as they are.
    """
    config = model.config
    # A model with an attention of its own brings its own register of implementations.
    register = getattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    if (
        torch.get_num_threads() == 1
        or model.device.type != "cpu"
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
    """Attention as transformers' `sdpa`; for one query a row it is

        out[b, h] = softmax(scaling · query[b, h] · key[b, k]ᵀ + mask[b]) · value[b, k],   k = h // (H / K)

    Args:
        module: the layer.
        query_BHTD: T queries for each of H heads.
        key_BKSD: S keys for each of K heads, which H / K queries share; values likewise.
        attention_mask: (B, 1, T, S), True where attention goes, or added; None: everywhere.
        scaling: of the products; None: 1 / √D.
        more: goes to `sdpa`, for what is not computed here.
    """
    batch, heads, queries, size = query_BHTD.shape
    plain = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    if queries > 1 or not plain or any(more.get(name) is not None for name in _SPECIAL):
        return sdpa_attention_forward(module, query_BHTD, key_BKSD, value_BKSD, attention_mask, scaling=scaling, **more)
    shared = key_BKSD.shape[1]
    query_BKGD = query_BHTD.reshape(batch, shared, heads // shared, size)
    scores_BKGS = (query_BKGD * (size**-0.5 if scaling is None else scaling)) @ key_BKSD.transpose(2, 3)
    if attention_mask is not None:
        scores_BKGS.masked_fill_(~attention_mask, -torch.inf)
    out_BKGD = scores_BKGS.softmax(dim=-1, dtype=torch.float32).to(value_BKSD.dtype) @ value_BKSD
    return out_BKGD.reshape(batch, 1, heads, size), None
