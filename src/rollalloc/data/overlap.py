"""Finds questions that training and evaluation sets share: by their text, or by n-grams of words."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unicodedata import normalize

log = logging.getLogger(__name__)

_WORD = re.compile(r"\w+")

MOST_SHARED = 0.05  # a run is refused if more than this share of the held-out prompts is in the training set


def normalised(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Normalize a prompt's text for comparison: Unicode form, case, white space; system messages are left out.

    Punctuation is kept, because 2 + 3 and 2 - 3 are different questions.
    """
    texts = (
        [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in prompt if m.get("role") != "system"]
    )
    return " ".join(normalize("NFKC", " ".join(texts)).casefold().split())


def same_text(prompts: Iterable[str], among: Iterable[str]) -> dict[int, int]:
    """Find the prompts whose text also occurs in `among`.

    Args:
        prompts: normalised texts, for example of held-out prompts.
        among: normalised texts, for example of training prompts.

    Returns:
        For the index of each such prompt, the first index of its text in `among`.
    """
    first: dict[str, int] = {}
    for at, text in enumerate(among):
        first.setdefault(text, at)
    return {at: first[text] for at, text in enumerate(prompts) if text in first}


def repeated(texts: Sequence[str]) -> dict[int, int]:
    """For the index of each normalised text that occurred before, the index of its first occurrence."""
    return {at: first for at, first in same_text(texts, texts).items() if at != first}


def warn_of_shared(train: Any, held: Any, name: str, column: str = "prompt") -> None:
    """Warn if prompts of a held-out data set are also in the training set. TRL's and verl's drivers use it.

    Args:
        train: the training data. Nothing happens unless both data sets have a length and the column.
        held: the held-out data.
        name: name of the held-out data for the message, for example "eval_dataset".
        column: name of the column of prompts.
    """
    columns = [getattr(dataset, "column_names", None) or () for dataset in (train, held)]
    if not all(
        column in names and hasattr(dataset, "__len__") for names, dataset in zip(columns, (train, held), strict=True)
    ):
        return
    shared = same_text(map(normalised, held[column]), map(normalised, train[column]))
    if shared:
        at, seen = next(iter(shared.items()))
        log.warning(
            "%d of %d prompts of %s (%.0f%%) are in the training set too, the first its row %d as row %d: what is measured "
            "on it is partly the accuracy on prompts trained on", len(shared), len(held), name,
            100 * len(shared) / len(held), at, seen,
        )  # fmt: skip


class NGrams:
    """Stores the n-grams of some questions, to find other questions that share one.

    Text is split into lower-case words, without punctuation. A question of fewer than n words counts as one n-gram of its
    own length, so that it matches only the same words as a whole question.

    Args:
        questions: the questions whose n-grams are stored.
        n: number of words, at least 1. 13 is usual for contamination checks (GPT-3, arXiv 2005.14165, appendix C); smaller
            values find more matches by chance.

    Raises:
        ValueError: n < 1.
    """

    def __init__(self, questions: Iterable[str], n: int = 13) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1 word, got {n}")
        self.n = n
        self._known = {gram for question in questions for gram in self._of(question)}

    def shared(self, questions: Sequence[str]) -> list[int]:
        """Indices of the questions that share an n-gram with a stored question."""
        return [at for at, question in enumerate(questions) if any(gram in self._known for gram in self._of(question))]

    def _of(self, question: str) -> Iterator[tuple[str, ...]]:
        words = _WORD.findall(question.lower())
        for start in range(max(1, len(words) - self.n + 1)):
            if gram := tuple(words[start : start + self.n]):
                yield gram
