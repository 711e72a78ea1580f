"""Attention on CPUs by matrix products, for two cases in which PyTorch's fused attention is slower.

The cases are decoding of one token at a time on several threads, and updates in bfloat16. In bfloat16, the backward pass of
fused attention takes half of the time of an update.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MOST_SCORES = 2**23, 2**26  # maximum number of attention scores in memory, with and without gradients; 4 bytes each
DECODING = "rollalloc_decoding"  # transformers' name for this implementation
# Arguments of transformers' own function that this implementation does not support.
_SPECIAL = ("position_bias", "softcap", "cache", "s_aux", "output_attentions")


def decoding_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which a model decodes by two matrix products. It changes only models with `sdpa` attention on a CPU.

    With one thread nothing changes, because fused attention is then as fast.
    """
    return attention_by_products(model) if torch.get_num_threads() > 1 else nullcontext()


@contextmanager
def attention_by_products(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a model uses `attend`. It changes only models with `sdpa` attention on a CPU.

    Do not use it with gradient checkpointing: layers would be recomputed after the context has ended.
    """
    config = model.config
    # A model with its own attention functions has its own registry. Such a model is not changed.
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
    """Compute attention with the same result as transformers' `sdpa`.

        out[b, h] = softmax(scaling · query[b, h] · key[b, k]ᵀ + mask[b]) · value[b, k],   k = h // (H / K)

    Matrix products are used only in two cases: each row has one query; or bfloat16's autocast is on and there are at most
    `MOST_SCORES` attention scores, because all scores are stored. In all other cases `sdpa` is called.

    Args:
        module: the layer.
        query_BHTD: T queries for each of H heads, of size D.
        key_BKSD: S keys for each of K heads. H / K query heads share a key head.
        value_BKSD: S values for each of K heads.
        attention_mask: shape (B, 1, T, S), True where attention is allowed. `sdpa` also accepts a mask to be added. None:
            each query attends to all keys or, in a causal layer, to all keys that are not later.
        scaling: factor of the scores; None: 1 / √D.
        more: further arguments for `sdpa`.
    """
    batch, heads, queries, size = query_BHTD.shape
    plain = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    most = MOST_SCORES[not torch.is_grad_enabled()]
    few = batch * heads * queries * key_BKSD.shape[2] <= most
    is_faster = queries == 1 or (torch.is_autocast_enabled("cpu") and few)
    if not is_faster or not plain or more.get("dropout") or any(more.get(name) is not None for name in _SPECIAL):
        return sdpa_attention_forward(module, query_BHTD, key_BKSD, value_BKSD, attention_mask, scaling=scaling, **more)
    if attention_mask is None and queries > 1 and _causal(module, more):
        keys = key_BKSD.shape[2]
        attention_mask = query_BHTD.new_ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    shared = key_BKSD.shape[1]
    query_BKRD = query_BHTD.reshape(batch, shared, -1, size)  # R: the queries that share the keys of one head
    scores_BKRS = (query_BKRD * (size**-0.5 if scaling is None else scaling)) @ key_BKSD.transpose(2, 3)
    if attention_mask is not None:
        # A finite number instead of -inf: a padding token that attends to nothing would become NaN with -inf, and
        # 0 · NaN would spread to other tokens.
        lowest = torch.finfo(scores_BKRS.dtype).min
        scores_BKRS.view(batch, heads, queries, -1).masked_fill_(~attention_mask, lowest)
    out_BKRD = scores_BKRS.softmax(dim=-1, dtype=torch.float32).to(value_BKSD.dtype) @ value_BKSD
    # The width is inferred, because values may be narrower than keys.
    return out_BKRD.view(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def _causal(module: nn.Module, more: Mapping[str, Any]) -> bool:
    """Whether a layer without a mask is causal, by the rule of `sdpa`."""
    is_causal = more.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
