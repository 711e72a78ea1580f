"""The small models with random weights that the benchmarks time; their size is the one of each benchmark's limits."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def small_model(
    vocabulary: int, *, hidden: int = 128, layers: int = 4, pad_id: int | None = None, eos_id: int | None = None
) -> Qwen2ForCausalLM:
    """A Qwen2 with heads that share keys, tied embeddings and a context of 1,024 tokens. The weights are always the same."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        eos_token_id=eos_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)
