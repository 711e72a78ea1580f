"""Texts that data sets write where a question has no answer that can be checked."""

from __future__ import annotations

from typing import Any

_PLACEHOLDERS = frozenset(("proof", "notfound", "not found", "not_found", "n/a", "nan", "null"))


def is_placeholder(answer: Any) -> bool:
    """Whether an answer is a placeholder, such as "proof", "notfound", "None" or "N/A". Only Python's None is capitalized:
    "none" may be an answer in words.
    """
    if not isinstance(answer, str):
        return False
    text = answer.strip()
    return text == "None" or text.lower() in _PLACEHOLDERS
