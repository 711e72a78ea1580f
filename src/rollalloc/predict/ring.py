"""A ring buffer of the newest visits: the results, and what was predicted before each visit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

GONE = -1  # index of a prompt that left the data set

_COLUMNS: Mapping[str, type] = {
    "event_prompt": np.int64,
    "event_hits": np.float64,  # sum of metrics
    "event_count": np.int64,  # number of rollouts
    "event_paid": np.int64,  # number of rollouts observed so far, including this event's
    "event_belief": np.float64,  # rate predicted when the prompt was drawn, NaN if none
    "event_constant": np.float64,  # prediction of the running mean
    "event_record_hits": np.float64,  # the prompt's record before the event: successes, then rollouts
    "event_record_count": np.float64,
    "event_drift": np.float64,  # common drift of all logits up to the event
}


def empty(events: int) -> dict[str, Any]:
    """Return the entries of a memory for a ring of this many events. `seen` counts all events so far."""
    return {"seen": 0} | {name: np.zeros(events, dtype) for name, dtype in _COLUMNS.items()}


def append(memory: dict[str, Any], *values: float) -> None:
    """Overwrite the oldest event with a new one. `values` has one number for each column, in the order of the columns."""
    at = memory["seen"] % len(memory["event_prompt"])
    for name, value in zip(_COLUMNS, values, strict=True):
        memory[name][at] = value
    memory["seen"] += 1


def slots(memory: dict[str, Any], first: int, last: int) -> NDArray[np.int64]:
    """Positions of the events first, …, last − 1.

    Events that were overwritten and events of removed prompts are left out.
    """
    size = len(memory["event_prompt"])
    at = np.arange(max(first, memory["seen"] - size), last, dtype=np.int64) % size
    return at[memory["event_prompt"][at] != GONE]


def renumbered(event_prompt: NDArray[np.int64], source_N: NDArray[np.int64], before: int) -> NDArray[np.int64]:
    """The indices of the events' prompts in another data set; `GONE` for removed prompts.

    Args:
        event_prompt: indices in the old data set, or `GONE`.
        source_N: index of each new prompt in the old data set, each index at most once; -1 if not in the old data set.
        before: number of prompts in the old data set.
    """
    here_M = np.full(before + 1, GONE, np.int64)  # the last entry is for the index -1, which is `GONE`
    known_N = source_N >= 0
    here_M[source_N[known_N]] = np.flatnonzero(known_N)
    return here_M[event_prompt]
