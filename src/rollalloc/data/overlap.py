"""Questions that a training set shares with evaluation sets, by n-grams of words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_WORD = re.compile(r"\w+")


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
