"""How long the answers to a prompt were at its first visit and are at its newest; from `rollouts.jsonl`, where one is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.report.samples import STOPPED, rollouts_of


def first_and_newest(folder: Path) -> NDArray[np.float64]:
    """Mean tokens of each prompt's first and of its newest group, shape (prompts, 2), without what was stopped.

    Prompts that are found in the oldest rollouts of the file and, in another group, in its newest; both ends are read, not
    what lies between. Shape (0, 2) where the run kept no rollouts, or no prompt came twice.
    """
    try:
        first = _groups(rollouts_of(folder, oldest=True))
        newest = _groups(rollouts_of(folder))
    except OSError:
        return np.empty((0, 2))
    both: list[tuple[float, float]] = []
    for prompt, old in first.items():
        then, now = next(iter(old)), next(reversed(newest.get(prompt, old)))
        if then != now:
            both.append((float(np.mean(old[then])), float(np.mean(newest[prompt][now]))))
    return np.array(both).reshape(-1, 2)


def _groups(lines: Iterable[Mapping[str, Any]]) -> dict[Any, dict[Any, list[int]]]:
    """Prompt → group → tokens of its rollouts, in the order of the file."""
    found: dict[Any, dict[Any, list[int]]] = {}
    for line in lines:
        prompt, group, tokens = line.get("key", line.get("prompt")), line.get("group"), line.get("tokens")
        if prompt is not None and group is not None and tokens is not None and line.get("unscored") != STOPPED:
            found.setdefault(prompt, {}).setdefault(group, []).append(tokens)
    return found
