"""What a ledger holds, for a reader of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollalloc.ledger.store import reading
from rollalloc.waste.groups import NO_STEP

_SUMS = f"""sum(attempts) AS attempts, sum(scored) AS scored, sum(successes) AS successes,
    sum(reward_sum) AS reward_sum, sum(tokens) AS tokens,
    min(CASE WHEN step = {NO_STEP} THEN NULL ELSE step END) AS first_step,
    max(CASE WHEN step = {NO_STEP} THEN NULL ELSE step END) AS last_step"""
_RUNS = f"""SELECT runs.*, found.* FROM runs LEFT JOIN (SELECT run, count(DISTINCT prompt) AS prompts, {_SUMS}
    FROM records GROUP BY run) AS found ON found.run = runs.id ORDER BY runs.id"""
_PROMPT = f"""SELECT runs.id AS run, runs.format, runs.source, runs.model, runs.weights, {_SUMS} FROM records
    JOIN runs ON runs.id = records.run JOIN prompts ON prompts.id = records.prompt
    WHERE prompts.key = ? GROUP BY runs.id ORDER BY runs.id"""


@dataclass(frozen=True, slots=True)
class Contents:
    """A ledger in sums.

    Attributes:
        prompts: different keys.
        rollouts: in all.
        runs: each with its sums; None where nothing is known.
    """

    prompts: int
    rollouts: int
    runs: list[Mapping[str, Any]]


def contents_of(path: Path) -> Contents:
    """What is in a ledger, by run.

    Raises:
        OSError: as `rollalloc.ledger.store.reading`.
        NotALedger: likewise.
        InUse: likewise.
    """
    with reading(path) as connection:
        runs = _rows(connection.execute(_RUNS))
        (prompts,) = connection.execute("SELECT count(*) FROM prompts").fetchone()
    for run in runs:
        del run["run"]
    return Contents(prompts, sum(run["attempts"] or 0 for run in runs), list(runs))


def prompt_in(path: Path, key: str) -> list[Mapping[str, Any]]:
    """What a prompt did in each run.

    Raises:
        KeyError: the ledger has no such prompt.
        OSError: as `rollalloc.ledger.store.reading`.
        NotALedger: likewise.
        InUse: likewise.
    """
    with reading(path) as connection:
        found = _rows(connection.execute(_PROMPT, (key,)))
    if not found:
        raise KeyError(key)
    return list(found)


def _rows(cursor: Any) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
