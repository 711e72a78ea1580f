"""Encodes prompts as token ids and decodes completions to text, by the same rules for the native trainer and for TRL."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from reprlib import repr as short
from typing import Any, Literal

from rollalloc.files.text import error_text

# Arguments of `apply_chat_template` that `encode_prompt` itself sets, or that would change the type of the result.
_RESERVED = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    ]
)


def check_template_arguments(arguments: Any) -> None:
    """Raise an error for arguments that `encode_prompt` cannot pass to a chat template.

    Raises:
        ValueError: the arguments are not a dictionary with text as keys, or `encode_prompt` itself sets one of them.
    """
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise ValueError(
            f"chat_template_args must be a JSON object of names and values, got {short(arguments)}; for example "
            '{"enable_thinking": false}'
        )
    if reserved := sorted(_RESERVED & set(arguments)):
        raise ValueError(
            f"chat_template_args must not set {', '.join(reserved)}, which rollalloc sets itself; remove it"
            + (" and store the template in the tokenizer instead" if "chat_template" in reserved else "")
        )


def template_arguments(text: str | None) -> dict[str, Any]:
    """Parse arguments of a chat template from a JSON object such as '{"enable_thinking": false}'. None: no arguments.

    Raises:
        ValueError: the text is not a JSON object, or `encode_prompt` itself sets one of the arguments.
    """
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"chat_template_args must be a JSON object, got {short(text)} ({error}); for example "
            '{"enable_thinking": false}'
        ) from None
    check_template_arguments(arguments)
    return arguments


def encode_prompt(
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    name: str = "the prompt",
    chat_template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Encode a prompt as the token ids that the model continues.

    - Messages are rendered by the chat template, with its generation prompt at the end. If the last message is the
      assistant's, the model continues this message: the template does not close it or begin a new turn.
    - Text gets the tokenizer's leading special tokens, such as BOS. They are not added again to a text that begins with
      them, such as a rendered chat template. Trailing special tokens, such as EOS, are not added.
    - Without a chat template, a single user message is encoded as text.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: text, or messages with `role` and `content`.
        name: name of the prompt, for error messages.
        chat_template: a template to use instead of the tokenizer's own. None: the tokenizer's own template.
        arguments: further arguments of the chat template, for example `{"enable_thinking": False}`, or `tools`.

    Raises:
        ValueError: the prompt has no tokens, ends with a tool call, has messages although there is no chat template, or
            cannot be tokenized or rendered.
    """
    if isinstance(prompt, str):
        ids = known_tokens(name, prompt, lambda: _text_ids(tokenizer, prompt))
    elif chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        text = _only_user_message(name, prompt)
        ids = known_tokens(name, text, lambda: _text_ids(tokenizer, text))
    else:
        ids = _chat_ids(tokenizer, [dict(message) for message in prompt], name, chat_template, dict(arguments or {}))
    if not ids:
        raise ValueError(f"{name} has no tokens, its content is {short(prompt)}; remove it from the data")
    return ids


def encode_each(
    tokenizer: Any,
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    name_of: Callable[[int], str],
    *,
    chat_template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[tuple[int, ...]]:
    """Encode prompts as `encode_prompt` does, many together, because calls of the tokenizer are slow.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompts: texts or messages.
        name_of: returns the name of the prompt at an index, for error messages.
        chat_template: a template to use instead of the tokenizer's own. None: the tokenizer's own template.
        arguments: further arguments of the chat template.

    Raises:
        ValueError: a prompt cannot be encoded, see `encode_prompt`.
    """
    by_kind: dict[_Kind, list[int]] = {}
    for at, prompt in enumerate(prompts):
        by_kind.setdefault(_kind_of(prompt), []).append(at)
    ids: dict[int, tuple[int, ...]] = {}
    for kind, places in by_kind.items():
        for first in range(0, len(places), _TOGETHER):
            part = places[first : first + _TOGETHER]
            made = _ids_together(tokenizer, [prompts[at] for at in part], kind, chat_template, arguments)
            ids.update(zip(part, made, strict=False))
    # Prompts that could not be encoded together are encoded one by one, so that an error names the first wrong one.
    return [
        ids.get(at)
        or encode_prompt(tokenizer, prompt, name=name_of(at), chat_template=chat_template, arguments=arguments)
        for at, prompt in enumerate(prompts)
    ]


_TOGETHER = 4096  # number of prompts that are encoded in one call; more would need much memory and save little time
_Kind = Literal["text", "chat", "continued"]


def _kind_of(prompt: Any) -> _Kind:
    """Prompts of one kind can be encoded in one call. The last message of a "continued" chat is the assistant's."""
    if isinstance(prompt, str):
        return "text"
    return "continued" if prompt and prompt[-1].get("role") == "assistant" else "chat"


def _ids_together(
    tokenizer: Any, prompts: Sequence[Any], kind: _Kind, template: str | None, arguments: Mapping[str, Any] | None
) -> list[tuple[int, ...]]:
    """Token ids of several prompts of one kind; none at all if one of them must be encoded, or refused, by itself."""
    try:
        if kind == "text":
            each_ids = _texts_ids(tokenizer, prompts)
        elif any(chat[-1].get("tool_calls") for chat in prompts if kind == "continued"):
            return []
        else:
            chats = [[dict(message) for message in chat] for chat in prompts]
            each_ids = _rendered_ids(tokenizer, chats, kind == "continued", template, dict(arguments or {}))
    except Exception:  # a template or a tokenizer may raise anything, or take only one prompt at a time
        return []
    known: list[tuple[Any, ...]] = [tuple(each) for each in each_ids]
    # None stands for a word that the tokenizer does not know.
    return known if len(known) == len(prompts) and all(None not in each for each in known) else []


def completion_text(tokenizer: Any, tokens: Sequence[int], ending: Collection[int]) -> str:
    """Decode a completion for a reward function.

    Only the tokens in `ending` (end of sequence, end of turn, padding) are removed. Other special tokens, such as `<think>`
    or `<answer>`, are kept, because a reward function may look for them.
    """
    return tokenizer.decode([token for token in tokens if token not in ending], skip_special_tokens=False)


def known_tokens(name: str, content: Any, tokenize: Callable[[], Sequence[int | None]]) -> tuple[int, ...]:
    """Tokenize a text.

    Args:
        name: name of the text, for error messages, for example "prompt 'mine/7'".
        content: the text or the messages, to be shown in error messages.
        tokenize: a function that returns the token ids.

    Raises:
        ValueError: the text cannot be tokenized, or has words that the tokenizer does not know.
    """
    try:
        ids = tokenize()
    except Exception as error:  # a template or a tokenizer may raise anything
        help = "remove this text from the data, or use a tokenizer that knows all its words"
        if not isinstance(content, str) and any(isinstance(each.get("content"), list) for each in content):
            help = (
                f"if the chat template takes no lists of parts, give each message's content as text; otherwise {help}"
            )
        raise ValueError(
            f"{name} cannot be tokenized ({error_text(error)}), its content is {short(content)}; {help}"
        ) from error
    known = tuple(token for token in ids if token is not None)
    if len(known) < len(ids):  # a tokenizer without an unk_token returns None for unknown words
        raise ValueError(
            f"{name} has words that the tokenizer does not know, its content is {short(content)}; remove this "
            "text from the data, or give the tokenizer an unk_token"
        )
    return known


def _text_ids(tokenizer: Any, text: str) -> list[int | None]:
    """Token ids of a text, with the leading special tokens exactly once, and without the trailing special tokens."""
    return _prefixed(list(tokenizer(text, add_special_tokens=False)["input_ids"]), list(tokenizer(text)["input_ids"]))


def _texts_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int | None]]:
    """`_text_ids` of several texts."""
    bare = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    # If the tokenizer adds no special tokens, `whole` equals `bare`, and need not be computed.
    adds = not getattr(tokenizer, "is_fast", False) or tokenizer.num_special_tokens_to_add() > 0
    whole = tokenizer(list(texts))["input_ids"] if adds else bare
    return [_prefixed(list(one), list(other)) for one, other in zip(bare, whole, strict=True)]


def _prefixed(bare: list[int | None], whole: list[int | None]) -> list[int | None]:
    """Add to `bare` the special tokens with which `whole` begins. Both are token ids of the same text."""
    starts = range(len(whole) - len(bare) + 1)
    start = next((start for start in starts if whole[start : start + len(bare)] == bare), None)
    if start is None:  # the special tokens change how the tokenizer splits the text
        return whole
    prefix = whole[:start]
    return bare if bare[:start] == prefix else prefix + bare


def _only_user_message(name: str, messages: Sequence[Mapping[str, Any]]) -> str:
    if [message["role"] for message in messages] == ["user"]:
        return messages[0]["content"]
    roles = ", ".join(message["role"] for message in messages)
    raise ValueError(
        f"{name} has messages ({roles}) and the tokenizer has no chat template; without a template, a prompt "
        "must be text or a single user message: set tokenizer.chat_template"
    )


def _chat_ids(
    tokenizer: Any, messages: list[dict[str, Any]], name: str, template: str | None, arguments: dict[str, Any]
) -> tuple[int, ...]:
    last = messages[-1]
    continues = last["role"] == "assistant"
    if continues and last.get("tool_calls"):
        raise ValueError(
            f"{name} ends with a tool call of the assistant, {short(last['tool_calls'])}; add the tool's answer as a "
            "message of role 'tool', or remove the call"
        )

    def rendered(messages: list[dict[str, Any]]) -> Any:
        return _rendered_ids(tokenizer, messages, continues, template, arguments)

    try:
        return known_tokens(name, messages, lambda: rendered(messages))
    except ValueError as error:
        if _refuses_system_messages(rendered, messages):
            raise ValueError(
                f"{name} begins with a system message, {short(messages[0]['content'])}, which the model's chat template "
                f"refuses ({error.__cause__}); write the data without system messages (`rollalloc data prepare "
                "--no-system`), or use a chat template that accepts them"
            ) from error
        raise


def _rendered_ids(tokenizer: Any, chat: Any, continues: bool, template: str | None, arguments: dict[str, Any]) -> Any:
    """Token ids of a rendered chat, or of each of several chats. `continues`: the model continues the last message."""
    return tokenizer.apply_chat_template(
        chat,
        chat_template=template,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tokenize=True,
        return_dict=False,
        **arguments,
    )


def _refuses_system_messages(rendered: Callable[[list[dict[str, Any]]], Any], messages: list[dict[str, Any]]) -> bool:
    """Whether messages that cannot be rendered could be rendered without their system message."""
    if messages[0]["role"] != "system" or len(messages) == 1:
        return False
    try:
        rendered(messages[1:])
    except Exception:  # a template may raise anything
        return False
    return True
