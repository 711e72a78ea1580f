"""Checks that every prompt fits the model's vocabulary and, together with a completion, the model's context."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from rollalloc.drivers.trl.chats import encode
from rollalloc.drivers.trl.columns import data_sets
from rollalloc.drivers.trl.keys import rows_of

log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000
_NAMED = 5  # an error names at most this many rows


def check_prompts(trainer: Any) -> None:
    """Raise an error if a prompt has unknown tokens, or is too long for the model's context.

    Every prompt of the training data and of held-out data is encoded once. Held-out data that cannot be indexed are skipped.

    Raises:
        ValueError: a prompt cannot be encoded, has tokens outside the model's vocabulary, or is longer than the model's
            context minus `max_completion_length`. The message names the rows.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    weight = model.get_input_embeddings().weight
    vocabulary = getattr(weight, "ds_shape", weight.shape)[0]  # DeepSpeed's ZeRO-3 empties the weights that it shards
    pad = trainer.processing_class.pad_token_id
    if pad is not None and pad >= vocabulary:
        raise ValueError(_unknown("padding", pad, vocabulary, trainer))
    limits = {
        "the model's context": getattr(model.config.get_text_config(), "max_position_embeddings", None),
        "vllm_max_model_length": trainer.args.vllm_max_model_length if trainer.use_vllm else None,
    }
    limits = {name: limit for name, limit in limits.items() if limit}
    for where, dataset in data_sets(trainer.train_dataset, trainer.eval_dataset):
        lengths_N: list[int] = []
        for start, prompts in blocks_of(dataset):
            names = [f"row {start + at} of {where}" for at in range(len(prompts))]
            for name, tokens in zip(names, encode(trainer, prompts, names), strict=True):
                if (highest := max(tokens)) >= vocabulary:
                    raise ValueError(_unknown(name, highest, vocabulary, trainer))
                lengths_N.append(len(tokens))
        for name, limit in limits.items():
            _check_lengths(where, lengths_N, name, limit, trainer.max_completion_length or 0)


def blocks_of(dataset: Any) -> Iterator[tuple[int, list[Any]]]:
    """The prompts in blocks, each with the row number of its first prompt. No blocks if environments supply the prompts."""
    if not len(dataset) or "prompt" not in dataset[0]:
        return
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        rows = rows_of(dataset, range(start, min(start + _ROWS_AT_ONCE, len(dataset))))
        yield start, [row["prompt"] for row in rows]


def _check_lengths(where: str, lengths_N: list[int], name: str, limit: int, most: int) -> None:
    room = limit - most
    too_long = [row for row, length in enumerate(lengths_N) if length > room]
    if not too_long:
        return
    shared = f"{name} of {limit} tokens, of which max_completion_length={most} are for the completion"
    if room < 1:
        raise ValueError(
            f"no prompt fits {shared}; set max_completion_length to less than {limit - min(lengths_N) + 1}"
        )
    rows = ", ".join(f"{row} ({lengths_N[row]:,} tokens)" for row in too_long[:_NAMED])
    more = f" and {len(too_long) - _NAMED:,} more" if len(too_long) > _NAMED else ""
    raise ValueError(
        f"{len(too_long):,} of {len(lengths_N):,} prompts of {where} have more than {room:,} tokens, the maximum for "
        f"{shared}: rows {rows}{more}. Remove them ({where}.filter), set a smaller max_completion_length, or take a model "
        "with a longer context"
    )


def _unknown(name: str, token: int, vocabulary: int, trainer: Any) -> str:
    tokenizer = trainer.processing_class
    return (
        f"{name} has token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), but the model has embeddings for "
        f"{vocabulary} tokens only (0 to {vocabulary - 1}) and the tokenizer has {len(tokenizer)}; take the model's own "
        "tokenizer, or call model.resize_token_embeddings(len(tokenizer)) before the trainer is made"
    )
