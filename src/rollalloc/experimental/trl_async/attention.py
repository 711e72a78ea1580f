"""Attention along the paths of TRL's prefix trees without FlashAttention 3, which is for GPUs of Hopper's kind alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

TREE = "rollalloc_tree"  # among the implementations that transformers knows


def attend_without_flash(model: Any) -> None:
    """Let a model attend along TRL's trees by PyTorch's own kernels, on any device.

    Args:
        model: that TRL made, which names its own implementation.
    """
    AttentionInterface.register(TREE, attend)
    AttentionMaskInterface.register(TREE, lambda **_: None)
    model.set_attn_implementation(TREE)


def attend(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Each segment of a row of N tokens attends to its path, from the root to itself, causally.

    Args:
        module: the layer.
        query_1HND: of H heads.
        key_1KND: of K heads, which H / K queries share.
        value_1KND: as the keys.
        attention_mask: None.
        tree_kv_index: positions of all paths, end to end.
        tree_cu_seqlens_q: where segments begin and end in the row, from 0.
        tree_cu_seqlens_k: where paths begin and end in `tree_kv_index`, from 0.
        scaling: of the products; None: 1 / √D.
        sliding_window: tokens that each token sees, itself included; None: all.
        softcap: not known here.

    Returns:
        out_1NHD, and None for the weights.

    Raises:
        ValueError: a model that caps its scores.
    """
    if softcap:
        raise ValueError(
            f"{type(module).__name__} caps attention scores at {softcap:g}, which only TRL's FlashAttention 3 does here; "
            "train it on a GPU that has it"
        )
    outs: list[Tensor] = []
    bounds_q, bounds_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for at in range(len(bounds_q) - 1):
        first, end = bounds_q[at : at + 2]
        path = tree_kv_index[bounds_k[at] : bounds_k[at + 1]]
        outs.append(
            scaled_dot_product_attention(
                query_1HND[:, :, first:end],
                key_1KND[:, :, path],
                value_1KND[:, :, path],
                attn_mask=_seen(end - first, len(path), sliding_window, query_1HND.device),
                scale=scaling,
                enable_gqa=query_1HND.shape[1] != key_1KND.shape[1],
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2), None


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys of a path each of its last tokens sees: those up to itself, or the last so many of them."""
    before = keys - queries
    seen_QK = torch.ones((queries, keys), dtype=torch.bool, device=device).tril(before)
    return seen_QK if window is None else seen_QK.triu(before - window + 1)
