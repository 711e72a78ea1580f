"""Reader for TRL's completions: `GRPOTrainer.log` writes the last generation batch as a Parquet file at each log.

A file has the columns `step`, `prompt`, `completion`, one per reward function, those that reward functions log with
`log_extra`, and `advantage`, in this order. It marks neither which columns are rewards, nor which rows belong to an
evaluation, which overwrites the file of its step; `trl_columns` and `trl_evaluations` find out.

Rows are read in blocks; no text is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import count, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollalloc.lab.waste.groups import Gathering, Log, key_of
from rollalloc.lab.waste.readers.shared import (
    Files,
    Format,
    Options,
    by_suffix,
    message_text,
    names,
    shown,
    text,
    whole,
)
from rollalloc.lab.waste.readers.trl_columns import Columns
from rollalloc.lab.waste.readers.trl_evaluations import evaluated, states_of

_OWN = ("step", "prompt", "completion", "advantage")  # TRL's fixed columns
_ROWS = 4096  # rows per block


class _Row(NamedTuple):
    """A row that has a prompt."""

    prompt: str  # key
    step: int | None
    asked: str
    answered: str | None
    scores: tuple[Any, ...]  # by column of the file
    advantage: float | None


@dataclass(slots=True)
class _Read:
    """State while files are read."""

    columns: Columns
    gathering: Gathering = field(default_factory=Gathering)
    file_V: array[int] = field(default_factory=lambda: array("q"))  # number of each group's file
    repeated: int = 0  # files
    undivided: int = 0  # runs of rows with one prompt
    messages: bool = False  # whether a completion was a list of messages


def _read(files: Files, log: Log, options: Options) -> None:
    read, before = _Read(Columns(options.rewards, options.weights)), b""
    for number, file in enumerate(files):
        with _opened(file, log) as opened:
            if opened is None or not opened.metadata.num_rows:
                continue
            scored = options.rewards or _leading(opened.schema_arrow)
            if problem := _problem(opened.schema_arrow, scored):
                log.reject(shown(file), problem)
                continue
            digest, rows = _rows(opened, file, scored, log, read)
            if digest == before:  # the same batch, logged again before the next generation
                read.repeated += 1
                continue
            before = digest
            _add_groups(rows, scored, number, options.group_size, read)
    groups = read.gathering.groups()
    if not len(groups):
        log.groups = groups
        return
    chosen = read.columns.chosen(groups)
    log.groups = replace(groups, rewards_R=chosen.reward_R)
    log.notes += chosen.notes
    if not options.all_rows:
        _leave_out_evaluations(files, log, read)
    log.notes += _notes(read, options)


def _leave_out_evaluations(files: Files, log: Log, read: _Read) -> None:
    """Remove evaluation rows from the log, and add a note.

    Raises:
        ValueError: no other rows are left.
    """
    assert log.groups is not None
    states = states_of(files.paths)
    found_V = evaluated(log.groups, np.array(read.file_V), files.paths, states)
    if not found_V.any():
        return
    rollouts = int(log.groups.size_V[found_V].sum())
    how = (
        "trainer_state.json says at which steps the model was evaluated"
        if states
        else "their prompts come in the same order in several files, as TRL's evaluations have them"
    )
    if found_V.all():
        raise ValueError(
            f"{shown(files.paths[0].parent)}: expected rollouts of training, all {rollouts:,} rows are of evaluations "
            f"({how}); an evaluation overwrites the rows that TRL logged at the same step: log at other steps than you "
            "evaluate, or count these rows with --rows all"
        )
    log.groups = log.groups.take(~found_V)
    log.notes.append(
        f"{rollouts:,} rows are of evaluations and were left out: {how}; --rows all counts them as training"
    )


@contextmanager
def _opened(file: Path, log: Log) -> Iterator[Any]:
    """The Parquet file, or None if it is not one; a file that breaks off later is rejected as well."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'rollalloc[native]'") from error
    broken = (pyarrow.ArrowException, OSError, UnicodeDecodeError, MemoryError)
    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except broken:  # a killed run leaves half a file
        log.reject(shown(file), "not a readable parquet file")
        yield None
        return
    with opened:
        try:
            yield opened
        except broken:
            log.reject(shown(file), "not a readable parquet file")


# ---------------------------------------------------------------------------------------------------------------- columns


def _leading(schema: Any) -> tuple[str, ...]:
    """Leading float columns, which may be rewards: TRL writes rewards, as floats, before other logged columns."""
    columns: list[str] = []
    for column in schema:
        if column.name in _OWN:
            continue
        if not _is_score(column.type):
            break
        columns.append(column.name)
    return tuple(columns)


def _problem(schema: Any, columns: Sequence[str]) -> str:
    """Why these columns cannot be read; empty: they can."""
    if not columns:
        return (
            f"expected the column prompt and a column of numbers for each reward function, found {names(schema.names)}"
        )
    for name in ("prompt", *columns):
        times = schema.names.count(name)
        if times != 1:
            problem = "is there more than once" if times else f"is missing, found {names(schema.names)}"
            return f"column {names([name])} {problem}"
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


def _rows(opened: Any, file: Path, scored: Sequence[str], log: Log, read: _Read) -> tuple[bytes, list[_Row]]:
    """A digest of everything in a file except the step, and its rows that have a prompt."""
    schema = opened.schema_arrow
    compared = [at for at, name in enumerate(schema.names) if name != "step"]
    has_advantages = schema.names.count("advantage") == 1 and _is_score(schema.field("advantage").type)
    digest = blake2b(str([(schema.names[at], str(schema.field(at).type)) for at in compared]).encode())
    rows: list[_Row] = []
    places, name = count(1), shown(file)
    for batch in opened.iter_batches(_ROWS):
        digest.update(batch.select(compared).serialize())
        nothing = [None] * batch.num_rows
        steps = batch.column("step").to_pylist() if schema.names.count("step") == 1 else nothing
        advantages = batch.column("advantage").to_pylist() if has_advantages else nothing
        scores = zip(*(batch.column(name).to_pylist() for name in scored), strict=True)
        prompts = batch.column("prompt").to_pylist()
        answers = batch.column("completion").to_pylist() if schema.names.count("completion") == 1 else nothing
        columns = zip(prompts, steps, advantages, scores, answers, places, strict=False)
        for prompt, step, advantage, row, answer, place in columns:
            where = f"{name}:{place}"
            if prompt is None:
                log.reject(where, "prompt is null")
                continue
            read.messages = read.messages or isinstance(answer, list)
            rows.append(
                _Row(
                    key_of(text(prompt)),
                    whole(step, log, where, "step"),
                    message_text(prompt),
                    None if answer is None else message_text(answer, role="assistant"),
                    tuple(_finite(score, log, where, column) for score, column in zip(row, scored, strict=True)),
                    advantage,
                )
            )
    if not rows and next(places) == 1:  # its footer promises rows
        raise OSError("no rows where the footer has some")
    return digest.digest(), rows


def _finite(score: Any, log: Log, where: str, column: str) -> float:
    """A score as a float, NaN if missing; an infinite one is counted as a doubt and treated as missing."""
    value = np.nan if score is None else float(score)
    if np.isinf(value):
        log.doubt(where, f"{names([column])} is infinite, expected a finite number")
        return np.nan
    return value


# ----------------------------------------------------------------------------------------------------------------- groups


def _add_groups(rows: Sequence[_Row], scored: tuple[str, ...], file: int, size: int | None, read: _Read) -> None:
    """Split rows into groups: TRL writes a prompt's completions together; a prompt drawn twice in a row is two groups."""
    runs = [list(run) for _, run in groupby(rows, key=attrgetter("prompt"))]
    usual = size or min(map(len, runs), default=1)
    for run in runs:
        read.undivided += size is not None and len(run) % size != 0
        part = usual if len(run) % usual == 0 else len(run)
        for begin in range(0, len(run), part):
            group = run[begin : begin + part]
            for row in group:
                read.gathering.add(0, row.prompt, group[0].step, None, asked=row.asked, answered=row.answered)
                read.columns.add(scored, row.scores, row.advantage)
            read.gathering.close()
            read.file_V.append(file)


def _notes(read: _Read, options: Options) -> list[str]:
    notes = [
        "TRL logs the last generation batch before each log; with logging_steps above 1 the others are absent",
    ]
    if read.messages:
        notes.append("completions are lists of messages: lengths and answers are of the assistant's text in them")
    if read.repeated:
        notes.append(f"{read.repeated} files repeat the one before them and were left out")
    if read.undivided:
        notes.append(
            f"--group-size {options.group_size} does not divide {read.undivided} stretches of rows with one prompt; each "
            "counts as one group"
        )
    return notes


FORMAT = Format(
    "parquet files of GRPOTrainer(log_completions=True)",
    partial(by_suffix, suffix=".parquet"),
    _read,
    None,
    ("reward", "weights", "group_size", "rows"),
)
