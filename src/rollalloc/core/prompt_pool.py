"""Decide when each prompt may be drawn, and when an epoch ends."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.packing import exact_keys, move_in, natural, pack


@dataclass(frozen=True, slots=True)
class Epochs:
    """A prompt waits `count` epochs, counted from the epoch in which it was drawn. None: the prompt is never drawn again.

    Raises:
        ValueError: `count` is negative.
    """

    count: int | None

    def __post_init__(self) -> None:
        if self.count is not None and (type(self.count) is not int or self.count < 0):
            raise ValueError(f"Epochs: count must be a whole number of 0 or more, or None for never, got {self.count}")


NOW, NEXT_EPOCH, NEVER = Epochs(0), Epochs(1), Epochs(None)
Until = Epochs | int  # an int is the first version of the weights under which the prompt may be drawn

# Values of `due_N` above every epoch, for prompts that do not wait for an epoch.
_ON_VERSION, _IN_FLIGHT, _NEVER = (np.iinfo(np.int32).max - back for back in (2, 1, 0))
LEAST_SHARE = 0.25  # if a smaller share of the prompts is left to draw, drivers log a warning


class PromptPool:
    """The prompts that may be drawn. The pool stores the epoch from which each prompt may be drawn again.

    `free_N[i]` is `due_N[i] <= epoch`. When the prompt rule has no prompt left to draw, `roll` begins the next
    epoch in which a prompt may be drawn. Groups in flight continue.
    """

    def __init__(self, prompts: int) -> None:
        self.epoch = 0
        self.due_N: NDArray[np.int32] = np.zeros(prompts, np.int32)
        self.free_N: NDArray[np.bool_] = np.ones(prompts, np.bool_)
        # True for evicted prompts, until they are drawn again. Their last visit made them wait for more than one epoch.
        self.evicted_N: NDArray[np.bool_] = np.zeros(prompts, np.bool_)
        self.away = 0  # prompts in flight, prompts that wait for a version, and prompts that may never be drawn again
        self.barred = 0  # prompts that may never be drawn again
        self.revived = 0  # visits of prompts that had been evicted
        self.dry = False  # True if the last draw found no prompt, and no prompt has become free since
        self.out = 0  # prompts that do not come back in this epoch or the next
        self.should_warn = False  # whether drivers should warn after this batch that few prompts are left
        self._said = 0  # level of the last warning: 1 below `LEAST_SHARE`, 2 below half of it, 3 below a quarter, ...
        self._by_version: list[tuple[int, int]] = []

    def take(self, prompt: int) -> None:
        """Record that the prompt was drawn."""
        self.revived += bool(self.evicted_N[prompt])
        self.evicted_N[prompt] = False
        self.free_N[prompt] = False
        self.due_N[prompt] = _IN_FLIGHT
        self.away += 1

    def give_back(self, prompt: int, until: Until, drawn_epoch: int, version: int) -> None:
        """Record that the prompt's visit ended. `until` says when the prompt may be drawn again."""
        if isinstance(until, int):
            if until <= version:
                until = NOW
            else:
                # It stays `away`: no number of epochs brings it back.
                self.due_N[prompt] = _ON_VERSION
                heapq.heappush(self._by_version, (until, prompt))
                return
        self.evicted_N[prompt] = until.count is None or until.count > 1
        if until.count is None:
            self.bar(prompt)
            return
        # From the epoch of the draw: a visit that lasts into the next epoch must not delay the prompt by a further
        # one.
        due = self.epoch if until.count == 0 else drawn_epoch + until.count
        self.out += due > self.epoch + 1
        self.due_N[prompt] = due
        self.free_N[prompt] = due <= self.epoch
        self.away -= 1
        self.dry = False

    def bar(self, prompt: int) -> None:
        """Record that the prompt must never be drawn again."""
        self.due_N[prompt] = _NEVER
        self.barred += 1
        self.out += 1

    def is_barred(self, prompt: int) -> bool:
        """Whether the prompt must never be drawn again."""
        return bool(self.due_N[prompt] == _NEVER)

    def on_version(self, version: int) -> None:
        """Free the prompts that waited for this version of the weights."""
        while self._by_version and self._by_version[0][0] <= version:
            prompt = heapq.heappop(self._by_version)[1]
            self.due_N[prompt] = self.epoch
            self.free_N[prompt] = True
            self.away -= 1
            self.dry = False

    def roll(self) -> bool:
        """Begin the next epoch in which a prompt may be drawn. Return False if no prompt waits for an epoch."""
        due = self.due_epoch()
        self.dry = due is None
        if due is not None:
            self.begin(max(self.epoch + 1, due))
        return due is not None

    def any_due(self) -> bool:
        """Whether a prompt may be drawn in this or a later epoch.

        False if every prompt is in flight, waits for new weights, or may never be drawn again.
        """
        return self.away < len(self.due_N)

    def due_epoch(self) -> int | None:
        """The first epoch in which a prompt may be drawn; None if no prompt waits for an epoch."""
        return int(self.due_N.min()) if self.any_due() else None

    def begin(self, epoch: int) -> None:
        """Begin this epoch."""
        self.epoch = epoch
        self.free_N = self.due_N <= epoch
        # Prompts in flight or waiting for a version are above every epoch too, but come back.
        later_N = (self.due_N > epoch + 1) & (self.due_N < _ON_VERSION)
        self.out = int(np.count_nonzero(later_N)) + self.barred
        self.dry = False

    def evicted(self) -> int:
        """Number of evicted prompts."""
        return int(np.count_nonzero(self.evicted_N))

    @property
    def left(self) -> int:
        """Number of prompts that may be drawn in this epoch or the next, including prompts in flight."""
        return len(self.due_N) - self.out

    def after_batch(self) -> None:
        """Set `should_warn` after a batch.

        A warning is due when the share of prompts left falls below `LEAST_SHARE`, and again each time it has halved. When
        the share has risen to 2 · `LEAST_SHARE`, the warnings start over.
        """
        share = self.left / len(self.due_N)
        halved = 0 if share >= LEAST_SHARE else 1 + int(log2(LEAST_SHARE / max(share, 0.5 / len(self.due_N))))
        self.should_warn = halved > self._said
        if self.should_warn or share >= 2 * LEAST_SHARE:
            self._said = halved

    _SAVED = ("epoch", "dry", "due_N", "evicted_N", "revived", "by_version", "said", "speaks")

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON data."""
        return {
            "epoch": self.epoch,
            "dry": self.dry,
            "due_N": pack(self.due_N),
            "evicted_N": pack(self.evicted_N),
            "revived": self.revived,
            "by_version": sorted(self._by_version),
            "said": self._said,
            "speaks": self.should_warn,
        }

    def load_state_dict(self, state: dict[str, Any], source_N: NDArray[np.int64] | None = None) -> None:
        """Restore a saved pool. `source_N` gives each prompt's index in the saved pool, -1 for a new prompt."""
        exact_keys(state, self._SAVED, "pool")
        move_in(self.due_N, state["due_N"], source_N, "pool, due_N")
        self.barred = int(np.count_nonzero(self.due_N == _NEVER))
        self.away = int(np.count_nonzero(self.due_N >= _ON_VERSION))
        move_in(self.evicted_N, state["evicted_N"], source_N, "pool, evicted_N")
        self.revived = natural(state["revived"], "pool, revived")
        self._said = natural(state["said"], "pool, said")
        if not isinstance(state["speaks"], bool):
            raise ValueError(f"pool, speaks: expected true or false, got {state['speaks']!r}; the state is corrupt")
        self.should_warn = state["speaks"]
        self._by_version = [(int(version), int(prompt)) for version, prompt in state["by_version"]]
        if source_N is not None:
            target = {int(old): new for new, old in enumerate(source_N) if old >= 0}
            self._by_version = [(version, target[old]) for version, old in self._by_version if old in target]
        heapq.heapify(self._by_version)
        if any(self.due_N[prompt] != _ON_VERSION for _, prompt in self._by_version):
            raise ValueError(
                "pool, by_version: lists a prompt that is not waiting for a new version of the weights; the state is corrupt"
            )
        # This computes `free_N` and `out` from `due_N`.
        self.begin(natural(state["epoch"], "pool, epoch"))
        self.dry = bool(state["dry"]) and source_N is None  # another data set may have new prompts to draw
