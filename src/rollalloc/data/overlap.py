"""Questions that a training set shares with evaluation sets: the same text, or the same n-grams of words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unicodedata import normalize

_WORD = re.compile(r"\w+")

MOST_SHARED = 0.05  # share of held-out prompts that may be in the training set before a run is refused


def normalised(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt's text for comparison: without case, layout and system messages, and with one form of each character.

    Punctuation counts: 2 + 3 and 2 - 3 are different questions.
    """
    texts = (
        [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in prompt if m.get("role") != "system"]
    )
    return " ".join(normalize("NFKC", " ".join(texts)).casefold().split())


def same_text(prompts: Iterable[str], among: Iterable[str]) -> dict[int, int]:
    """Index of each prompt whose normalised text is among others → index of the first of these.

    Args:
        prompts: normalised texts, e.g. of the held-out prompts.
        among: normalised texts, e.g. of the training prompts.
    """
    first: dict[str, int] = {}
    for at, text in enumerate(among):
        first.setdefault(text, at)
    return {at: first[text] for at, text in enumerate(prompts) if text in first}


def repeated(texts: Sequence[str]) -> dict[int, int]:
    """Index of each normalised text that came before → index where it came first."""
    return {at: first for at, first in same_text(texts, texts).items() if at != first}


class NGrams:
    """The n-grams of some questions, to find others that share one.

    Text is compared as lower-case words, without punctuation and layout. A question of fewer than n words counts as one
    n-gram of its own length, so that it is found where it stands as a whole question only.

    Args:
        questions: to remember.
        n: words, at least 1. 13 is usual for contamination (GPT-3, arXiv 2005.14165, appendix C); fewer find more by
            chance.

    Raises:
        ValueError: n below 1.
    """

    def __init__(self, questions: Iterable[str], n: int = 13) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1 word, got {n}")
        self.n = n
        self._known = {gram for question in questions for gram in self._of(question)}

    def shared(self, questions: Sequence[str]) -> list[int]:
        """Indices of the questions that share an n-gram with one remembered."""
        return [at for at, question in enumerate(questions) if any(gram in self._known for gram in self._of(question))]

    def _of(self, question: str) -> Iterator[tuple[str, ...]]:
        words = _WORD.findall(question.lower())
        for start in range(max(1, len(words) - self.n + 1)):
            if gram := tuple(words[start : start + self.n]):
                yield gram
