"""The newest visits, in a ring: what came of them, and what was believed before they were known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

GONE = -1  # the prompt of an event that left the data set

_COLUMNS: Mapping[str, type] = {
    "event_prompt": np.int64,
    "event_hits": np.float64,  # sum of metrics
    "event_count": np.int64,  # rollouts
    "event_paid": np.int64,  # rollouts observed up to and with it
    "event_belief": np.float64,  # the rate it was drawn with, NaN where none
    "event_constant": np.float64,  # what the running mean said
    "event_record_hits": np.float64,  # what the prompt's record held
    "event_record_count": np.float64,
    "event_drift": np.float64,  # common drift of all logits up to it
}


def empty(events: int) -> dict[str, Any]:
    """A ring for so many events, as entries of a memory; `seen` counts the events that ever came."""
    return {"seen": 0} | {name: np.zeros(events, dtype) for name, dtype in _COLUMNS.items()}


def append(memory: dict[str, Any], *values: float) -> None:
    """Write an event over the oldest; one value for each column, in their order."""
    at = memory["seen"] % len(memory["event_prompt"])
    for name, value in zip(_COLUMNS, values, strict=True):
        memory[name][at] = value
    memory["seen"] += 1


def slots(memory: dict[str, Any], first: int, last: int) -> NDArray[np.int64]:
    """Where the events first, …, last − 1 are, oldest first; less those overwritten, or of prompts that are gone."""
    size = len(memory["event_prompt"])
    at = np.arange(max(first, memory["seen"] - size), last, dtype=np.int64) % size
    return at[memory["event_prompt"][at] != GONE]


def renumbered(event_prompt: NDArray[np.int64], source_N: NDArray[np.int64], before: int) -> NDArray[np.int64]:
    """Where the events' prompts are in another data set; `GONE` where they left it.

    Args:
        event_prompt: indices among the prompts before, or `GONE`.
        source_N: for each prompt now its index before, each at most once, -1 where it is new.
        before: prompts that there were.
    """
    here_M = np.full(before + 1, GONE, np.int64)  # its last entry is that of events which are gone already
    known_N = source_N >= 0
    here_M[source_N[known_N]] = np.flatnonzero(known_N)
    return here_M[event_prompt]
