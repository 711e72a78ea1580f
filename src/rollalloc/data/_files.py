"""Rows as plain Python from parquet and JSONL files, and back. What the rows mean is `prompts`' matter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row of a file with its place, `file:row`; rows count from 1, as an editor counts lines.

    Args:
        path: a `.parquet` file, or a `.jsonl` or `.json` file with one JSON value a line (blank lines are skipped).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown suffix, an unreadable file, a line that is not JSON, or no rows at all.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; prompts are read from .parquet, .jsonl and .json files")
    read, _ = _format(path)
    place = None
    for number, row in read(path):
        place = f"{path}:{number}"
        yield place, row
    if place is None:
        raise ValueError(f"{path}: expected at least one row, the file is empty; write it again or leave it out")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows in the format that the suffix names; missing folders are made.

    Raises:
        ValueError: an unknown suffix, or rows that parquet cannot hold (a column of mixed types, an empty dict).
    """
    _, write = _format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, rows)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:  # bytes that are not UTF-8 included
                raise ValueError(
                    f"{path}:{number}: expected one JSON object on each line, got {line[:40]!r} ({error}); "
                    "a file that holds one array must be written again as JSON lines"
                ) from error


def _write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        # The one thing of numpy's that json needs help with: arrays and scalars alike have `tolist`.
        file.writelines(json.dumps(row, default=lambda value: value.tolist()) + "\n" for row in rows)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    arrow, parquet = _pyarrow()
    try:
        # Not `read_table`: it would take a folder named `split=train` on the way for a column.
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches())
            yield from enumerate((row for batch in batches for row in batch), 1)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}); write or download it again") from error


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    arrow, parquet = _pyarrow()
    columns = dict.fromkeys(name for row in rows for name in row)  # a row may lack what another has
    try:
        parquet.write_table(arrow.table({name: [row.get(name) for row in rows] for name in columns}), path)
    except arrow.ArrowException as error:
        raise ValueError(
            f"{path}: parquet cannot hold these rows ({error}); give each field one type and no empty dict, "
            "or write a .jsonl file"
        ) from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'rollalloc[native]', or use .jsonl") from error
    return pyarrow, pyarrow.parquet


Reader = Callable[[Path], Iterable[tuple[int, Any]]]
Writer = Callable[[Path, Sequence[dict[str, Any]]], None]
_FORMATS: dict[str, tuple[Reader, Writer]] = {
    ".parquet": (_read_parquet, _write_parquet),
    ".jsonl": (_read_jsonl, _write_jsonl),
    ".json": (_read_jsonl, _write_jsonl),
}


def _format(path: Path) -> tuple[Reader, Writer]:
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(_FORMATS)}, got {path.suffix!r}; convert it")
    return _FORMATS[path.suffix]
