"""Finds questions that are in both training and evaluation sets, or twice in a training set."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unicodedata import normalize

from rollalloc.data.prompts import PromptSet

log = logging.getLogger(__name__)

MOST_SHARED = 0.05  # a run is refused if a larger share of its held-out prompts is in the training set


def normalised(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Normalize a prompt's text for comparison: its Unicode form, case and white space. System messages are left out.

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
        A dictionary from the index of each such prompt to the index of the first equal text in `among`.
    """
    first: dict[str, int] = {}
    for at, text in enumerate(among):
        first.setdefault(text, at)
    return {at: first[text] for at, text in enumerate(prompts) if text in first}


def repeated(texts: Sequence[str]) -> dict[int, int]:
    """A dictionary from the index of each text that repeats an earlier text to the index of its first occurrence.

    Args:
        texts: normalised texts.
    """
    return {at: first for at, first in same_text(texts, texts).items() if at != first}


def warn_of_repeated(train: PromptSet) -> None:
    """Warn about training prompts with the same text as another prompt."""
    again = repeated([normalised(prompt) for prompt in train.prompts])
    if not again:
        return
    keys, truths = train.keys, train.ground_truths
    differ = sum(truths[at] != truths[first] for at, first in again.items())
    at, first = next(iter(again.items()))
    log.warning(
        "%d of %d training prompts repeat the text of another prompt, such as %r and %r (case, layout and system messages "
        "are ignored); %d of the repeated prompts have a different ground truth",
        len(again), len(train), keys[at], keys[first], differ,
    )  # fmt: skip


def refuse_trained_on(train: PromptSet, held: PromptSet, *, accepted: bool) -> None:
    """Warn about held-out prompts that are in the training set.

    Raises:
        ValueError: their share is above `MOST_SHARED`, and it is not `accepted`.
    """
    shared = same_text(map(normalised, held.prompts), map(normalised, train.prompts))
    if not shared:
        return
    at, seen = next(iter(shared.items()))
    problem = (
        f"{len(shared)} of {len(held)} held-out prompts ({len(shared) / len(held):.0%}) are in the training set too, the "
        f"first {held.keys[at]!r} as {train.keys[seen]!r}. The accuracy partly measures trained prompts"
    )
    if len(shared) > MOST_SHARED * len(held) and not accepted:
        raise ValueError(
            f"{problem}. More than {MOST_SHARED:.0%} are refused; remove them from one of the files, or accept them with "
            "--accept-overlap"
        )
    log.warning("%s", problem)


def warn_of_shared(train: Any, held: Any, name: str, column: str = "prompt") -> None:
    """Warn if prompts of a held-out data set are also in the training set. The drivers for TRL and verl call this.

    Args:
        train: the training data. Nothing is checked unless both data sets have a length and the column.
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
            "%d of %d prompts of %s (%.0f%%) are in the training set too, for example row %d as row %d of the training set. "
            "The accuracy is then partly measured on trained prompts", len(shared), len(held), name,
            100 * len(shared) / len(held), at, seen,
        )  # fmt: skip
