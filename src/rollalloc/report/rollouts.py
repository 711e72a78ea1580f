"""Reads the rollouts of a run, one after another: our `rollouts.jsonl`, TRL's completions, verl's dumps.

A log may be longer than the memory, so nothing is kept here. What a model wrote may be anything: every field is checked, and
a line that cannot be used is counted.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from rollalloc.data.jsonl import decoded
from rollalloc.files.names import DECISIONS, ROLLOUTS
from rollalloc.files.regular import lines_of, open_regular, why
from rollalloc.files.text import error_text
from rollalloc.runs.discovery import natural
from rollalloc.runs.recorded import RecordedRun
from rollalloc.runs.trl_log import ROLLOUT
from rollalloc.runs.unusable import Unusable
from rollalloc.waste.readers.shared import message_text, text
from rollalloc.waste.readers.verl import group_and_session

COMPLETIONS = "completions"  # TRL's folder for `log_completions=True`
_OWN = ("step", "prompt", "completion", "advantage")  # TRL's columns that are no rewards
_ROWS = 1024  # rows of a parquet file that are read at once
_KEY = 120  # characters of a prompt's key


class LoggedRollout(NamedTuple):
    """A rollout in a log.

    Attributes:
        group: name of its group, equal for the rollouts of one visit of a prompt.
        prompt: key of its prompt.
        asked: the prompt's text; None if this line does not have it.
        text: what the model wrote; None if it is not logged.
        reward: the reward used for training; None without a score.
        metric: the metric used for selection; None without a score.
        tokens: its length; None if it is not logged.
        cut: what cut it off; empty if nothing did, or if the log does not say.
        unscored: why it has no score; None if it has one, or if the log does not say.
        version: version of the weights that generated it, or the training step; None if it is not logged.
        rollout: its id in the run; None if the log has none.
        advantage: its advantage; None if it is not logged here.
    """

    group: Hashable
    prompt: str
    asked: str | None
    text: str | None
    reward: float | None
    metric: float | None
    tokens: int | None
    cut: str
    unscored: str | None
    version: int | None
    rollout: int | None
    advantage: float | None = None


@dataclass(slots=True)
class LogState(Unusable):
    """The state of reading a log: what it is, and what of it could not be used.

    Attributes:
        source: the name of the log, for the page.
    """

    source: str = ""

    @property
    def problem(self) -> str | None:
        """What could not be read, as a sentence; None if everything was."""
        if not self.bad:
            return None
        more = f", and {self.bad - 1:,} more" if self.bad > 1 else ""
        return f"{self.first_bad}{more}; left out"


def rollouts_of(run: RecordedRun, reading: LogState) -> Iterator[LoggedRollout]:
    """Yield the rollouts in the log of a run, in its order; none if the run has no such log.

    Args:
        run: the run.
        reading: is filled with the name of the log and its problems.
    """
    if run.folder.is_file():
        dumps = dumps_of(run.folder)
        reading.source = f"{dumps[0].parent.name}/*.jsonl" if dumps else ""
        for file in dumps:
            yield from _verl(file, reading)
    elif os.path.lexists(run.folder / ROLLOUTS):
        reading.source = ROLLOUTS
        yield from _ours(run.folder / ROLLOUTS, reading)
    else:
        files = sorted((run.folder / COMPLETIONS).glob("*.parquet"), key=natural)
        reading.source = f"{COMPLETIONS}/*.parquet" if files else ""
        seen: set[str] = set()
        for file in files:
            yield from _trl(file, reading, seen)


def dumps_of(log: Path) -> list[Path]:
    """verl's dumps of training rollouts, one file for each step, that belong to a log of its `file` logger.

    They are in the folder beside the log that has the log's name without the suffix (`trainer.rollout_data_dir`).
    """
    folder = log.with_suffix("")
    if not folder.is_dir():
        return []
    return sorted((file for file in folder.glob("*.jsonl") if file.stem.isdecimal()), key=natural)


# ------------------------------------------------------------------------------------------------------------------ ours


def _ours(file: Path, reading: LogState) -> Iterator[LoggedRollout]:
    for where, row in _rows_of(file, reading):
        group, key = row.get("group"), row.get("key", row.get("prompt"))
        if not isinstance(group, int | str) or key is None:
            reading.reject(where, "no group and key")
            continue
        yield LoggedRollout(
            group,
            text(key)[:_KEY],
            _said(row.get("prompt_text")),
            _said(row.get("text")),
            _number(row.get("reward")),
            _number(row.get("metric")),
            _whole(row.get("tokens")),
            _cut(row),
            _said(row.get("unscored")),
            _whole(row.get("version")),
            _whole(row.get("rollout")),
        )


def _cut(row: Mapping[str, Any]) -> str:
    """What cut a rollout off, in words. The log has the limit of the rollout's order only if the recipe gave it one."""
    if row.get("truncated") is not True:
        return ""
    return "cut off at the length limit" if _whole(row.get("limit")) is None else "stopped at the recipe's limit"


@dataclass
class Decisions:
    """What became of some rollouts, by `decisions.jsonl`: their groups' fate, and the advantages of the rows.

    Attributes:
        fates: for each group that ended, "trained" or why it was not, such as "out_of_band/solved".
        advantages: for each rollout that was trained on, its advantage when it was first trained on.
        batches: the number of the batch that first trained on each of these rollouts.
    """

    fates: dict[Hashable, str] = field(default_factory=dict[Hashable, str])
    advantages: dict[int, float] = field(default_factory=dict[int, float])
    batches: dict[int, int] = field(default_factory=dict[int, int])


def decisions_of(run: RecordedRun, groups: set[Hashable], reading: LogState) -> Decisions:
    """The decisions about some groups of a run; empty if they were not logged."""
    found = Decisions()
    file = run.folder / DECISIONS
    if run.folder.is_file() or not os.path.lexists(file):
        return found
    for where, row in _rows_of(file, reading):
        ended, rows = row.get("groups"), row.get("rows")
        batch: Any = row.get("batch")
        if not isinstance(ended, dict) or not isinstance(rows, list):
            reading.reject(where, "no groups and rows")
            continue
        for fate, ids in ended.items():
            for group in groups.intersection(ids) if isinstance(ids, list) else ():
                found.fates[group] = fate
        with suppress(TypeError, ValueError):  # somebody edited the file
            for rollout, group, advantage in rows:
                if group in groups:
                    found.advantages.setdefault(rollout, float(advantage))
                    found.batches.setdefault(rollout, int(batch))
    return found


# ------------------------------------------------------------------------------------------------------------------- TRL


def _trl(file: Path, reading: LogState, seen: set[str]) -> Iterator[LoggedRollout]:
    """The rows of a file of TRL. Leading columns of floats are rewards.

    Our trainer names the group and the rollout of each row. A rollout that is in `seen`, which grows, is left out: it was
    replayed, or TRL kept its row in the table. Without names, consecutive rows with one prompt are a group.
    """
    where = f"{COMPLETIONS}/{file.name}"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        reading.reject(where, "needs pyarrow: pip install 'rollalloc[native]'")
        return
    number = 0
    try:
        with open_regular(file) as held, pyarrow.parquet.ParquetFile(held) as opened:
            rewards = _rewards_in(opened.schema_arrow)
            batches = (batch.to_pylist() for batch in opened.iter_batches(_ROWS))
            rows = (row for batch in batches for row in batch if _is_new(row.get(ROLLOUT), seen))
            for (named, _), group in groupby(rows, key=_visit):
                number += 1
                yield from map(partial(_trl_row, named or (file.name, number), rewards), group)
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, AttributeError, MemoryError) as error:
        reading.reject(where, f"cannot be read ({error_text(error, 120)})")


def _is_new(rollout: Any, seen: set[str]) -> bool:
    """Whether a row without a name, or with this one, was not read before. Afterwards, it is in `seen`."""
    if not isinstance(rollout, str):
        return True
    new = rollout not in seen
    seen.add(rollout)
    return new


def _visit(row: Mapping[str, Any]) -> tuple[str, str]:
    """The name of a row's group, or "" and the row's prompt."""
    named = row.get(ROLLOUT)
    return (named.partition("/")[0], "") if isinstance(named, str) else ("", text(row.get("prompt")))


def _rewards_in(schema: Any) -> list[str]:
    from pyarrow import types

    columns: list[str] = []
    for column in schema:
        if column.name in _OWN:
            continue
        if not (types.is_floating(column.type) or types.is_null(column.type)):
            break
        columns.append(column.name)
    return columns


def _trl_row(group: Hashable, rewards: list[str], row: Mapping[str, Any]) -> LoggedRollout:
    scores = [score for name in rewards if (score := _number(row.get(name))) is not None]
    reward = sum(scores) if scores else None
    asked = message_text(row.get("prompt"))
    completion = row.get("completion")
    return LoggedRollout(
        group,
        " ".join(asked[-4 * _KEY :].split())[-_KEY:],
        asked,
        None if completion is None else message_text(completion, role="assistant"),
        reward,
        reward,
        None,
        "",
        None if scores else "no reward function gave a score",
        _whole(row.get("step")),
        None,
        _number(row.get("advantage")),
    )


# ------------------------------------------------------------------------------------------------------------------ verl


def _verl(file: Path, reading: LogState) -> Iterator[LoggedRollout]:
    for where, row in _rows_of(file, reading):
        score = row.get("acc") if row.get("acc") is not None else row.get("score")
        if row.get("input") is None or score is None:
            reading.reject(where, "no input and score")
            continue
        asked, uid, step = text(row["input"]), row.get("uid"), _whole(row.get("step"))
        group = group_and_session(uid)[0] if isinstance(uid, str) else asked
        yield LoggedRollout(
            (file.stem, group),
            " ".join(asked[-4 * _KEY :].split())[-_KEY:],
            asked,
            _said(row.get("output")),
            _number(row.get("score")),
            _number(score),
            None,
            "",
            None,
            int(file.stem) if step is None else step,
            None,
        )


# ---------------------------------------------------------------------------------------------------------------- fields


def _rows_of(file: Path, reading: LogState) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON object in a file with its place. An incomplete last line is skipped, because it is being written."""
    try:
        for number, line, complete in lines_of(file):
            where = f"{file.name}:{number}"
            if line is None:
                reading.reject(where, "too long")
                continue
            try:
                row = decoded(line) if line.strip() else None
            except (ValueError, RecursionError):
                if complete:
                    reading.reject(where, "not a line of JSON")
                continue
            if isinstance(row, dict):
                yield where, row
            elif row is not None:
                reading.reject(where, "not an object")
    except OSError as error:
        reading.reject(file.name, why(error))


def _said(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    with suppress(OverflowError):
        if isinstance(value, int | float) and isfinite(value):
            return float(value)
    return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 2**53 else None
