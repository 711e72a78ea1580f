"""Reads rows of a data set, and makes the keys of its prompts.

A key is the prompt's content, or the value of a column. A resumed run finds its prompts by key, even in a changed data set.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from rollalloc.core.prompts import PromptTable

log = logging.getLogger(__name__)

_AGAIN = "\x1c"  # a separator that does not occur in text


def rows_of(dataset: Any, wanted: Iterable[int]) -> list[Any]:
    """The rows with these numbers. One call for many rows is much faster than one call per row."""
    numbers, several = list(wanted), getattr(dataset, "__getitems__", None)
    return several(numbers) if several else [dataset[number] for number in numbers]


def values_of(dataset: Any, column: str) -> Sequence[Any]:
    """The values of a column in all rows; None in a row without this column."""
    named = column in (getattr(dataset, "column_names", None) or ())
    return dataset[column] if named else [dataset[row].get(column) for row in range(len(dataset))]


def keyed(dataset: Any, column: str | None) -> PromptTable:
    """The table of the data set's prompts, with their keys.

    Without a column, the key is the prompt's content, or the row number if environments supply the prompts. If several rows
    have the same prompt, a count is added to their keys, and a message is logged, because such rows may be confused if the
    data set is reordered.

    Args:
        dataset: one row per prompt.
        column: name of a column of unique keys. None: the prompts are the keys.

    Raises:
        ValueError: a row has no key, or two rows have the same key; the message names the rows.
    """
    if column is None and "prompt" not in dataset[0]:
        return PromptTable([str(row) for row in range(len(dataset))])
    texts = _texts(dataset, column or "prompt")
    if column is not None and None in texts:
        raise ValueError(f"key={column!r}: row {texts.index(None)} has no key; each row needs its own key")
    seen: dict[str, int] = {}
    again = 0
    if len(set(texts)) < len(texts):
        for row, text in enumerate(texts):
            seen[text] = count = seen.get(text, 0) + 1
            if count > 1 and column is not None:
                raise ValueError(
                    f"key={column!r}: rows {texts.index(text)} and {row} have the same key, {text!r}; each row needs its "
                    "own key"
                )
            if count > 1:
                texts[row], again = f"{text}{_AGAIN}{count}", again + 1
    if again:
        log.info(
            "%d of %d rows have the same prompt as an earlier row; such rows are distinguished by their order. Before you "
            "reorder the data set, name a column of unique keys (key=...), if there is such a column",
            again,
            len(texts),
        )
    return PromptTable(texts)


def check_key(dataset: Any, column: str | None) -> None:
    """Raise a ValueError if the key column does not exist, or if keys in it are missing or not unique."""
    if column is None:
        return
    if column not in dataset[0]:
        raise ValueError(f"key={column!r} is no column of the data set; it has {', '.join(dataset[0])}")
    keyed(dataset, column)


def _texts(dataset: Any, column: str) -> list[Any]:
    """The values of a column as text. Values other than text become JSON; None stays None."""
    encode = json.JSONEncoder(sort_keys=True, default=str).encode
    return [
        value if value is None or isinstance(value, str) else encode(_without_null(value))
        for value in values_of(dataset, column)
    ]


def _without_null(value: Any) -> Any:
    """A value without null fields. (`datasets` fills missing fields with null, so that all dictionaries have all fields.)"""
    if isinstance(value, dict):
        return {name: _without_null(field) for name, field in value.items() if field is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value
