"""Which prompts may be drawn now, which come back later, and when an epoch ends."""

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
    """A prompt may be drawn again `count` epochs after the one in which it was drawn; None: never.

    Raises:
        ValueError: `count` is negative.
    """

    count: int | None

    def __post_init__(self) -> None:
        if self.count is not None and (type(self.count) is not int or self.count < 0):
            raise ValueError(f"a prompt comes back after 0 epochs or more, got {self.count}")


NOW, NEXT_EPOCH, NEVER = Epochs(0), Epochs(1), Epochs(None)
Until = Epochs | int  # an int is a version: the prompt is back as soon as the weights have it

# Above every epoch: a prompt with one of these is not waiting for an epoch.
_ON_VERSION, _IN_FLIGHT, _NEVER = (np.iinfo(np.int32).max - back for back in (2, 1, 0))
LEAST_SHARE = 0.25  # of the prompts: where fewer are left to draw, that is worth a line in the log


class PromptPool:
    """The prompts that may be drawn, as the epoch from which each may: `free_N[i]` is `due_N[i] <= epoch`.

    An epoch ends when a prompt rule has nothing left to give and prompts are waiting for the next one. What is in
    flight at that moment stays in flight: an epoch's end loses nothing.
    """

    def __init__(self, prompts: int) -> None:
        self.epoch = 0
        self.due_N: NDArray[np.int32] = np.zeros(prompts, np.int32)
        self.free_N: NDArray[np.bool_] = np.ones(prompts, np.bool_)
        self.evicted_N: NDArray[np.bool_] = np.zeros(prompts, np.bool_)  # sent away for longer than an epoch
        self.away = 0  # prompts that wait for no epoch: in flight, until a version, or barred
        self.barred = 0  # prompts that may never be drawn again
        self.revived = 0  # visits to a prompt that had been evicted
        self.dry = False  # nothing can be drawn until a prompt comes back; spares a search at every ask
        self.out = 0  # prompts that come back neither in this epoch nor in the next, if ever
        self.speaks = False  # whether it is worth a line, since the last batch, how few are left
        self._said = 0  # how often what is left had halved, below `LEAST_SHARE`, when that was last said
        self._by_version: list[tuple[int, int]] = []

    def take(self, prompt: int) -> None:
        """The prompt is drawn."""
        self.revived += bool(self.evicted_N[prompt])
        self.evicted_N[prompt] = False
        self.free_N[prompt] = False
        self.due_N[prompt] = _IN_FLIGHT
        self.away += 1

    def give_back(self, prompt: int, until: Until, drawn_epoch: int, version: int) -> None:
        """The prompt's visit ended; it may be drawn again as `until` says."""
        if isinstance(until, int):
            if until <= version:
                until = NOW
            else:
                self.due_N[prompt] = _ON_VERSION
                heapq.heappush(self._by_version, (until, prompt))
                return
        self.evicted_N[prompt] = until.count is None or until.count > 1
        if until.count is None:
            self.bar(prompt)
            return
        due = self.epoch if until.count == 0 else drawn_epoch + until.count
        self.out += due > self.epoch + 1
        self.due_N[prompt] = due
        self.free_N[prompt] = due <= self.epoch
        self.away -= 1
        self.dry = False

    def bar(self, prompt: int) -> None:
        """The prompt may never be drawn again."""
        self.due_N[prompt] = _NEVER
        self.barred += 1
        self.out += 1

    def is_barred(self, prompt: int) -> bool:
        """Whether the prompt may never be drawn again."""
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
        """Begin the next epoch in which a prompt may be drawn; False where none ever may without something coming back."""
        due = self.due_epoch()
        self.dry = due is None
        if due is not None:
            self.begin(max(self.epoch + 1, due))
        return due is not None

    def any_due(self) -> bool:
        """Whether a prompt may be drawn in this epoch or a later one, without one coming back first."""
        return self.away < len(self.due_N)

    def due_epoch(self) -> int | None:
        """The first epoch in which a prompt may be drawn; None where none ever may without one coming back first."""
        return int(self.due_N.min()) if self.any_due() else None

    def begin(self, epoch: int) -> None:
        """Begin an epoch, by the core's count or by the one of a framework's loader."""
        self.epoch = epoch
        self.free_N = self.due_N <= epoch
        later_N = (self.due_N > epoch + 1) & (self.due_N < _ON_VERSION)
        self.out = int(np.count_nonzero(later_N)) + self.barred
        self.dry = False

    def evicted(self) -> int:
        """Number of prompts that were sent away for longer than an epoch and have not been drawn since."""
        return int(np.count_nonzero(self.evicted_N))

    @property
    def left(self) -> int:
        """Number of prompts that may be drawn in this epoch or the next, those in flight included."""
        return len(self.due_N) - self.out

    def look(self) -> None:
        """A batch is made: `speaks` says whether it is worth a line how few prompts are left.

        Once when fewer than `LEAST_SHARE` of them are, and again each time that this halves; anew after twice as many
        had come back.
        """
        share = self.left / len(self.due_N)
        halved = 0 if share >= LEAST_SHARE else 1 + int(log2(LEAST_SHARE / max(share, 0.5 / len(self.due_N))))
        self.speaks = halved > self._said
        if self.speaks or share >= 2 * LEAST_SHARE:
            self._said = halved

    def exhausted(self) -> bool:
        """Whether no prompt may ever be drawn again."""
        return self.barred == len(self.due_N)

    _SAVED = ("epoch", "dry", "due_N", "evicted_N", "revived", "by_version", "said", "speaks")

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "epoch": self.epoch,
            "dry": self.dry,
            "due_N": pack(self.due_N),
            "evicted_N": pack(self.evicted_N),
            "revived": self.revived,
            "by_version": sorted(self._by_version),
            "said": self._said,
            "speaks": self.speaks,
        }

    def load_state_dict(self, state: dict[str, Any], source_N: NDArray[np.int64] | None = None) -> None:
        """Take over a saved pool; `source_N` as in `PromptStatistics.load_state_dict`."""
        exact_keys(state, self._SAVED, "pool")
        move_in(self.due_N, state["due_N"], source_N, "pool, due_N")
        self.barred = int(np.count_nonzero(self.due_N == _NEVER))
        self.away = int(np.count_nonzero(self.due_N >= _ON_VERSION))
        move_in(self.evicted_N, state["evicted_N"], source_N, "pool, evicted_N")
        self.revived = natural(state["revived"], "pool, revived")
        self._said = natural(state["said"], "pool, said")
        if not isinstance(state["speaks"], bool):
            raise ValueError(f"pool, speaks: expected true or false, got {state['speaks']!r}; the state is corrupt")
        self.speaks = state["speaks"]
        self._by_version = [(int(version), int(prompt)) for version, prompt in state["by_version"]]
        if source_N is not None:
            target = {int(old): new for new, old in enumerate(source_N) if old >= 0}
            self._by_version = [(version, target[old]) for version, old in self._by_version if old in target]
        heapq.heapify(self._by_version)
        if any(self.due_N[prompt] != _ON_VERSION for _, prompt in self._by_version):
            raise ValueError("pool, by_version: names a prompt that waits for no version; the state is corrupt")
        self.begin(natural(state["epoch"], "pool, epoch"))
        self.dry = bool(state["dry"]) and source_N is None  # a new prompt may be drawn
