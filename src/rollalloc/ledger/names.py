"""What a prompt may be called in the log of another framework: its key, or a digest of its text as that framework has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollalloc.data.prompts import EncodedPrompts
from rollalloc.waste.groups import key_of
from rollalloc.waste.readers.shared import text


def names_of(prompts: EncodedPrompts, tokenizer: Any) -> list[Sequence[str]]:
    """For each prompt its key, and digests of its text as the data have it and as its tokens decode, special ones or not.

    Args:
        prompts: with the tokens that the model sees.
        tokenizer: of the model.
    """
    named: list[Sequence[str]] = []
    for key, prompt, tokens in zip(prompts.prompt_set.keys, prompts.prompt_set.prompts, prompts.tokens, strict=True):
        seen = [tokenizer.decode(list(tokens), skip_special_tokens=skip) for skip in (True, False)]
        named.append([key, *(key_of(each) for each in dict.fromkeys([text(prompt), *seen]))])
    return named
