"""How long the answers to a prompt were at its first visit and are at its newest; from `rollouts.jsonl`, where one is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.lab.report.samples import STOPPED, rollouts_of


def first_and_newest(folder: Path) -> NDArray[np.float64]:
    """Mean tokens of each prompt's first and of its newest group, shape (prompts, 2), without what was stopped.

    Prompts that are found among the oldest rollouts of the file and, in another group, among its newest; both ends are read,
    not what lies between. Rollouts are written as they end, short ones first, so that a group of which a part was read would
    seem longer or shorter than it is: where the file is larger, groups with a rollout in the tenth next to what was not read
    are left out. Shape (0, 2) where the run kept no rollouts, or no prompt came twice.
    """
    try:
        oldest, newest = list(rollouts_of(folder, oldest=True)), list(rollouts_of(folder))
    except OSError:
        return np.empty((0, 2))
    edge = 0 if oldest == newest else -(-min(len(oldest), len(newest)) // 10)
    first = _groups(oldest, oldest[len(oldest) - edge :])
    last = _groups(newest, newest[:edge])
    both: list[tuple[float, float]] = []
    for prompt, groups in last.items():
        now = next(reversed(groups))
        then = next(iter(first.get(prompt, groups)))
        if prompt in first and then != now:
            both.append((float(np.mean(first[prompt][then])), float(np.mean(groups[now]))))
    return np.array(both).reshape(-1, 2)


def _groups(lines: Iterable[Mapping[str, Any]], edge: Iterable[Mapping[str, Any]]) -> dict[Any, dict[Any, list[int]]]:
    """Prompt → group → tokens of its rollouts, in the order of the file, without the groups of the edge."""
    found: dict[Any, dict[Any, list[int]]] = {}
    partial = {line.get("group") for line in edge}
    for line in lines:
        prompt, group, tokens = line.get("key", line.get("prompt")), line.get("group"), line.get("tokens")
        if prompt is None or group is None or tokens is None:
            continue
        if group not in partial and line.get("unscored") != STOPPED:
            found.setdefault(prompt, {}).setdefault(group, []).append(tokens)
    return found
