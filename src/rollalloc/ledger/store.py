"""The ledger's file: SQLite, marked as ours, changed in one transaction or not at all, never put over another file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from rollalloc.claims import InUse
from rollalloc.regular import opened
from rollalloc.whole import sync

T = TypeVar("T")

_APPLICATION = 0x726C6C67  # "rllg", in the header of the file
_SCHEMA_NUMBER = 1
_MAGIC = b"SQLite format 3\0"
_PATIENCE_S = 60.0  # that another process, which adds a run of a million rollouts, may take

_SCHEMA = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_SCHEMA_NUMBER};
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    format TEXT NOT NULL,         -- of its log: rollalloc, trl, verl or prime-rl
    source TEXT NOT NULL,         -- where the log was
    judged TEXT NOT NULL,         -- what its successes are
    model TEXT,                   -- name or folder that it began with, NULL where nobody said
    weights TEXT,                 -- digest of the weights that it began with
    weights_after TEXT,           -- and of those that it ended with
    recipe TEXT,
    seed INTEGER
);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE);
CREATE TABLE records (            -- what a prompt did in a run at a step, or under a version of the weights
    prompt INTEGER NOT NULL REFERENCES prompts,
    run INTEGER NOT NULL REFERENCES runs,
    step INTEGER NOT NULL,        -- -2^62 where the log does not say
    attempts INTEGER NOT NULL,
    scored INTEGER NOT NULL,
    successes REAL,               -- sum of metrics in [0, 1] of the scored ones; NULL where the run has no such metric
    reward_sum REAL NOT NULL,     -- of what training used
    tokens INTEGER,               -- NULL where the log does not say
    PRIMARY KEY (run, step, prompt)
) WITHOUT ROWID;
CREATE TABLE marks (              -- digests of the rollouts of a step, 8 bytes each, ascending: by them a run is known again
    run INTEGER NOT NULL REFERENCES runs,
    step INTEGER NOT NULL,
    marks BLOB NOT NULL,
    PRIMARY KEY (run, step)
) WITHOUT ROWID;
"""


class NotALedger(ValueError):
    """The file is something else, or damaged."""


def check(path: Path) -> None:
    """Refuse a file that is not a ledger; reads its header and changes nothing.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is no regular file.
        NotALedger: it is another file, or of another version.
    """
    with opened(path) as file:
        header = file.read(100)
    if header[:16] != _MAGIC or int.from_bytes(header[68:72]) != _APPLICATION:
        raise NotALedger(f"{path} is not a ledger of rollalloc, so it is left as it is; give another file")
    version = int.from_bytes(header[60:64])
    if version != _SCHEMA_NUMBER:
        raise NotALedger(
            f"{path} is a ledger of schema {version}, expected {_SCHEMA_NUMBER}: another version of rollalloc made it; use "
            "that one, or add the runs to a new file"
        )


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a ledger that sees it as it is now, whoever adds to it meanwhile.

    Raises:
        FileNotFoundError: there is no file.
        OSError: it is no regular file, or cannot be read.
        NotALedger: it is something else, or damaged.
        InUse: another process holds it for more than a minute.
    """
    check(path)
    with _said(path), closing(_connected(path)) as connection:
        connection.execute("BEGIN")
        yield connection


def write(path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
    """What `work` makes of a ledger, in one transaction: a process that is killed leaves it as it was, or complete.

    Args:
        path: of the ledger; a new one is made where nothing is, and appears when it is complete.
        work: writes; may be called again, where another process made the ledger meanwhile. What it raises undoes it.

    Raises:
        OSError: it is no regular file, or cannot be written.
        NotALedger: it is something else, or damaged, and is left as it is.
        InUse: another process writes for more than a minute.
    """
    while not os.path.lexists(path):
        try:
            return _made(path, work)
        except FileExistsError:  # by another process since
            continue
    check(path)
    with _said(path), closing(_connected(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            found = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return found


def _made(path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
    journal = path.with_name(f"{path.name}-journal")
    if os.path.lexists(journal):  # SQLite would take it for the new file's
        raise NotALedger(f"{journal} is there without {path.name}; move it away, or give another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".partial-{token_hex(8)}{path.suffix}")
    beside.open("xb").close()
    try:
        with _said(path), closing(sqlite3.connect(beside, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")  # nobody else sees it yet
            connection.executescript(_SCHEMA)
            connection.execute("BEGIN")
            found = work(connection)
            connection.execute("COMMIT")
        sync(beside)
        os.link(beside, path)  # never over a file that came meanwhile
        sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)
    return found


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_PATIENCE_S, isolation_level=None
    )
    try:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        connection.execute("PRAGMA trusted_schema = OFF")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise InUse(f"{path} is in use by another process; wait until it has ended") from error
        raise OSError(f"{path} could not be used ({error}); it is as it was before") from error
    except sqlite3.DatabaseError as error:
        raise NotALedger(
            f"{path} is damaged ({error}) and is left as it is; add the runs to a new file, or take it from a copy"
        ) from error
