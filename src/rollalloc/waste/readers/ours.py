"""Reader for our own trainer's `rollouts.jsonl`, and for the accounts in its `metrics.jsonl`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

from rollalloc.runs.own import own_run
from rollalloc.waste.groups import Gathering, Log
from rollalloc.waste.readers.shared import Files, Format, Options, count, names, number, objects, said, text, whole


def _read(files: Files, log: Log, options: Options) -> None:
    gathering = Gathering()
    repeated = 0
    field = options.reward or "metric"
    accounts: Counter[str] = Counter()
    for file in files:
        if file.name.startswith("metrics."):
            accounts.update(_last_accounts(file, log))
            continue
        seen: set[int] = set()  # ids of rollouts, which are unique within a run
        for where, row in objects(file, log):
            prompt = row["key"] if "key" in row else row.get("prompt")
            if prompt is None or not isinstance(row.get("group"), (int, str)) or not {"version", field} <= row.keys():
                log.reject(where, f"expected group, version, key and {field}, found {names(row)}")
                continue
            if type(row.get("rollout")) is int:
                if row["rollout"] in seen:
                    repeated += 1
                    continue
                seen.add(row["rollout"])
            truncated = _flag(row.get("truncated"), log, where, "truncated")
            gathering.add(
                row["group"],
                text(prompt),
                whole(row["version"], log, where, "version"),
                number(row[field], log, where, field),
                truncated=truncated,
                limited=count(row.get("limit"), log, where, "limit") is not None and truncated,
                stage=whole(row.get("stage"), log, where, "stage") or 0,
                tokens=count(row.get("tokens"), log, where, "tokens"),
                answered=said(row.get("text")),
            )
        gathering.close()
    log.groups = gathering.groups()
    folders = dict.fromkeys(file.parent for file in files.paths)
    log.runs = [run for folder in folders if (run := own_run(folder)) is not None]
    log.accounts = dict(accounts) or None
    if log.groups:
        log.notes.append(f"reward: {names([field])}")
    if repeated:
        log.notes.append(f"{repeated:,} lines repeat the id of a rollout and were left out; give each run its own file")
    if not log.groups:
        log.notes.append("metrics.jsonl has sums, not rollouts: train with --log-rollouts for intervals")


def _flag(value: Any, log: Log, where: str, name: str) -> bool:
    if value is not None and value not in (False, True):
        log.doubt(where, f"{name} is {short(value)}, expected true or false")
        return False
    return bool(value)


def _last_accounts(file: Path, log: Log) -> dict[str, int]:
    """Rollouts by cause at the end of a run, from the last line of its metrics."""
    accounts: dict[str, int] = {}
    for where, row in objects(file, log):
        candidate = row.get("accounts")
        if isinstance(candidate, dict) and all(type(count) is int and count >= 0 for count in candidate.values()):
            accounts = candidate
        else:
            log.reject(where, "expected the field accounts, rollouts by cause")
    return accounts


def _choose(files: Sequence[Path]) -> list[Path]:
    own = ("rollouts.jsonl", "metrics.jsonl")
    found = [file for file in files if file.name.removesuffix(".gz").removesuffix(".zst") in own]
    beside = [path for file in found if (path := file.with_name("metrics.jsonl")) not in found and path.is_file()]
    return [*found, *dict.fromkeys(beside)]


FORMAT = Format(
    "rollouts.jsonl of `rollalloc train --log-rollouts`, or metrics.jsonl",
    _choose,
    _read,
    lambda line: "rollout" in line or "accounts" in line,
)
