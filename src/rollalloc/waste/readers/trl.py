"""Reader for TRL's completions: each call of `GRPOTrainer.log` writes the last generation batch as a Parquet file.

A file has these columns, in this order: `step`, `prompt`, `completion`, a column for each reward function, columns that
reward functions log with `log_extra`, and `advantage`. It does not say which columns are rewards. All leading columns of
numbers are added, unless the user names the rewards. An evaluation overwrites the file of its step; the steps of evaluations
are read from the trainer's state in a checkpoint beside the log.

`AllocatedGRPOTrainer` adds a column with the ids of each row's group and rollout. Without this column, the boundaries of
groups are found from the prompts and the advantages.

Rows are read in blocks; no text is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from itertools import count, groupby
from math import isfinite, isnan
from operator import attrgetter
from pathlib import Path
from statistics import correlation
from typing import Any, NamedTuple

import numpy as np

from rollalloc.files.text import visible
from rollalloc.rewards.function import summed
from rollalloc.runs.own import OwnRun, own_run
from rollalloc.runs.trl_log import ROLLOUT
from rollalloc.waste.groups import Gathering, Log, key_of
from rollalloc.waste.readers.shared import (
    Files,
    Format,
    Options,
    by_suffix,
    message_text,
    names,
    text,
    whole,
)

_OWN = ("step", "prompt", "completion", "advantage", ROLLOUT)  # TRL's fixed columns, and ours
_ROWS = 4096  # number of rows per block
_STATE = "trainer_state.json"
_REWARDS_DIFFER, _ADVANTAGES_DIFFER = 1e-6, 1e-3  # smaller differences within a group are only rounding
_DECIMALS = 6  # of a sum of rewards: TRL's scores are float32 numbers
# Minimum correlation of advantage and reward within a group. (TRL's advantages are a linear function of the reward.)
_PROPORTIONAL = 0.999


class _Row(NamedTuple):
    """A row that has a prompt."""

    prompt: str  # key
    step: int | None
    asked: str
    answered: str | None
    reward: float  # NaN if missing
    advantage: float | None
    ids: tuple[str, str] | None = None  # group and rollout, in the log of `AllocatedGRPOTrainer`


class _Reward(NamedTuple):
    """The reward of a file's rows: a weighted sum of columns."""

    columns: tuple[str, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, columns: tuple[str, ...], options: Options) -> _Reward:
        """A reward from these columns. The user's weights belong to the first columns; other columns get the weight 0.

        Raises:
            ValueError: the number of weights does not fit.
        """
        weights = options.weights or (1.0,) * len(columns)
        if len(weights) > len(columns) or (options.rewards and len(weights) != len(columns)):
            raise ValueError(f"--weights: expected one for each of {names(columns)}, got {len(weights)}")
        return cls(columns, (*weights, *[0.0] * (len(columns) - len(weights))))

    def __call__(self, scores: Sequence[float]) -> float:
        """The weighted sum of the scores that are not missing, as in TRL; NaN if all scores with a weight are missing."""
        present = [
            score * weight for score, weight in zip(scores, self.weights, strict=True) if weight and not isnan(score)
        ]
        if not present:
            return np.nan
        return present[0] if len(self.columns) == 1 else summed(present, _DECIMALS)

    def __str__(self) -> str:
        """The sum in words, e.g. right + 0.2 × short."""
        terms = zip(self.columns, self.weights, strict=True)
        return " + ".join(
            names([name]) if weight == 1 else f"{weight:.3g} × {names([name])}" for name, weight in terms if weight
        )


@dataclass(slots=True)
class _Read:
    """The state while files are read."""

    gathering: Gathering = field(default_factory=Gathering)
    rewards: dict[str, None] = field(default_factory=dict[str, None])  # in words, in the order of the files
    added: bool = False  # whether several columns were added because the user named none
    compared: int = 0  # number of groups for which advantages and rewards can be compared
    contradicted: int = 0  # number of groups in which the advantages do not follow the reward
    evaluations: int = 0  # number of rows of evaluations
    repeated: int = 0  # number of files that repeat the file before
    undivided: int = 0  # number of series (of rows with the same prompt) whose length is no multiple of the group size
    messages: bool = False  # whether a completion was a list of messages
    again: int = 0  # number of rows that repeat the id of a rollout
    seen: set[int] = field(default_factory=set[int])  # hashes of folder and rollout
    skipped: int = (
        0  # number of rollouts that were ordered between the first and the last of a batch, but are not logged
    )


def _read(files: Files, log: Log, options: Options) -> None:
    read, before = _Read(), b""
    steps_in, run_of = cache(evaluated_steps), cache(_own_run)
    for file in files:
        with _opened(file, log) as opened:
            if opened is None or not opened.metadata.num_rows:
                continue
            columns = options.rewards or _leading(opened.schema_arrow)
            if problem := _problem(opened.schema_arrow, columns):
                log.reject(visible(str(file)), problem)
                continue
            reward = _Reward.of(columns, options)
            digest, rows = _rows(opened, file, reward, log, read)
            if digest == before:  # the batch was logged a second time, before the next generation
                read.repeated += 1
                continue
            before = digest
            has_ids = opened.schema_arrow.names.count(ROLLOUT) == 1
            training = rows if options.all_rows or not has_ids else [row for row in rows if row.ids is not None]
            read.evaluations += len(rows) - len(training)
            if not options.all_rows and not has_ids and rows and rows[0].step in (steps_in(file.parent) or ()):
                read.evaluations += len(rows)
                continue
            read.rewards[str(reward)] = None
            read.added = read.added or (len(columns) > 1 and not options.rewards and options.weights is None)
            _add_groups(training, options.group_size, run_of(file.parent), str(file.parent), read)
    log.groups = read.gathering.groups()
    log.runs = list(dict.fromkeys(run for file in files.paths if (run := run_of(file.parent)) is not None))
    log.complete = not (log.runs or read.seen)
    log.skipped = read.skipped
    if read.evaluations and not len(log.groups):
        folder = visible(str(files.paths[0].parent))
        raise ValueError(
            f"{folder}: expected rollouts of training, but all {read.evaluations:,} rows are of steps "
            f"with an evaluation ({_STATE}). An evaluation overwrites the training rows of its step: log at steps "
            "without an evaluation, or count these rows with --rows all"
        )
    if len(log.groups):
        unknown = not options.all_rows and not read.seen and any(steps_in(file.parent) is None for file in files.paths)
        log.notes += _notes(read, options, unknown)


def _own_run(folder: Path) -> OwnRun | None:
    """The run of rollalloc that wrote a log, from its state in the log's folder or its parent; None for other runs."""
    return own_run(folder) or own_run(folder.parent)


def evaluated_steps(folder: Path) -> frozenset[int] | None:
    """The steps with an evaluation, from the trainer's states in a log's folder or its parent; None without a state."""
    states = [
        path
        for output in (folder, folder.parent)
        for path in (output / _STATE, *output.glob(f"checkpoint-*/{_STATE}"))
        if path.is_file()
    ]
    steps = set[int]()
    for path in states:
        try:
            history: Any = json.loads(path.read_text(encoding="utf-8"))["log_history"]
            steps |= {int(line["step"]) for line in history if any(name.startswith("eval_") for name in line)}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # the file is incomplete, or of another program
    return frozenset(steps) if states else None


@contextmanager
def _opened(file: Path, log: Log) -> Iterator[Any]:
    """The Parquet file; None if it is not one. If reading it fails later, the file is also rejected."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'rollalloc[native]'") from error
    broken = (pyarrow.ArrowException, OSError, UnicodeDecodeError, MemoryError)
    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except broken:  # a killed run leaves an incomplete file
        log.reject(visible(str(file)), "not a readable parquet file")
        yield None
        return
    with opened:
        try:
            yield opened
        except broken:
            log.reject(visible(str(file)), "not a readable parquet file")


# ---------------------------------------------------------------------------------------------------------------- columns


def _leading(schema: Any) -> tuple[str, ...]:
    """The leading float columns, which may be rewards: TRL writes rewards as floats, before the other logged columns."""
    columns: list[str] = []
    for column in schema:
        if column.name in _OWN:
            continue
        if not _is_score(column.type):
            break
        columns.append(column.name)
    return tuple(columns)


def _problem(schema: Any, columns: Sequence[str]) -> str:
    """Why these columns cannot be read; empty if they can."""
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


def _rows(opened: Any, file: Path, reward: _Reward, log: Log, read: _Read) -> tuple[bytes, list[_Row]]:
    """Return a digest of all columns of a file except `step`, and the rows that have a prompt."""
    schema = opened.schema_arrow
    compared = [at for at, name in enumerate(schema.names) if name != "step"]
    has_advantages = schema.names.count("advantage") == 1 and _is_score(schema.field("advantage").type)
    digest = blake2b(str([(schema.names[at], str(schema.field(at).type)) for at in compared]).encode())
    rows: list[_Row] = []
    places, name = count(1), visible(str(file))
    for batch in opened.iter_batches(_ROWS):
        digest.update(batch.select(compared).serialize())
        nothing = [None] * batch.num_rows
        steps = batch.column("step").to_pylist() if schema.names.count("step") == 1 else nothing
        advantages = batch.column("advantage").to_pylist() if has_advantages else nothing
        scores = zip(*(batch.column(name).to_pylist() for name in reward.columns), strict=True)
        prompts = batch.column("prompt").to_pylist()
        answers = batch.column("completion").to_pylist() if schema.names.count("completion") == 1 else nothing
        ids = batch.column(ROLLOUT).to_pylist() if schema.names.count(ROLLOUT) == 1 else nothing
        columns = zip(prompts, steps, advantages, scores, answers, ids, places, strict=False)
        for prompt, step, advantage, scored, answer, id_, place in columns:
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
                    reward(
                        [_finite(score, log, where, name) for score, name in zip(scored, reward.columns, strict=True)]
                    ),
                    advantage,
                    (of.partition("/")[0], of) if isinstance(of := id_, str) else None,
                )
            )
    if not rows and next(places) == 1:  # its footer says that it has rows
        raise OSError("no rows where the footer has some")
    return digest.digest(), rows


def _finite(score: Any, log: Log, where: str, column: str) -> float:
    """A score as a float; NaN if it is missing. An infinite score is counted as invalid and treated as missing."""
    value = np.nan if score is None else float(score)
    if np.isinf(value):
        log.doubt(where, f"{names([column])} is infinite, expected a finite number")
        return np.nan
    return value


# ----------------------------------------------------------------------------------------------------------------- groups


def _add_groups(rows: Sequence[_Row], size: int | None, run: OwnRun | None, folder: str, read: _Read) -> None:
    """Split rows into groups: by their ids; without ids, by the prompts and the advantages."""
    known = [row for row in rows if row.ids is not None and _is_new(row, folder, read)]
    batch = [int(row.ids[1].rpartition("/")[2]) for row in known if row.ids is not None]
    read.skipped += max(batch) - min(batch) + 1 - len(batch) if batch else 0
    groups = [list(group) for _, group in groupby(known, key=lambda row: row.ids and row.ids[0])]
    unnamed = [row for row in rows if row.ids is None]
    if run is not None and unnamed and unnamed[0].step is not None:
        # TRL's table keeps rows of earlier batches until it is full.
        unnamed = unnamed[-run.rows_at.get(unnamed[0].step, len(unnamed)) :]
    for group in [*groups, *_split(unnamed, size, run, read)]:
        for row in group:
            read.gathering.add(0, row.prompt, group[0].step, row.reward, asked=row.asked, answered=row.answered)
        read.gathering.close()
        follows = _follows(group)
        read.compared += follows is not None
        read.contradicted += follows is False


def _is_new(row: _Row, folder: str, read: _Read) -> bool:
    """Whether a row's rollout was not logged before. TRL's table keeps rows until it is full, and rows may be replayed."""
    mark = hash((folder, row.ids))
    read.again += mark in read.seen
    new = mark not in read.seen
    read.seen.add(mark)
    return new


def _split(rows: list[_Row], size: int | None, run: OwnRun | None, read: _Read) -> list[list[_Row]]:
    """Split rows without ids into groups. TRL writes a prompt's completions one after another.

    If a prompt was drawn twice in a row, its rows are two groups. Their advantages show it, unless all are 0. Then the
    other groups' size decides: groups of TRL's own trainer have one size, but a recipe of rollalloc may vary it.
    If no two prompts in a row are the same, the advantages of all rows show the size. If these are one whole, the baseline
    was the batch's, and each row is a group.
    """
    series = [list(rows_) for _, rows_ in groupby(rows, key=attrgetter("prompt"))]
    if (
        run is None and len(series) == len(rows) > 1
    ):  # an environment may add a text of its own to each prompt of a group
        known = size or _shown_size(rows)
        if known > 1 and len(rows) % known == 0 and (size or known < len(rows)):
            return _parts(rows, known)
    if size is not None:
        read.undivided += sum(len(each) % size != 0 for each in series)
        return [part for each in series for part in _parts(each, size)]
    if run is not None and run.each == 1:
        return [[row] for row in rows]
    shown = [_shown_size(each) for each in series]
    told = {known for known in shown if known}
    usual = 0 if run is not None or len(told) > 1 else min(told or map(len, series), default=1)
    if not all(len(each) % usual == 0 for each in series if usual):
        usual = 0
    return [
        part for each, known in zip(series, shown, strict=True) for part in _parts(each, known or usual or len(each))
    ]


def _parts(rows: list[_Row], size: int) -> list[list[_Row]]:
    """Parts of this size; all rows as one part if the size does not divide their number."""
    size = size if len(rows) % size == 0 else len(rows)
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _shown_size(rows: list[_Row]) -> int:
    """The size of the groups in a series of rows with the same prompt, as their advantages show it; 0 if they do not.

    Within a group, advantages are a linear function of the reward, and their sum is 0. So the largest parts for which this
    holds are the groups.
    """
    for size in range(len(rows), 1, -1):
        if len(rows) % size == 0:
            parts = _parts(rows, size)
            follow = [_follows(part) and _sums_to_zero(part) for part in parts]
            if True in follow and False not in follow:
                return size
    return 0


def _sums_to_zero(rows: list[_Row]) -> bool:
    return abs(sum(row.advantage or 0.0 for row in rows)) <= _ADVANTAGES_DIFFER * len(rows)


def _follows(rows: Sequence[_Row]) -> bool | None:
    return _follow([(row.reward, row.advantage) for row in rows if row.advantage is not None])


def _follow(logged: Sequence[tuple[float, float]]) -> bool | None:
    """Whether the advantages of a group are proportional to its rewards; None if neither rewards nor advantages differ."""
    pairs = [pair for pair in logged if all(map(isfinite, pair))]
    if len(pairs) < 2:
        return None
    rewards, advantages = zip(*pairs, strict=True)
    differ = max(rewards) - min(rewards) > _REWARDS_DIFFER
    if differ != (max(advantages) - min(advantages) > _ADVANTAGES_DIFFER):
        return False
    return correlation(rewards, advantages) > _PROPORTIONAL if differ else None


def _notes(read: _Read, options: Options, unknown: bool) -> list[str]:
    """Notes for the reader. `unknown`: the steps with an evaluation are unknown, because there is no trainer's state."""
    notes = [f"reward: {' and in other files '.join(read.rewards)}"]
    if read.contradicted:
        notes.append(
            f"in {read.contradicted} of {read.compared} groups the logged advantages do not follow the reward: name the "
            "columns of the reward functions with --reward, and give the trainer's reward_weights as --weights and its "
            "num_generations as --group-size"
        )
    elif read.added and not read.compared:
        notes.append("the log does not tell which columns are rewards, so all are added; name them with --reward")
    if read.evaluations:
        notes.append(
            f"{read.evaluations:,} rows are of steps with an evaluation ({_STATE}) and were left out; --rows all counts "
            "them as training"
        )
    elif unknown:
        notes.append(f"no {_STATE} beside the log: rows of evaluations, if there are any, count as training")
    notes.append(
        "TRL logs only the last generation batch before each log: with logging_steps above 1, other batches are missing"
    )
    if read.messages:
        notes.append("completions are lists of messages: lengths and answers are taken from the assistant's text")
    if read.again:
        notes.append(f"{read.again:,} rows repeat a rollout of an earlier batch and were left out")
    if read.repeated:
        notes.append(f"{read.repeated} files repeat the file before them and were left out")
    if read.undivided:
        notes.append(
            f"--group-size {options.group_size} does not divide {read.undivided} series of rows with the same prompt; "
            "each series counts as one group"
        )
    return notes


FORMAT = Format(
    "parquet files of GRPOTrainer(log_completions=True)",
    partial(by_suffix, suffix=".parquet"),
    _read,
    None,
    ("reward", "weights", "group_size", "rows"),
)
