"""Tiny language models with vocabularies of words, or of phrases and characters, and their supervised warm-up."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rollalloc.models.likelihood import completion_logprobs
from rollalloc.models.policy import computing
from rollalloc.models.settings import Precision
from rollalloc.tasks.files import Shown, unseen

PAD, EOS, SEPARATOR = "<pad>", "<eos>", "="
PAD_ID, EOS_ID = 0, 1  # special tokens come first in every vocabulary
Examples = tuple[list[str], list[str]]  # prompts and their answers


@dataclass(frozen=True)
class WarmUp:
    """Supervised training that gives a task its initial policy.

    `learning_rate` is the peak of AdamW's learning rate. The rate rises linearly over `rise` steps. Then it falls as a
    cosine to a twentieth of the peak. `rise` is at least 1.
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
    """Tokenizer with one token per whitespace-separated word, besides `<pad>`, `<eos>` and `=`."""
    vocabulary = {word: index for index, word in enumerate([PAD, EOS, SEPARATOR, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(tokenizer)


def character_tokenizer(
    prompts: Sequence[str], answers: Sequence[str], words: Sequence[str] | None = None
) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per character, white space included, and one for each word that most prompts contain.

    So a task's fixed phrases take few tokens, everything else is spelled out, and decoding returns the exact text. Prompts
    and answers must contain every character in use; `words` replaces the words that most prompts contain.
    """
    if words is None:
        counts = Counter(word for prompt in prompts for word in set(re.findall(" ?[A-Za-z]+", prompt)))
        words = [word for word, count in counts.items() if 2 * count > len(prompts) and len(word) > 1]
    common = sorted(words)
    vocabulary = [PAD, EOS, *common, *sorted(set("".join([*prompts, *answers])))]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}))
    whole = "|".join(word if word[0] == " " else f"(?<![A-Za-z]){word}" for word in common) or "(?!)"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"(?:{whole})(?![A-Za-z])|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer)


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


@dataclass(frozen=True)
class Shape:
    """Shape of a tiny Llama. The defaults give about 150,000 parameters with a vocabulary of some hundred tokens.

    `hidden` is a multiple of 32; `context` is the maximum number of tokens of a prompt and its completion.
    """

    hidden: int = 64
    layers: int = 2
    context: int = 64


def tiny_model(tokenizer: PreTrainedTokenizerFast, shape: Shape = Shape()) -> LlamaForCausalLM:
    """A Llama with tied embeddings and no dropout, in float32.

    It is a Llama because for some other families, such as Qwen2, `AutoTokenizer` ignores the tokenizer class that was
    saved.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        # The value is about 1/√hidden. With the usual 0.02, such narrow tied embeddings need three times as many steps.
        initializer_range=0.8 / math.sqrt(shape.hidden),
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def save_warm_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    warm_up: WarmUp,
    draw: Callable[[int], Examples],
    shape: Shape = Shape(),
    longest: int | None = None,
    parts: int = 1,
    shown: Shown = unseen,
) -> None:
    """Train a tiny model on drawn examples and save it with its tokenizer.

    The same arguments give the same weights, because the warm-up has its own seed, and one thread always adds in the same
    order.

    Args:
        draw: called with a number of examples; returns prompts and answers as text, without EOS.
        longest: maximum tokens of an answer to train on, EOS included; None: no limit.
        parts: number of parts into which a step's examples are split by length; more parts are faster if lengths vary
            much.
    """
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(warm_up.seed)
        model = tiny_model(tokenizer, shape)
        supervise(model, tokenizer, warm_up, draw, longest, parts, shown)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def supervise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    warm_up: WarmUp,
    draw: Callable[[int], Examples],
    longest: int | None = None,
    parts: int = 1,
    shown: Shown = unseen,
    enough: Callable[[int], bool] = lambda step: False,
    precision: Precision = "fp32",
) -> None:
    """Raise the mean log-probability per token of drawn answers, EOS included, with AdamW; see `save_warm_model`.

    Training ends early when `enough`, called before each step, returns True. Forward and backward passes use `precision`.
    """
    pad_id, eos_id = ids_of(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    model.train()
    right = None
    for step in range(warm_up.steps):
        if enough(step):
            return
        shown("warming up the model", step, warm_up.steps, right)
        prompts, answers = (tokenizer(texts)["input_ids"] for texts in draw(warm_up.batch))
        answers = [[*ids, eos_id][:longest] for ids in answers]
        tokens = sum(map(len, answers))
        by_length = np.argsort([len(ids) for ids in answers], kind="stable") if parts > 1 else range(len(answers))
        optimizer.zero_grad()
        right = 0.0
        for part in np.array_split(by_length, parts):
            asked, answered = [prompts[at] for at in part], [answers[at] for at in part]
            with computing(model, precision):
                logprobs_BT, mask_BT = completion_logprobs(model, asked, answered, pad_id=pad_id)
            (-logprobs_BT.sum() / tokens).backward()
            right += float((logprobs_BT.detach().exp() * mask_BT).sum()) / tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warm_up.rate(step)
        optimizer.step()


def ids_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids of the padding and end-of-text tokens."""
    eos_id: Any = tokenizer.eos_token_id
    pad_id: Any = tokenizer.pad_token_id
    return (eos_id if pad_id is None else pad_id), eos_id


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread within PyTorch's operations. This is the fastest for such a small model, and gives the same sums
    on any machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
