"""A run's log into a ledger, each of its rollouts once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollalloc.ledger.records import Record, Rollouts
from rollalloc.ledger.sources import Source
from rollalloc.ledger.store import write
from rollalloc.waste.groups import Groups, Log, outcomes

_RUN = "INSERT INTO runs (format, source, judged, model, weights, weights_after, recipe, seed) VALUES (?,?,?,?,?,?,?,?)"
_RECORD = """
INSERT INTO records (prompt, run, step, attempts, scored, successes, reward_sum, tokens)
VALUES ((SELECT id FROM prompts WHERE key = ?), ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    attempts = attempts + excluded.attempts, scored = scored + excluded.scored,
    successes = successes + excluded.successes, reward_sum = reward_sum + excluded.reward_sum,
    tokens = coalesce(tokens + excluded.tokens, tokens, excluded.tokens)
"""


@dataclass(frozen=True, slots=True)
class Added:
    """What became of a run's log.

    Attributes:
        run: its number in the ledger.
        rollouts: that were added.
        known: that the ledger had, and that were not counted again.
        prompts: of the rollouts that were added.
        rates: whether the run has successes, so that priors can be made of it.
        went_on: the ledger had a part of this run before.
    """

    run: int
    rollouts: int
    known: int
    prompts: int
    rates: bool
    went_on: bool


def add(path: Path, source: Source, log: Log, judged: str, threshold: float | None = None) -> Added:
    """Add what a log says of its prompts, in one transaction.

    Two logs are of one run where at every step that both have, the rollouts of one are among those of the other: then what
    the ledger does not have yet is added to that run, and the rest is not counted again. Where two logs agree only up to
    some step, as runs do that went on apart from one checkpoint, what they agree on counts once, for the first of them.

    Args:
        path: of the ledger, made where there is none.
        source: of the log.
        log: as read.
        judged: what its metric is, in words; a run that is there already must have been judged alike.
        threshold: rewards of at least this are a success, all others none; None: they count as they are.

    Raises:
        ValueError: the log has no rollouts, or the ledger has the run, judged otherwise.
        OSError: as `rollalloc.ledger.store.write`.
        NotALedger: likewise.
        InUse: likewise.
    """
    groups = outcomes(log.groups, threshold)
    if not groups:
        raise ValueError(f"{source.log}: expected rollouts, found sums only; train with --log-rollouts")
    return write(path, lambda connection: _Addition(connection, source, log.format, groups, judged).done())


class _Addition:
    """One log on its way into an open ledger."""

    def __init__(
        self, connection: sqlite3.Connection, source: Source, format: str, groups: Groups, judged: str
    ) -> None:
        self._connection, self._source, self._format, self._judged = connection, source, format, judged
        self._rollouts = Rollouts.of(groups)
        self._steps = self._rollouts.by_step()
        self._fresh_R = np.ones(len(self._rollouts), np.bool_)

    def done(self) -> Added:
        home = self._known()
        run = self._begun() if home is None else home
        rollouts = self._rollouts
        fresh = int(self._fresh_R.sum())
        prompts = len(np.unique(rollouts.prompt_R[self._fresh_R]))
        records = list(rollouts.records(self._fresh_R))
        insert = "INSERT INTO prompts (key) VALUES (?) ON CONFLICT DO NOTHING"
        self._connection.executemany(insert, ((key,) for key in dict.fromkeys(record[0] for record in records)))
        self._connection.executemany(_RECORD, _of_run(records, run))
        self._connection.executemany("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", list(self._marks(run)))
        return Added(run, fresh, len(rollouts) - fresh, prompts, rollouts.rates, home is not None)

    def _begun(self) -> int:
        """The number of a new run."""
        of = self._source
        described = (str(of.log), self._judged, of.model, of.weights, of.weights_after, of.recipe, of.seed)
        number = self._connection.execute(_RUN, (self._format, *described)).lastrowid
        assert number is not None
        return number

    def _known(self) -> int | None:
        """The number of the run that this log is of, if the ledger has it; marks what is known as not fresh."""
        home: int | None = None
        runs = self._connection.execute("SELECT id, judged FROM runs WHERE format = ? ORDER BY id", (self._format,))
        for run, judged in runs.fetchall():
            held = {step for (step,) in self._connection.execute("SELECT step FROM marks WHERE run = ?", (run,))}
            agreed, differs = self._agreed(run, sorted(held & self._steps.keys()))
            for at, known in agreed:
                self._fresh_R[at] &= ~known
            if agreed and not differs and home is None:
                home = run
                if judged != self._judged:
                    raise ValueError(
                        f"{self._source.log} is of run {run} of this ledger, whose successes are {judged}; got "
                        f"{self._judged}: say the same (--threshold, --reward, --weights), or add it to another ledger"
                    )
        return home

    def _agreed(self, run: int, steps: list[int]) -> tuple[list[tuple[slice, NDArray[np.bool_]]], bool]:
        """Up to where a run and this log agree: rollouts of each step with those that are known; and whether they part."""
        agreed: list[tuple[slice, NDArray[np.bool_]]] = []
        for step in steps:
            at = self._steps[step]
            held, ours = self._held(run, step), self._rollouts.mark_R[at]
            known = np.isin(ours, held, assume_unique=True)
            if known.sum() < min(len(held), len(ours)):
                return agreed, True
            agreed.append((at, known))
        return agreed, False

    def _held(self, run: int, step: int) -> NDArray[np.uint64]:
        found = self._connection.execute("SELECT marks FROM marks WHERE run = ? AND step = ?", (run, step)).fetchone()
        return np.frombuffer(found[0] if found else b"", "<u8").astype(np.uint64)

    def _marks(self, run: int) -> Iterator[tuple[int, int, bytes]]:
        """The marks of each step that has fresh rollouts, with those that the run has already."""
        for step, at in self._steps.items():
            fresh = self._rollouts.mark_R[at][self._fresh_R[at]]
            if len(fresh):
                yield run, step, np.union1d(self._held(run, step), fresh).astype("<u8").tobytes()


def _of_run(records: list[Record], run: int) -> Iterator[tuple[object, ...]]:
    return ((key, run, *rest) for key, *rest in records)
