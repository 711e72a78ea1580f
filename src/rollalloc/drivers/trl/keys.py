"""Rows of a data set, and keys by which a resumed run finds its prompts in a changed one: their content or a column."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
from datasets import Dataset

from rollalloc.core.table import PromptTable

log = logging.getLogger(__name__)
pc: Any = pyarrow.compute  # its functions are generated on import, so type checkers do not know them

_ROWS_AT_ONCE = 10_000
_FIELD, _NEXT_FIELD, _NEXT_ITEM, _AGAIN = "\x1f", "\x1e", "\x1d", "\x1c"  # separators that text does not contain


def rows_of(dataset: Any, wanted: Iterable[int]) -> list[Any]:
    """The rows with these numbers. `datasets` reads many at once in the time that a few take one by one."""
    numbers, several = list(wanted), getattr(dataset, "__getitems__", None)
    return several(numbers) if several else [dataset[number] for number in numbers]


def keyed(dataset: Any, column: str | None) -> PromptTable:
    """The table of the data set's prompts, with their keys.

    Without a column, the key is the prompt's content, or the row number if environments supply the prompts. Rows with the
    same prompt also get a count in their keys. That is logged, because re-ordering the data set may exchange them.

    Args:
        dataset: one row per prompt.
        column: name of a column of unique keys. None: the prompts are the keys.

    Raises:
        ValueError: a row has no key, or two rows have the same key; names them.
    """
    if column is None and "prompt" not in dataset[0]:
        return PromptTable([str(row) for row in range(len(dataset))])
    texts = [text for batch in _texts(dataset, column or "prompt") for text in batch]
    if column is not None and None in texts:
        raise ValueError(f"key={column!r}: row {texts.index(None)} has no key; each row needs one of its own")
    seen: dict[str, int] = {}
    again = 0
    if len(set(texts)) < len(texts):
        for row, text in enumerate(texts):
            seen[text] = count = seen.get(text, 0) + 1
            if count > 1 and column is not None:
                raise ValueError(
                    f"key={column!r}: rows {texts.index(text)} and {row} have the same key, {text!r}; each row needs one of "
                    "its own"
                )
            if count > 1:
                texts[row], again = f"{text}{_AGAIN}{count}", again + 1
    if again:
        log.info(
            "%d of %d rows have the prompt of a row before; they are told apart by their order. Where they differ in "
            "another column, name one of unique keys, key=..., before the data set is re-ordered",
            again,
            len(texts),
        )
    return PromptTable(texts)


def check_key(dataset: Any, column: str | None) -> None:
    """Raise a ValueError if the key column does not exist, or its keys are missing or not unique."""
    if column is None:
        return
    if column not in dataset[0]:
        raise ValueError(f"key={column!r} is no column of the data set; it has {', '.join(dataset[0])}")
    keyed(dataset, column)


def _texts(dataset: Any, column: str) -> Iterator[list[Any]]:
    """The column as text, in blocks. Arrow data is converted as whole columns, since Python objects would be slow."""
    if isinstance(dataset, Dataset):
        arrow: Any = cast("Any", dataset).select_columns([column]).with_format("arrow")
        for table in arrow.iter(_ROWS_AT_ONCE):
            yield _as_text(pa.chunked_array(table.column(column)).combine_chunks()).to_pylist()
    else:
        values = [dataset[row][column] for row in range(len(dataset))]
        encode = json.JSONEncoder(sort_keys=True, default=str).encode
        yield [value if value is None or isinstance(value, str) else encode(value) for value in values]


def _as_text(array: pa.Array) -> pa.Array:
    """An array as strings; null stays null.

    Null fields of a struct are skipped, because Arrow does not distinguish a field that is null from one that is missing.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _as_text(array.storage)
    if pa.types.is_struct(kind):
        children = dict(zip((kind.field(at).name for at in range(kind.num_fields)), array.flatten(), strict=True))
        fields = [pc.binary_join_element_wise(name, _as_text(children[name]), _FIELD) for name in sorted(children)]
        joined = pc.binary_join_element_wise(*fields, _NEXT_FIELD, null_handling="skip")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        bounds = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        items = pc.fill_null(_as_text(array.flatten()), "")
        joined = pc.binary_join(pa.ListArray.from_arrays(bounds, items), _NEXT_ITEM)
    else:
        return array.cast(pa.string())
    return pc.if_else(array.is_valid(), joined, pa.scalar(None, pa.string()))
