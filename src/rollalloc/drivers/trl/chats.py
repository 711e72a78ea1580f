"""Prompts as token ids, and token ids as what reward functions get: as TRL does both."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from trl import is_conversational
from trl.chat_template_utils import parse_response

Tokens = tuple[int, ...]

_SEES_PROMPTS = "prefix" in inspect.signature(parse_response).parameters  # not in TRL's first versions with a parser
# Attributes of a tokenizer that can tell the parts of a response.
_PARSERS = ("response_template", "response_schema") if _SEES_PROMPTS else ("response_schema",)


def encode(trainer: Any, prompts: Sequence[Any]) -> list[Tokens]:
    """Token ids of prompts, conversations through the chat template as TRL renders them."""
    tokenizer = trainer.processing_class
    if not prompts:
        return []
    if not is_conversational({"prompt": prompts[0]}):
        return [tuple(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    encoded = tokenizer.apply_chat_template(
        conversation=list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [tuple(ids) for ids in encoded["input_ids"]]


def decode(
    trainer: Any,
    prompts: Sequence[Any],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    tools: Sequence[Any] | None = None,
) -> list[Any]:
    """Completions as reward functions get them: text, or one assistant message each where prompts are conversations.

    Where the tokenizer has a template or schema of responses, a message has its parts: reasoning and tool calls beside the
    content, which is then the answer alone.

    Args:
        trainer: TRL's.
        prompts: as text or messages.
        pairs: token ids of each prompt and its completion.
        tools: those that each prompt was rendered with.
    """
    tokenizer = getattr(trainer, "_tokenizer", trainer.processing_class)
    talk = bool(prompts) and is_conversational({"prompt": prompts[0]})
    if talk and any(getattr(tokenizer, parser, None) is not None for parser in _PARSERS):
        known = tools or [None] * len(pairs)
        given = [{"prefix": list(prompt), "tools": each} for (prompt, _), each in zip(pairs, known, strict=True)]
        return [
            [parse_response(tokenizer, list(ids), **(more if _SEES_PROMPTS else {}))]
            for (_, ids), more in zip(pairs, given, strict=True)
        ]
    texts = trainer.processing_class.batch_decode([list(ids) for _, ids in pairs], skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts] if talk else texts
