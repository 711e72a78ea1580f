"""Reads and writes rows as plain Python data: parquet, JSON, CSV and TSV files. The module `prompts` checks the rows."""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollalloc.data.jsonl import LONGEST, Unreadable, decode_once, read_lines
from rollalloc.files.regular import written

_ROWS = 1024  # number of rows of a parquet file to read at a time


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row of a file, with its place as `file:row`. Rows are counted from 1, like lines in an editor.

    Args:
        path: a `.parquet` file; a `.jsonl` or `.json` file with one JSON value per line, where blank lines are skipped; a
            `.json` file with one array; or a `.csv` or `.tsv` file whose first line has the names of the columns. Values
            of `.csv` and `.tsv` files are text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder; the suffix is unknown; the file is empty or cannot be read to its end; a line is not
            JSON; or a key or column occurs twice.
    """
    if path.is_dir():
        raise ValueError(f"expected a file, {path} is a folder{what_to_do_with(path)}")
    if not path.is_file():
        hub = f"; if it is a name on the Hugging Face hub, {_HUB}" if len(path.parts) == 2 and not path.suffix else ""
        raise FileNotFoundError(f"{path}: no such file; prompts are read from {', '.join(_FORMATS)} files{hub}")
    read, _ = _format(path)
    place = None
    for number, row in read(path):
        place = f"{path}:{number}"
        yield place, row
    if place is None:
        raise ValueError(f"{path}: expected at least one row, but the file has none; write it again or leave it out")


_HUB = "`rollalloc data prepare` writes some sets, and `datasets.load_dataset(...).to_parquet(FILE)` any"


def what_to_do_with(folder: Path) -> str:
    """Advice for a folder of Hugging Face's `save_to_disk` in place of a file; empty for another folder."""
    split = '["train"]' if (folder / "dataset_dict.json").exists() else ""
    if not (split or (folder / "dataset_info.json").exists()):
        return ""
    return (
        f" of Hugging Face's save_to_disk; write it as a file: `from datasets import load_from_disk; "
        f"load_from_disk({str(folder)!r}){split}.to_parquet({f'{folder.name}.parquet'!r})`"
    )


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows in the format of the suffix, completely or not at all. Missing folders are created.

    Raises:
        ValueError: the suffix is unknown, or the format cannot hold the rows. Parquet cannot hold columns of mixed types or
            empty dictionaries. No format can hold values that are not plain data, or text with a lone surrogate (half of a
            UTF-16 pair).
    """
    _, write = _format(path)
    with written(path) as temporary:
        try:
            write(temporary, rows)
        except _NOT_PLAIN as error:
            raise ValueError(f"{path}: {path.suffix} cannot hold these rows ({error}); give plain data") from error
        except ValueError as error:  # the writer's message names the temporary file instead of `path`
            raise ValueError(f"{path}: {error}") from error


_NOT_PLAIN = (TypeError, AttributeError, UnicodeError, RecursionError, OverflowError)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    for number, row in read_lines(path, unique=True):
        if isinstance(row, Unreadable):
            raise ValueError(
                f"{path}:{number}: expected one JSON object on each line, got {row.begins} ({row.why}); "
                f"{_help(path, number, row)}"
            )
        if number == 1 and isinstance(row, list):
            raise ValueError(f"{path}:1: expected one JSON object on each line, got an array; {_ARRAY}")
        yield number, row


def _help(path: Path, number: int, row: Unreadable) -> str:
    """What to do about a line that is not JSON."""
    if "utf-8" in row.why:
        return _NOT_UTF8
    if number == 1 and row.begins[2:3] == "[":  # after b'
        return _ARRAY
    whole = "write one array of rows, or each row" if path.suffix == ".json" else "write each row"
    return f"{whole} as one object on a line of its own"


_ARRAY = "a file that holds one array must end in .json, not in .jsonl"


_NOT_UTF8 = (
    "`iconv -f latin1 -t utf-8 FILE > NEW` converts a file in Latin-1, and `iconv -f utf-16 -t utf-8 FILE > NEW` a file in "
    "UTF-16, which shells of Windows write"
)


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of an array, or JSON lines."""
    with path.open("rb") as file:
        is_array = file.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"["
    if not is_array:
        yield from _read_jsonl(path)
        return
    try:
        rows = decode_once(path.read_bytes().removeprefix(BOM_UTF8))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected an array in UTF-8 ({error}); {_NOT_UTF8}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected one JSON array of rows ({error}); write it again") from error
    yield from enumerate(rows, 1)


_SEPARATORS = ",;\t|"


def _read_separated(path: Path, separator: str) -> Iterator[tuple[int, Any]]:
    """The rows of a file of separated values (CSV), without its header line. Values are text; an empty value is None."""
    csv.field_size_limit(LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator, strict=True)
        try:
            names = next(reader, [])
            if twice := [name for name, times in Counter(names).items() if times > 1]:
                raise ValueError(f"{path}: the column {twice[0]!r} occurs twice; rename one")
            if len(names) == 1 and (other := next((mark for mark in _SEPARATORS if mark in names[0]), None)):
                raise ValueError(
                    f"{path}: expected columns separated by {separator!r}, got the header {names[0]!r}, separated by "
                    f"{other!r}; write the file again with {separator!r}"
                )
            for values in filter(None, reader):
                if len(values) != len(names):
                    raise ValueError(
                        f"{path}:{reader.line_num}: expected {len(names)} values, one for each column ({', '.join(names)}), "
                        f"got {len(values)}; put values that hold {separator!r} or a new line in double quotes"
                    )
                yield reader.line_num, {name: value or None for name, value in zip(names, values, strict=True)}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected text in UTF-8 ({error}); {_NOT_UTF8}") from error
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not a readable row ({error}); write the file again") from error


def _write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        # `json` cannot write NumPy's arrays and scalars, so `tolist` converts them.
        file.writelines(json.dumps(row, default=lambda value: value.tolist()) + "\n" for row in rows)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    arrow, parquet = _pyarrow()
    broken = (arrow.ArrowException, OSError, ValueError, OverflowError, MemoryError)  # invalid text raises a ValueError
    row = 0
    try:
        # `read_table` would add a column if a parent folder had a name such as `split=train`.
        with parquet.ParquetFile(path) as file:
            if twice := [name for name, times in Counter(file.schema_arrow.names).items() if times > 1]:
                raise ValueError(f"the column {twice[0]!r} occurs twice")
            batches = file.iter_batches(_ROWS)
            while (batch := next(batches, None)) is not None:
                try:
                    values = batch.to_pylist()
                except broken:
                    row += _first_broken(batch, broken)
                    raise
                narrow = {
                    field.name: field.type for field in batch.schema if field.type in (arrow.float16(), arrow.float32())
                }
                for value in values:
                    row += 1
                    yield row, value | {name: _shortest(value[name], kind) for name, kind in narrow.items()}
    except broken as error:
        where = f"{path}:{row + 1}: from this row on, " if row else f"{path}: "
        raise ValueError(f"{where}not a readable parquet file ({error}); write or download it again") from error


def _shortest(value: float | None, kind: Any) -> float | None:
    """A float16 or float32 number as the shortest decimal that rounds to it: 0.1 instead of 0.10000000149."""
    return None if value is None else float(str(kind.to_pandas_dtype()(value)))


def _first_broken(batch: Any, broken: tuple[type[Exception], ...]) -> int:
    """Index of the first row that cannot be converted to plain data; 0 if no single row fails."""
    for row in range(batch.num_rows):
        try:
            batch.slice(row, 1).to_pylist()
        except broken:
            return row
    return 0


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    arrow, parquet = _pyarrow()
    columns = dict.fromkeys(name for row in rows for name in row)  # of all rows, because a row may lack some
    try:
        parquet.write_table(arrow.table({name: [row.get(name) for row in rows] for name in columns}), path)
    except arrow.ArrowException as error:
        raise ValueError(
            f"parquet cannot hold these rows ({error}); give each field one type and avoid empty dictionaries, or write a "
            ".jsonl file"
        ) from error


def _refuse_to_write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    raise ValueError("rows with messages do not fit into a table of text; write a .parquet or .jsonl file")


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
    ".json": (_read_json, _write_jsonl),
    ".csv": (partial(_read_separated, separator=","), _refuse_to_write),
    ".tsv": (partial(_read_separated, separator="\t"), _refuse_to_write),
}


def _format(path: Path) -> tuple[Reader, Writer]:
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(_FORMATS)}, got {path.suffix!r}; convert it")
    return _FORMATS[path.suffix]
