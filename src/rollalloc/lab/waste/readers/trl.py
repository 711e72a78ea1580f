"""TRL's completions: a parquet file a log, which holds one generation batch.

Read in columns, some rows at a time; of texts a key of each prompt is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.lab.waste.groups import NO_STEP, Gathering, Log, key_of
from rollalloc.lab.waste.readers.shared import Format, Options, by_suffix, names, shown, text, whole

_OWN = ("step", "prompt", "completion", "advantage")  # columns that are TRL's; what else is a number is a reward
_ROWS = 4096  # held at a time
_TOLD = 1e-6  # rewards or advantages beyond it differ


@dataclass(frozen=True, slots=True)
class _Rows:
    """A file's rows that have a prompt, and a digest of all it says but the step."""

    digest: bytes
    prompt_R: NDArray[np.int64]
    step_R: NDArray[np.int64]
    reward_R: NDArray[np.float64]
    advantage_R: NDArray[np.float64]
    without_advantage_R: NDArray[np.bool_]


@dataclass(slots=True)
class _Told:
    """What there is to tell of the files together."""

    repeated: int = 0  # files
    contradicted: int = 0  # groups
    undivided: int = 0  # runs of rows with one prompt


def _read(files: Iterable[Path], log: Log, options: Options) -> None:
    gathering, told, before = Gathering(), _Told(), b""
    columns: tuple[str, ...] = ()
    for file in files:
        with _opened(file, log) as opened:
            if opened is None or not opened.metadata.num_rows:
                continue
            schema = opened.schema_arrow
            columns = columns or _reward_columns(file, schema, options)
            if problem := _problem(schema, columns):
                log.reject(shown(file), problem)
                continue
            rows = _rows(opened, file, columns, options.weights or (1.0,) * len(columns), gathering, log)
            if rows.digest == before:  # logged again before the next generation
                told.repeated += 1
                continue
            before = rows.digest
            _add_groups(rows, options.group_size, gathering, told)
    log.groups = gathering.groups()
    log.notes += _notes(told, columns, options, len(log.groups))


@contextmanager
def _opened(file: Path, log: Log) -> Iterator[Any]:
    """The parquet file, None where it is none; a file that breaks off further in is rejected as well."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'rollalloc[native]'") from error
    broken = (pyarrow.ArrowException, OSError, UnicodeDecodeError, MemoryError)
    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except broken:  # a run that was killed leaves half a file
        log.reject(shown(file), "not a readable parquet file")
        yield None
        return
    with opened:
        try:
            yield opened
        except broken:
            log.reject(shown(file), "not a readable parquet file")


# ---------------------------------------------------------------------------------------------------------------- columns


def _reward_columns(file: Path, schema: Any, options: Options) -> tuple[str, ...]:
    """The reward columns: all of floats, or of nothing, that are not TRL's own; or the one that was asked for.

    Raises:
        ValueError: there is none, or not as many as weights.
    """
    if options.reward is not None:
        found = [options.reward] if options.reward in schema.names else []
    else:
        found = [field.name for field in schema if field.name not in _OWN and _is_score(field.type)]
    if "prompt" not in schema.names or not found:
        wanted = options.reward or "a column of numbers for each reward function"
        raise ValueError(f"{file}: expected the columns prompt and {wanted}, found {names(schema.names)}")
    if problem := _problem(schema, found):
        raise ValueError(f"{file}: {problem}; --reward names another column")
    if options.weights is not None and len(options.weights) != len(found):
        raise ValueError(f"--weights: expected one for each of {names(found)}, got {len(options.weights)}")
    return tuple(found)


def _problem(schema: Any, columns: Sequence[str]) -> str:
    """Why these columns cannot be read; empty: they can."""
    for name in ("prompt", *columns):
        times = schema.names.count(name)
        if times != 1:
            there = "is there more than once" if times else f"is missing, found {names(schema.names)}"
            return f"column {names([name])} {there}"
        kind = schema.field(name).type
        if name != "prompt" and not _is_number(kind):
            return f"column {names([name])} holds {names([str(kind)])}, expected numbers"
    return ""


def _is_score(kind: Any) -> bool:
    from pyarrow import types

    return types.is_floating(kind) or types.is_null(kind)


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return _is_score(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind)


# ------------------------------------------------------------------------------------------------------------------- rows


def _rows(
    opened: Any, file: Path, columns: Sequence[str], weights: Sequence[float], gathering: Gathering, log: Log
) -> _Rows:
    all_names = opened.schema_arrow.names
    said = [at for at, name in enumerate(all_names) if name != "step"]
    advantages = [at for at in said if all_names[at] == "advantage" and _is_score(opened.schema_arrow.field(at).type)]
    steps = all_names.index("step") if "step" in all_names else None
    digest = blake2b(str([(all_names[at], str(opened.schema_arrow.field(at).type)) for at in said]).encode())
    parts: list[tuple[NDArray[Any], ...]] = []
    row = 1
    for batch in opened.iter_batches(_ROWS):
        digest.update(batch.select(said).serialize())
        size = batch.num_rows
        prompt_R = _mapped(batch.column(all_names.index("prompt")), partial(_prompt, gathering, log, file, row))
        step_R = np.full(size, NO_STEP)
        if steps is not None:
            step_R = _mapped(batch.column(steps), partial(_step, log, file, row))
        reward_R = _weighted([_floats(batch.column(all_names.index(name))) for name in columns], weights)
        if (infinite_R := np.isinf(reward_R)).any():
            at = f"{shown(file)}:{row + int(infinite_R.argmax())}"
            log.doubt(at, "the reward is infinite, expected a finite number", int(infinite_R.sum()))
            reward_R[infinite_R] = np.nan
        advantage_R, without_R = np.zeros(size), np.ones(size, np.bool_)
        if advantages:
            column = batch.column(advantages[0])
            advantage_R, without_R = _floats(column), column.is_null().to_numpy(zero_copy_only=False)
        has = prompt_R >= 0
        parts.append((prompt_R[has], step_R[has], reward_R[has], advantage_R[has], without_R[has]))
        row += size
    if not parts:  # its footer says that there are rows
        raise OSError("no rows where the footer has some")
    return _Rows(digest.digest(), *map(np.concatenate, zip(*parts, strict=True)))


def _prompt(gathering: Gathering, log: Log, file: Path, first: int, value: Any, at: int, times: int) -> int:
    if value is None:
        log.reject(f"{shown(file)}:{first + at}", "prompt is null")
        log.bad += times - 1
        return -1
    return gathering.number(key_of(text(value)))


def _step(log: Log, file: Path, first: int, value: Any, at: int, times: int) -> int:
    found = whole(value, log, f"{shown(file)}:{first + at}", "step")
    return NO_STEP if found is None else found


def _mapped(column: Any, to: Callable[[Any, int, int], int]) -> NDArray[np.int64]:
    """Whole numbers for the values of a column; `to` gets each value but once, its first row and how many there are."""
    from pyarrow import ArrowException, types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        encoded = column.dictionary_encode(null_encoding="encode")
    except (ArrowException, TypeError):  # lists and structures, e.g. messages
        return np.array([to(value, at, 1) for at, value in enumerate(column.to_pylist())], np.int64)
    index_R = encoded.indices.to_numpy(zero_copy_only=False)
    _, first, times = np.unique(index_R, return_index=True, return_counts=True)
    values = encoded.dictionary.to_pylist()
    numbers = [to(*one) for one in zip(values, first.tolist(), times.tolist(), strict=True)]
    return np.array(numbers, np.int64)[index_R]


def _floats(column: Any) -> NDArray[np.float64]:
    """A column of numbers; NaN for null."""
    import pyarrow

    return column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)


def _weighted(scores: Sequence[NDArray[np.float64]], weights: Sequence[float]) -> NDArray[np.float64]:
    """The weighted sum of the scores that there are, NaN where there is none."""
    sum_R, none_R = np.zeros_like(scores[0]), np.ones(len(scores[0]), np.bool_)
    for score_R, weight in zip(scores, weights, strict=True):
        unscored_R = np.isnan(score_R)
        with np.errstate(over="ignore", invalid="ignore"):
            sum_R = sum_R + np.where(unscored_R | (weight == 0), 0.0, score_R * weight)
        none_R &= unscored_R
    return np.where(none_R, np.nan, sum_R)


# ----------------------------------------------------------------------------------------------------------------- groups


def _add_groups(rows: _Rows, size: int | None, gathering: Gathering, told: _Told) -> None:
    """TRL writes a prompt's completions one after the other; a prompt drawn twice in a row is two groups."""
    total = len(rows.prompt_R)
    if not total:
        return
    run_begins = np.flatnonzero(np.diff(rows.prompt_R, prepend=-1))
    runs = np.diff(run_begins, append=total)
    a_group = np.where(runs % (size or runs.min()) == 0, size or runs.min(), runs)
    told.undivided += 0 if size is None else int((runs % size != 0).sum())
    within_R = np.arange(total) - np.repeat(run_begins, runs)
    begin_V = np.flatnonzero(within_R % np.repeat(a_group, runs) == 0)
    size_V = np.diff(begin_V, append=total)
    gathering.extend(rows.prompt_R[begin_V], rows.step_R[begin_V], size_V, rows.reward_R)
    told.contradicted += _contradicted(rows, begin_V)


def _contradicted(rows: _Rows, begin_V: NDArray[np.int64]) -> int:
    """Groups whose advantages say that there was something to learn where rewards do not, or the other way round."""
    scored_V = np.add.reduceat(~np.isnan(rows.reward_R), begin_V, dtype=np.int64)
    low_V, high_V = np.fmin.reduceat(rows.reward_R, begin_V), np.fmax.reduceat(rows.reward_R, begin_V)
    moved_V = np.logical_or.reduceat(np.abs(rows.advantage_R) > _TOLD, begin_V)
    complete_V = (scored_V >= 2) & ~np.logical_or.reduceat(rows.without_advantage_R, begin_V)
    return int((complete_V & ((high_V - low_V > _TOLD) != moved_V)).sum())


def _notes(told: _Told, columns: Sequence[str], options: Options, groups: int) -> list[str]:
    weighted = "" if options.weights is None else f", times {options.weights}"
    notes = [
        f"reward: {names(columns, ' + ')}{weighted}",
        "TRL logs the last generation batch before each log; with logging_steps above 1 the others are absent",
    ]
    if told.repeated:
        notes.append(f"{told.repeated} files repeat the one before them and were left out")
    if told.contradicted:
        notes.append(
            f"in {told.contradicted} of {groups} groups the logged advantages and the summed rewards disagree on "
            "whether there was anything to learn: give the trainer's reward_weights as --weights, or its num_generations "
            "as --group-size"
        )
    if told.undivided:
        notes.append(
            f"--group-size {options.group_size} does not divide {told.undivided} stretches of rows with one prompt; each "
            "counts as one group"
        )
    return notes


FORMAT = Format(
    "parquet files of GRPOTrainer(log_completions=True)",
    partial(by_suffix, suffix=".parquet"),
    _read,
    None,
    ("reward", "weights", "group_size"),
)
