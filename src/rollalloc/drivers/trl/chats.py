"""Prompts as token ids, and token ids as what reward functions get."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from reprlib import repr as short
from typing import Any

from trl import GRPOTrainer, is_conversational
from trl.chat_template_utils import parse_response

from rollalloc.data.encoding import completion_text, encode_prompt

Tokens = tuple[int, ...]

_SEES_PROMPTS = "prefix" in inspect.signature(parse_response).parameters  # not in TRL's first versions with a parser
# Attributes of a tokenizer that can tell the parts of a response.
_PARSERS = ("response_template", "response_schema") if _SEES_PROMPTS else ("response_schema",)


def encode(trainer: Any, prompts: Sequence[Any], names: Sequence[str] | None = None) -> list[Tokens]:
    """Token ids of prompts, as `rollalloc.data.encoding.encode_prompt` says, with TRL's chat template and its arguments.

    Unlike TRL's own encoding, a text that was rendered before gets no second BOS, no text gets an EOS, and the model
    continues a last message of the assistant.

    Args:
        trainer: TRL's.
        prompts: text or messages.
        names: of the prompts, for error messages; None: the prompts themselves.

    Raises:
        ValueError: a prompt that cannot be encoded, or has no tokens.
    """
    if getattr(trainer, "_is_vlm", False):  # a processor wants the parts of each message told apart
        return [tuple(ids) for ids in GRPOTrainer._tokenize_prompts(trainer, list(prompts))[0]] if prompts else []
    arguments = {"tools": trainer.tools or None} | trainer.chat_template_kwargs
    tokenizer = _tokenizer(trainer)
    return [
        encode_prompt(
            tokenizer,
            prompt,
            name=names[at] if names else f"the prompt {short(prompt)}",
            chat_template=trainer.chat_template,
            arguments=arguments,
        )
        for at, prompt in enumerate(prompts)
    ]


def eos_ids(trainer: Any) -> tuple[int, ...]:
    """Tokens that end a completion for this version of TRL: all that the model names, or the tokenizer's alone."""
    return tuple(getattr(trainer, "eos_token_ids", None) or [trainer.processing_class.eos_token_id])


def decode(
    trainer: Any,
    prompts: Sequence[Any],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    tools: Sequence[Any] | None = None,
) -> list[Any]:
    """Completions as reward functions get them: text, or one assistant message each where prompts are conversations.

    Tokens that end a completion and padding are left out; other special tokens, such as `<answer>`, stay in the text, unless
    the trainer has `skip_special_tokens`, as in TRL. Where the tokenizer has a template or schema of responses, a message
    has its parts: reasoning and tool calls beside the content, which is then the answer alone.

    Args:
        trainer: TRL's.
        prompts: as text or messages.
        pairs: token ids of each prompt and its completion.
        tools: those that each prompt was rendered with.
    """
    tokenizer = _tokenizer(trainer)
    talk = bool(prompts) and is_conversational({"prompt": prompts[0]})
    if talk and parses(trainer):
        known = tools or [None] * len(pairs)
        given = [{"prefix": list(prompt), "tools": each} for (prompt, _), each in zip(pairs, known, strict=True)]
        return [
            [parse_response(tokenizer, list(ids), **(more if _SEES_PROMPTS else {}))]
            for (_, ids), more in zip(pairs, given, strict=True)
        ]
    if trainer.skip_special_tokens:
        texts = tokenizer.batch_decode([list(ids) for _, ids in pairs], skip_special_tokens=True)
    else:
        ending = {*eos_ids(trainer), tokenizer.eos_token_id, tokenizer.pad_token_id}
        texts = [completion_text(tokenizer, ids, ending) for _, ids in pairs]
    return [[{"role": "assistant", "content": text}] for text in texts] if talk else texts


def parses(trainer: Any) -> bool:
    """Whether the tokenizer can tell the parts of a response."""
    return any(getattr(_tokenizer(trainer), parser, None) is not None for parser in _PARSERS)


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer, "_tokenizer", trainer.processing_class)  # not in TRL's first versions
