"""TRL's completions: a parquet file a log, which holds one generation batch.

Some rows are read at a time, and one file's texts are held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import count, groupby, repeat
from math import isinf, isnan
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from rollalloc.lab.waste.groups import Gathering, Log, key_of
from rollalloc.lab.waste.readers.shared import Format, Options, by_suffix, names, shown, text, whole

_OWN = ("step", "prompt", "completion", "advantage")  # columns that are TRL's; what else is a number is a reward
_ROWS = 4096  # held at a time
_DIFFERS = 1e-6  # rewards or advantages beyond it differ


class _Row(NamedTuple):
    """A row that has a prompt."""

    prompt: str  # its key
    step: int | None
    reward: float | None
    advantage: float | None
    asked: str
    answered: str | None


@dataclass(slots=True)
class _Counts:
    """What there is to say of the files together."""

    repeated: int = 0  # files
    contradicted: int = 0  # groups
    undivided: int = 0  # runs of rows with one prompt


def _read(files: Iterable[Path], log: Log, options: Options) -> None:
    gathering, counts, before = Gathering(), _Counts(), b""
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
            digest, rows = _rows(opened, file, dict(zip(columns, options.weights or repeat(1.0), strict=False)), log)
            if digest == before:  # logged again before the next generation
                counts.repeated += 1
                continue
            before = digest
            _add_groups(rows, options.group_size, gathering, counts)
    log.groups = gathering.groups()
    log.notes += _notes(counts, columns, options, len(log.groups))


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


def _rows(opened: Any, file: Path, weights: Mapping[str, float], log: Log) -> tuple[bytes, list[_Row]]:
    """A digest of all that a file says but the step, and its rows that have a prompt."""
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
        scores = zip(*(batch.column(name).to_pylist() for name in weights), strict=True)
        prompts = batch.column("prompt").to_pylist()
        answers = batch.column("completion").to_pylist() if schema.names.count("completion") == 1 else nothing
        columns = zip(prompts, steps, advantages, scores, answers, places, strict=False)
        for prompt, step, advantage, scored, answer, place in columns:
            where = f"{name}:{place}"
            if prompt is None:
                log.reject(where, "prompt is null")
                continue
            number, reward = whole(step, log, where, "step"), _weighted(scored, weights.values())
            if reward is not None and isinf(reward):
                log.doubt(where, "the reward is infinite, expected a finite number")
                reward = None
            asked, answered = text(prompt), None if answer is None else text(answer)
            rows.append(_Row(key_of(asked), number, reward, advantage, asked, answered))
    if not rows and next(places) == 1:  # its footer says that there are rows
        raise OSError("no rows where the footer has some")
    return digest.digest(), rows


def _weighted(scores: Iterable[Any], weights: Iterable[float]) -> float | None:
    """The weighted sum of the scores that there are, None where there is none."""
    known = [(float(score), weight) for score, weight in zip(scores, weights, strict=True) if score is not None]
    known = [(score, weight) for score, weight in known if not isnan(score)]
    total = sum(score * weight for score, weight in known if weight)
    return total if known and not isnan(total) else None


# ----------------------------------------------------------------------------------------------------------------- groups


def _add_groups(rows: Sequence[_Row], size: int | None, gathering: Gathering, counts: _Counts) -> None:
    """TRL writes a prompt's completions one after the other; a prompt drawn twice in a row is two groups."""
    runs = [list(run) for _, run in groupby(rows, key=attrgetter("prompt"))]
    usual = size or min(map(len, runs), default=1)
    for run in runs:
        counts.undivided += size is not None and len(run) % size != 0
        part = usual if len(run) % usual == 0 else len(run)
        for begin in range(0, len(run), part):
            group = run[begin : begin + part]
            for row in group:
                gathering.add(0, row.prompt, group[0].step, row.reward, asked=row.asked, answered=row.answered)
            gathering.close()
            counts.contradicted += _contradicted(group)


def _contradicted(group: Sequence[_Row]) -> bool:
    """Whether the advantages say that there was something to learn where the rewards do not, or the other way round."""
    rewards = [row.reward for row in group if row.reward is not None]
    advantages = [row.advantage for row in group if row.advantage is not None]
    if len(rewards) < 2 or len(advantages) < len(group):
        return False
    return (max(rewards) - min(rewards) > _DIFFERS) != any(abs(advantage) > _DIFFERS for advantage in advantages)


def _notes(counts: _Counts, columns: Sequence[str], options: Options, groups: int) -> list[str]:
    weighted = "" if options.weights is None else f", times {options.weights}"
    notes = [
        f"reward: {names(columns, ' + ')}{weighted}",
        "TRL logs the last generation batch before each log; with logging_steps above 1 the others are absent",
    ]
    if counts.repeated:
        notes.append(f"{counts.repeated} files repeat the one before them and were left out")
    if counts.contradicted:
        notes.append(
            f"in {counts.contradicted} of {groups} groups the logged advantages and the summed rewards disagree on "
            "whether there was anything to learn: give the trainer's reward_weights as --weights, or its num_generations "
            "as --group-size"
        )
    if counts.undivided:
        notes.append(
            f"--group-size {options.group_size} does not divide {counts.undivided} stretches of rows with one prompt; each "
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
