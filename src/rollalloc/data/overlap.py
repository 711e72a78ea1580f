"""Questions that a training set shares with evaluation sets: the same text, or the same n-grams of words."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unicodedata import normalize

log = logging.getLogger(__name__)

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


def warn_of_shared(train: Any, held: Any, name: str, column: str = "prompt") -> None:
    """Say how many prompts of a held-out data set are in the training set, for trainers that only pass data sets on.

    Args:
        train: data set with a column of prompts; any other is not looked at.
        held: likewise.
        name: of the held-out data, for the message, e.g. "eval_dataset".
        column: that holds the prompts.
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
