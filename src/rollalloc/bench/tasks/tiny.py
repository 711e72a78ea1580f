"""Tiny language models over a vocabulary of whole words, and their supervised warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rollalloc.engines.likelihood import completion_logprobs

PAD, EOS, SEPARATOR = "<pad>", "<eos>", "="
PAD_ID, EOS_ID = 0, 1  # the special tokens come first in every vocabulary
Examples = tuple[list[str], list[str]]  # prompts, and as many answers


@dataclass(frozen=True)
class WarmUp:
    """Supervised training that gives a task its initial policy.

    Attributes:
        steps: optimizer steps, at least 1.
        batch: examples a step.
        learning_rate: peak of AdamW; linear rise over `rise` steps, then a cosine down to a twentieth.
        rise: steps of the rise, at least 1.
        seed: of the initial weights.
    """

    steps: int
    batch: int = 128
    learning_rate: float = 5e-3
    rise: int = 30
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of the step, counted from 0."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * min(1.0, (step + 1) / self.rise) * (0.05 + 0.95 * cosine)


def spell(letter: str, numbers_L: NDArray[np.int64]) -> str:
    """Numbered words as text: `spell("k", [3, 7])` is "k3 k7"."""
    return " ".join(f"{letter}{number}" for number in numbers_L)


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Tokenizer with one token a word of white-space separated text, besides `<pad>`, `<eos>` and `=`."""
    vocabulary = {word: index for index, word in enumerate([PAD, EOS, SEPARATOR, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Llama with tied embeddings and no dropout, in float32 and with about 150,000 parameters.

    Llama, because for some families (Qwen2 among them) `AutoTokenizer` ignores the tokenizer class saved with a model.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        # About 1/√hidden: from the usual 0.02, tied embeddings this narrow take three times as many steps.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def save_warm_model(folder: Path, words: Sequence[str], warm_up: WarmUp, draw: Callable[[int], Examples]) -> None:
    """Train a tiny model on drawn examples and save it with its tokenizer.

    The same arguments give the same weights: the seed is the warm-up's own, and one thread keeps the order of sums.

    Args:
        folder: where both are saved, for `from_pretrained`.
        words: the vocabulary, special tokens left out.
        draw: number of examples → prompts and answers as text, EOS left out.
    """
    tokenizer = word_tokenizer(words)
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(warm_up.seed)
        model = tiny_model(tokenizer)
        supervise(model, tokenizer, warm_up, draw)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def supervise(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    warm_up: WarmUp,
    draw: Callable[[int], Examples],
) -> None:
    """Raise the mean log-probability per token of drawn answers, EOS included, by AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    model.train()
    for step in range(warm_up.steps):
        prompts, answers = draw(warm_up.batch)
        logprobs_BT, mask_BT = completion_logprobs(
            model,
            tokenizer(prompts)["input_ids"],
            tokenizer([f"{answer} {EOS}" for answer in answers])["input_ids"],
            pad_id=PAD_ID,
        )
        optimizer.zero_grad()
        (-logprobs_BT.sum() / mask_BT.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warm_up.rate(step)
        optimizer.step()


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread within torch's operations: the fastest for so small a model, and the same sums on any machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
