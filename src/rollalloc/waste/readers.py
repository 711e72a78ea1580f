"""Readers: the rollout logs of TRL, verl, prime-rl and our own as one `Log`. Files are streamed, texts are not kept."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from glob import glob, has_magic
from itertools import groupby
from pathlib import Path
from typing import Any

from rollalloc.waste.groups import Gathering, Log, key_of

Watcher = Callable[[Path, int, int], None]  # file, how many were read before it, how many there are
_Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What a log does not say itself.

    Attributes:
        reward: field that holds the reward, for verl (by default `acc`, else `score`); for TRL one reward column instead
            of their sum.
        weights: of TRL's reward columns, in the trainer's order, 1 each by default.
        group_size: rollouts a prompt, for TRL's files; by default the shortest run of rows with the same prompt.
    """

    reward: str | None = None
    weights: tuple[float, ...] | None = None
    group_size: int | None = None


def read_log(
    path: str | Path, format: str | None = None, options: Options | None = None, watcher: Watcher | None = None
) -> Log:
    """Read the log of a run.

    Args:
        path: a file, a folder that holds such files at any depth, or a glob.
        format: one of `FORMATS`; by default told from the files' names and first lines.
        options: what the log does not say itself.
        watcher: called before each file.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: an unknown format, or files that have no usable rollout.
    """
    files = _files(str(path))
    if format is None:
        format = _detect(files, path)
    if format not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {format!r}")
    reader, options = FORMATS[format], options or Options()
    unused = [
        name for name in ("reward", "weights", "group_size") if getattr(options, name) and name not in reader.options
    ]
    if unused:
        raise ValueError(f"{' and '.join(unused)}: means nothing for a log of {format}; leave it out, or --format")
    chosen = reader.choose(files)
    if not chosen:
        raise ValueError(f"{path}: expected {reader.expects}, found {_some(files)}")
    log = Log(format)
    reader.read(_watched(chosen, watcher), log, options)
    if not log.groups and log.accounts is None:
        why = f"; the first of {log.bad} lines that cannot be used is {log.first_bad}" if log.bad else ""
        raise ValueError(f"{path}: expected {reader.expects}, found no rollout in {_some(chosen)}{why}")
    return log


# ------------------------------------------------------------------------------------------------------------------- TRL


def _read_trl(files: Iterable[Path], log: Log, options: Options) -> None:
    gathering, repeated, contradicted = Gathering(), 0, 0
    before = ""
    columns: Sequence[str] = ()
    for file in files:
        rows = _parquet_rows(file, log)
        if not rows:
            continue
        columns = columns or _trl_rewards(file, rows[0], options)
        digest = key_of(json.dumps([row | {"step": None} for row in rows], default=str))
        if digest == before:  # logged again before the next generation
            repeated += 1
            continue
        before = digest
        weights = options.weights or (1.0,) * len(columns)
        if len(weights) != len(columns):
            raise ValueError(f"--weights: expected one for each of {_names(columns)}, got {len(weights)}")
        for number, group in enumerate(_trl_groups(rows, options.group_size)):
            rewards = [_weighted([row.get(column) for column in columns], weights) for row in group]
            for row, reward in zip(group, rewards, strict=True):
                gathering.add((file, number), key_of(_text(row["prompt"])), _whole(row.get("step")), reward)
            contradicted += _contradicts(rewards, [row.get("advantage") for row in group])
    log.groups = gathering.groups()
    log.notes.append(
        f"reward: {_names(columns, ' + ')}" + ("" if options.weights is None else f", times {options.weights}")
    )
    log.notes.append(
        "TRL logs the last generation batch before each log; with logging_steps above 1 the others are absent"
    )
    if repeated:
        log.notes.append(f"{repeated} files repeat the one before them and were left out")
    if contradicted:
        log.notes.append(
            f"in {contradicted} of {len(log.groups)} groups the logged advantages and the summed rewards disagree on "
            "whether there was anything to learn: give the trainer's reward_weights as --weights, or its num_generations "
            "as --group-size"
        )


def _trl_rewards(file: Path, row: _Fields, options: Options) -> Sequence[str]:
    """The reward columns: all numeric ones that are not TRL's own, or the one that was asked for."""
    own = ("step", "prompt", "completion", "advantage")
    named = [name for name in row if name not in own]
    found = [name for name in named if row[name] is None or isinstance(row[name], float)]
    if options.reward is not None:
        found = [options.reward] if options.reward in row else []
    if "prompt" not in row or not found:
        wanted = options.reward or "a column of numbers for each reward function"
        raise ValueError(f"{file}: expected the columns prompt and {wanted}, found {_names(row)}")
    return found


def _trl_groups(rows: Sequence[_Fields], size: int | None) -> Iterator[list[_Fields]]:
    """TRL writes a prompt's completions one after the other; a prompt drawn twice in a row is two groups."""
    runs = [list(run) for _, run in groupby(rows, lambda row: _text(row["prompt"]))]
    size = size or min((len(run) for run in runs), default=1)
    for run in runs:
        step = size if len(run) % size == 0 else len(run)
        yield from (run[begin : begin + step] for begin in range(0, len(run), step))


def _weighted(values: Sequence[Any], weights: Sequence[float]) -> float | None:
    """The weighted sum of the scores that there are, None where there is none."""
    scored = [(_number(value), weight) for value, weight in zip(values, weights, strict=True)]
    known = [value * weight for value, weight in scored if value is not None]
    return sum(known) if known else None


def _contradicts(rewards: Sequence[float | None], advantages: Sequence[Any]) -> bool:
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2 or any(advantage is None for advantage in advantages):
        return False
    return (max(known) - min(known) > 1e-6) != any(abs(advantage) > 1e-6 for advantage in advantages)


def _parquet_rows(file: Path, log: Log) -> list[dict[str, Any]]:
    """The rows of one file; TRL writes a file a log, which holds one generation batch."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'rollalloc[native]'") from error
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            return [row for batch in opened.iter_batches() for row in batch.to_pylist()]
    except (pyarrow.ArrowException, OSError):  # a run that was killed leaves half a file
        log.reject(str(file), "not a readable parquet file")
        return []


# ------------------------------------------------------------------------------------------------------------------ verl


def _read_verl(files: Iterable[Path], log: Log, options: Options) -> None:
    gathering, used = Gathering(), dict[str, None]()
    for file in files:
        # An agent's session may have several outputs, one line each: the last holds what the rollout came to.
        latest: tuple[Any, ...] | None = None
        for where, row in _lines(file, log):
            field = options.reward or ("acc" if "acc" in row else "score")
            if "input" not in row or field not in row:
                log.reject(where, f"expected the fields input and {field}, found {_names(row)}")
                continue
            used[field] = None
            step = _whole(row.get("step", file.stem))
            group, session = _verl_ids(row)
            now = (group, session, (file, group), key_of(_text(row["input"])), step, _number(row[field]))
            if latest is not None and (session is None or now[:2] != latest[:2]):
                gathering.add(*latest[2:])
            latest = now
        if latest is not None:
            gathering.add(*latest[2:])
    log.groups = gathering.groups()
    log.complete = False
    log.notes.append(f"reward: {', '.join(used)}")
    log.notes.append(
        "verl dumps what it trains on: groups that algorithm.filter_groups or a recipe of rollalloc left out are absent, so "
        "with them the waste is at least this"
    )


def _verl_ids(row: _Fields) -> tuple[str, str | None]:
    """Group and session: the V1 trainer's uid is `{uid}_{session}_{output}`; the older one logs none."""
    uid = row.get("uid")
    if not isinstance(uid, str):
        return key_of(_text(row["input"])), None
    parts = uid.rsplit("_", 2)
    return (parts[0], parts[1]) if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal() else (uid, None)


# -------------------------------------------------------------------------------------------------------------- prime-rl

_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")


def _read_prime(files: Iterable[Path], log: Log, options: Options) -> None:
    gathering, effective = Gathering(), False
    for file in files:
        effective |= file.parent.name == "effective"
        for where, record in _lines(file, log):
            traces = record["traces"] if isinstance(record.get("traces"), list) else [record]
            if not traces and isinstance(record.get("task"), dict):  # failed before it came to a trace
                traces = [{"rewards": {}, "ok": False}]
            for trace in traces:
                problem = _prime_trace(record, trace, file, gathering)
                if problem is not None:
                    log.reject(where, problem)
    log.groups = gathering.groups()
    if effective:
        log.complete = False
        log.notes.append("these are prime-rl's effective traces only: groups that were filtered out are absent, so the "
                         "waste is at least this; the folder all beside has them")  # fmt: skip


def _prime_trace(record: _Fields, trace: Any, file: Path, gathering: Gathering) -> str | None:
    """Adds a trace's rollout; returns what is wrong with it."""
    if not isinstance(trace, dict) or not isinstance(trace.get("rewards"), dict):
        return "expected a trace with rewards"
    agent = _inside(trace, "agent")
    if agent.get("trainable") is False or _prime_kind(record) == "eval":
        return None
    group = record.get("group_id") or _inside(record, "info").get("group_id") or _inside(record, "group").get("id")
    task = _inside(record, "task") or _inside(trace, "task")
    if group is None or not task:
        return f"expected a group's id and a task, found {_names(record)}"
    prompt = task.get("key") or task.get("hash") or key_of(_text(task.get("data")))
    failed = trace.get("ok") is False or ("ok" not in trace and bool(trace.get("errors")))
    reward = None if failed else _prime_reward(trace["rewards"])
    calls = trace.get("calls")
    whole = (
        [call for call in calls if isinstance(call, dict) and not call.get("error")] if isinstance(calls, list) else []
    )
    at_limit = trace.get("stop_condition") in _LIMITS or bool(whole and whole[-1].get("finish_reason") == "length")
    step = _whole(next((part[5:] for part in file.parts if part.startswith("step_")), None))
    gathering.add((str(group), agent.get("name")), str(prompt), step, reward, truncated=at_limit)
    return None


def _prime_kind(record: _Fields) -> Any:
    run = _inside(record, "run")
    return record.get("kind") or _inside(run, "work").get("type") or run.get("type")


def _prime_reward(rewards: _Fields) -> float | None:
    """The sum of named rewards: numbers, or scores with weights; None where none was scored."""
    values = [
        _weighted([reward.get("score")], [_number(reward.get("weight", 1.0)) or 0.0])
        if isinstance(reward, dict)
        else _number(reward)
        for reward in rewards.values()
    ]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# ------------------------------------------------------------------------------------------------------------------ ours


def _read_ours(files: Iterable[Path], log: Log, options: Options) -> None:
    gathering = Gathering()
    field = options.reward or "metric"
    accounts: Counter[str] = Counter()
    for file in files:
        if file.name == "metrics.jsonl":
            accounts.update(_last_accounts(file, log))
            continue
        for where, row in _lines(file, log):
            missing = [name for name in ("group", "version", field) if name not in row]
            if missing or not ("key" in row or "prompt" in row):
                log.reject(where, f"expected group, version, key and {field}, found {_names(row)}")
                continue
            gathering.add(
                (file, row["group"]),
                _text(row["key"] if "key" in row else row["prompt"]),
                _whole(row["version"]),
                _number(row[field]),
                truncated=bool(row.get("truncated")),
                stage=_whole(row.get("stage")) or 0,
            )
    log.groups = gathering.groups()
    log.accounts = dict(accounts) or None
    if not log.groups:
        log.notes.append(
            "metrics.jsonl has sums, not rollouts: train with --log-rollouts for an interval and a forecast"
        )


def _last_accounts(file: Path, log: Log) -> dict[str, int]:
    """Rollouts by cause at the end of a run; each line of its metrics has them as they were by then."""
    accounts: dict[str, int] = {}
    for where, row in _lines(file, log):
        found = row.get("accounts")
        if isinstance(found, dict) and all(isinstance(rollouts, int) for rollouts in found.values()):
            accounts = found
        else:
            log.reject(where, "expected the field accounts, rollouts by cause")
    return accounts


# --------------------------------------------------------------------------------------------------------------- formats


@dataclass(frozen=True, slots=True)
class _Format:
    expects: str
    choose: Callable[[Sequence[Path]], list[Path]]
    read: Callable[[Iterable[Path], Log, Options], None]
    marks: Callable[[_Fields], bool] | None  # tells a line of it; None: told by the file's name
    options: tuple[str, ...] = ("reward",)


def _by_suffix(files: Sequence[Path], suffix: str) -> list[Path]:
    return [file for file in files if file.suffix == suffix]


def _prime_files(files: Sequence[Path]) -> list[Path]:
    """Training traces: all of them where they are logged, else those that were trained on."""
    training = [file for file in _by_suffix(files, ".jsonl") if "eval" not in file.parts and file.stem != "metrics"]
    everything = [file for file in training if file.parent.name == "all"]
    return everything or training


def _our_files(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.name in ("rollouts.jsonl", "metrics.jsonl")]


FORMATS = {
    "trl": _Format(
        "parquet files of GRPOTrainer(log_completions=True)",
        partial(_by_suffix, suffix=".parquet"),
        _read_trl,
        None,
        ("reward", "weights", "group_size"),
    ),
    "verl": _Format(
        "JSON lines of trainer.rollout_data_dir with input and score",
        partial(_by_suffix, suffix=".jsonl"),
        _read_verl,
        lambda line: "input" in line and "output" in line,
    ),
    "prime-rl": _Format(
        "rollouts/step_*/train/all/traces.jsonl",
        _prime_files,
        _read_prime,
        lambda line: "traces" in line or ("rewards" in line and "task" in line),
        (),
    ),
    "rollalloc": _Format(
        "rollouts.jsonl of `rollalloc train --log-rollouts`, or metrics.jsonl",
        _our_files,
        _read_ours,
        lambda line: "rollout" in line or "accounts" in line,
    ),
}


def _files(path: str) -> list[Path]:
    """Files under a path, sorted so that step_10 comes after step_9."""
    found = (
        [Path(one) for one in glob(path, recursive=True)]
        if has_magic(path) and not Path(path).exists()
        else [Path(path)]
    )
    files = [file for one in found for file in (one.rglob("*") if one.is_dir() else [one]) if file.is_file()]
    if not files:
        raise FileNotFoundError(f"{path}: no such file, and no folder or glob with files; give a log of rollouts")
    return sorted(set(files), key=_naturally)


def _naturally(file: Path) -> list[tuple[int, int, str]]:
    parts = [part for name in file.parts for part in ("".join(run) for _, run in groupby(name, str.isdecimal))]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _detect(files: Sequence[Path], path: str | Path) -> str:
    """The format that most of a log's first lines look like.

    Raises:
        ValueError: none.
    """
    if any(file.suffix == ".parquet" for file in files):
        return "trl"
    for file in sorted(_by_suffix(files, ".jsonl"), key=lambda file: file.name == "metrics.jsonl"):
        line = next((row for _, row in _lines(file, Log(""))), None)
        for name, format in FORMATS.items():
            if line is not None and format.marks is not None and format.marks(line):
                return name
    expected = "; ".join(f"{name}: {format.expects}" for name, format in FORMATS.items())
    raise ValueError(f"{path}: expected a log of one of these ({expected}), found {_some(files)}; --format forces one")


def _lines(file: Path, log: Log) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each JSON object of a file with its place; lines that are none are counted."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            where = f"{file}:{number}"
            try:
                row = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError):
                log.reject(where, "not JSON")
                continue
            if isinstance(row, dict):
                yield where, row
            elif row is not None:
                log.reject(where, "expected a JSON object")


def _watched(files: Sequence[Path], watcher: Watcher | None) -> Iterator[Path]:
    for number, file in enumerate(files):
        if watcher is not None:
            watcher(file, number, len(files))
        yield file


def _some(files: Sequence[Path]) -> str:
    names = ", ".join(file.name for file in files[:3])
    return names if len(files) <= 3 else f"{names} and {len(files) - 3} more"


def _names(found: Iterable[str], joint: str = ", ") -> str:
    """Names out of a file as they may be shown: a few, short, and nothing that moves a terminal's cursor."""
    names = [re.sub(r"[^\x20-\x7e]", "?", name)[:40] for name in found]
    return joint.join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _inside(record: _Fields, *keys: str) -> dict[str, Any]:
    """A dictionary within dictionaries; empty where there is none."""
    found = reduce(lambda held, key: held.get(key) if isinstance(held, dict) else None, keys, record)
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _number(value: Any) -> float | None:
    """A finite number as a float; None for whatever else, which is unscored."""
    try:
        return float(value) if isinstance(value, (bool, int, float)) and math.isfinite(value) else None
    except OverflowError:  # a whole number beyond any float
        return None


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None
