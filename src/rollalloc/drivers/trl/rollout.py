"""What the driver keeps of a rollout; prompts become token ids, and completions become text for reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import numpy as np
from trl import GRPOTrainer, is_conversational
from trl.chat_template_utils import parse_response

from rollalloc.data.encoding import completion_text, encode_each
from rollalloc.drivers.trl.rewards import Score
from rollalloc.generate.sampler import Generation

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rollout:
    """The data of a rollout that the driver keeps until the core releases it.

    Attributes:
        prompt: index of the prompt in the data set.
        prompt_tokens: token ids of the prompt.
        made: the completion, including the answers of tools, with log-probabilities under the weights that sampled it.
        texts: the prompt and the completion as reward functions get them: text or messages.
        own: for each token of the completion, True if the model generated it, False if it is part of a tool's answer. None:
            the model generated all tokens.
        environment: the environment instance, until the rollout is scored; None without environments.
        scores_F: score of each reward function; None if the function gave no score. Empty before scoring.
        logged: values that reward functions logged for the table of completions, by column.
    """

    prompt: int
    prompt_tokens: Tokens
    made: Generation
    texts: tuple[Any, Any] = ("", "")
    own: tuple[bool, ...] | None = None
    environment: Any = None
    scores_F: list[Score] = field(default_factory=list[Score])
    logged: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def length(self) -> int:
        """Number of tokens that the model generated, without tools' answers."""
        return len(self.made.tokens) if self.own is None else sum(self.own)


def idle_rollout(eos_ids: Tokens) -> Rollout:
    """A placeholder of one token, for a forward pass that has no rows to train on."""
    end = eos_ids[:1]
    made = Generation(-1, end, np.zeros(1, np.float32), truncated=False)
    return Rollout(prompt=0, prompt_tokens=end, made=made)


# What TRL's parser wants to know beside the completion: before 1.16 no tools, in the first releases no prompt either.
_PARSER_TAKES = [name for name in ("prefix", "tools") if name in inspect.signature(parse_response).parameters]
# Attributes of a tokenizer that can split a response into reasoning, tool calls and content.
_PARSERS = ("response_template", "response_schema") if "prefix" in _PARSER_TAKES else ("response_schema",)


def encode(trainer: Any, prompts: Sequence[Any], names: Sequence[str] | None = None) -> list[Tokens]:
    """Encode prompts with `rollalloc.data.encoding.encode_prompt`, the trainer's chat template and its arguments.

    The result differs from TRL's own encoding in three ways. Text that begins with BOS gets no second BOS. Text gets no EOS
    at its end. If the last message is the assistant's, the model continues this message.

    Args:
        trainer: TRL's trainer.
        prompts: text or messages.
        names: names of the prompts, for error messages. None: the shortened prompts are shown.

    Raises:
        ValueError: a prompt cannot be encoded, or has no tokens.
    """
    if getattr(trainer, "_is_vlm", False):  # TRL's processor is needed for vision models
        return [tuple(ids) for ids in GRPOTrainer._tokenize_prompts(trainer, list(prompts))[0]] if prompts else []
    arguments = {"tools": trainer.tools or None} | trainer.chat_template_kwargs
    return encode_each(
        _tokenizer(trainer),
        prompts,
        lambda at: names[at] if names else f"the prompt {short(prompts[at])}",
        chat_template=trainer.chat_template,
        arguments=arguments,
    )


def eos_ids(trainer: Any) -> tuple[int, ...]:
    """Ids of the tokens that end a completion: all end tokens of the model. With older TRL, only the tokenizer's EOS."""
    return tuple(getattr(trainer, "eos_token_ids", None) or [trainer.processing_class.eos_token_id])


def decode(
    trainer: Any,
    prompts: Sequence[Any],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    tools: Sequence[Any] | None = None,
) -> list[Any]:
    """Decode completions for reward functions.

    If the prompts are text, a completion is text. If the prompts are conversations, a completion is a list of one assistant
    message. Padding and tokens that end a completion are removed. Other special tokens, such as `<answer>`, are kept unless
    `skip_special_tokens` is True. If the tokenizer has a response template or schema, the message is split: reasoning and
    tool calls get their own keys, and `content` is only the answer.

    Args:
        trainer: TRL's trainer.
        prompts: text or messages.
        pairs: token ids of each prompt and of its completion.
        tools: for each prompt, the tools that it was rendered with. None: no tools.
    """
    tokenizer = _tokenizer(trainer)
    talk = bool(prompts) and is_conversational({"prompt": prompts[0]})
    if talk and parses(trainer):
        known = tools or [None] * len(pairs)
        given = [{"prefix": list(prompt), "tools": each} for (prompt, _), each in zip(pairs, known, strict=True)]
        return [
            [parse_response(tokenizer, list(ids), **{name: more[name] for name in _PARSER_TAKES})]
            for (_, ids), more in zip(pairs, given, strict=True)
        ]
    if trainer.skip_special_tokens:
        texts = tokenizer.batch_decode([list(ids) for _, ids in pairs], skip_special_tokens=True)
    else:
        ending = {*eos_ids(trainer), tokenizer.eos_token_id, tokenizer.pad_token_id}
        texts = [completion_text(tokenizer, ids, ending) for _, ids in pairs]
    return [[{"role": "assistant", "content": text}] for text in texts] if talk else texts


def parses(trainer: Any) -> bool:
    """Whether the tokenizer can split a response into reasoning, tool calls and content."""
    return any(getattr(_tokenizer(trainer), parser, None) is not None for parser in _PARSERS)


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer, "_tokenizer", trainer.processing_class)  # older TRL has no `_tokenizer`
