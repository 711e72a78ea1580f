"""Writes the prompts of a single-turn environment of `verifiers` to a file that rollalloc reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rollalloc.data.prompts import write_prompts
from rollalloc.files.claims import claim_files
from rollalloc.files.text import error_text
from rollalloc.rewards.environment import CONFIG, NAME, TASK, check_task, load_taskset, prompt_of

_MOST_TASKS = 10**12  # a larger number can only be a typing error
_ANSWERS = ("answer", "ground_truth", "solution", "target")  # fields of a task that may contain its right answer


def write_environment(
    name: str,
    path: Path,
    *,
    tasks: int | None = None,
    skip: int = 0,
    config: Mapping[str, Any] | None = None,
) -> int:
    """Write tasks of an environment as prompts. `rollalloc.rewards.environment.compute_score` scores their rollouts.

    Args:
        name: name of an installed environment, as `vf-eval` takes it.
        path: path of a new file, .parquet or .jsonl.
        tasks: number of tasks, at least 1. None: all.
        skip: number of tasks to leave out at the beginning, for example because the training file has them.
        config: configuration of the environment's taskset.

    Returns:
        The number of prompts.

    Raises:
        FileExistsError: the file exists.
        ValueError: the environment cannot be used (see `load_taskset`, `check_task`) or fails; it generates tasks without
            end, and `tasks` is None; or fewer than `tasks` tasks follow the skipped tasks.
        ImportError: the environment's package or the library verifiers is not installed.
    """
    if (tasks is not None and tasks < 1) or not 0 <= skip < _MOST_TASKS:
        raise ValueError(
            f"--tasks must be at least 1 and --skip at least 0 and below {_MOST_TASKS:,}, got {tasks} and {skip}"
        )
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already; give another --out, or remove it")
    taskset = load_taskset(name, config or {})
    if tasks is None and not taskset.bounded:
        raise ValueError(f"environment {name!r} generates tasks without end; give their number with --tasks")
    settings = json.dumps(dict(config or {}), sort_keys=True)
    rows: list[dict[str, Any]] = []
    for task in _drawn(name, taskset, skip, None if tasks is None else skip + tasks):
        check_task(name, task)
        rows.append(_row(name, settings, task))
    if not rows or (tasks is not None and len(rows) < tasks):
        wanted = "a task" if tasks is None else f"{tasks:,} tasks"
        raise ValueError(f"environment {name!r}: expected {wanted} after the first {skip:,}, found {len(rows):,}")
    claim_files([path])
    write_prompts(path, rows)
    return len(rows)


def _drawn(name: str, taskset: Any, start: int, stop: int | None) -> Iterator[Any]:
    """Tasks `start` to `stop` of a taskset. If the taskset raises an error, the ValueError names the environment."""
    try:
        yield from islice(iter(taskset), start, stop)
    except (Exception, SystemExit) as error:
        raise ValueError(f"environment {name!r} fails while it generates tasks ({error_text(error)})") from error


def _row(name: str, settings: str, task: Any) -> dict[str, Any]:
    data = task.data
    answer = next((getattr(data, field) for field in _ANSWERS if isinstance(getattr(data, field, None), str)), task.key)
    return {
        "data_source": name,
        "prompt": prompt_of(data),
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "index": task.key,
            NAME: name,
            CONFIG: settings,
            TASK: data.model_dump_json(exclude_none=True),
        },
    }
