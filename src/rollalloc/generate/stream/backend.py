"""The protocol of a back-end: it samples tokens for the asynchronous engine, in this process or in another one.

The engine calls all methods from one thread. Only `poll` waits:

    backend.submit([RunningRow(7, prompt=3, tokens=(5, 9, 2))])
    for ended in backend.poll(wait_s=0.1): ...       # now and then, until 7 is among them
    backend.load_weights(weights, version=1)         # 7, if it runs, goes on: its tokens from here on are of version 1
    backend.cancel([7])                             # `poll` still returns 7, once: cancelled, or as it ended before that
    backend.close()

`poll` returns each submitted rollout exactly once, as a `Generation`. If the back-end is lost, it raises `BackendDied`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from rollalloc.generate.sampler import Generation
from rollalloc.generate.sampling import Sampling

NOTHING_YET = Generation(-1, (), np.zeros(0, np.float32), truncated=False)


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A rollout to sample.

    Attributes:
        rollout: its id; running rows have different ids.
        prompt: index of its prompt. Keyed random draws depend on it and on the rollout's id.
        tokens: the prompt's token ids, at least one.
        sampled: the tokens that it sampled before it was paused, with the versions of the weights. It continues after
            that.
    """

    rollout: int
    prompt: int
    tokens: tuple[int, ...]
    sampled: Generation = NOTHING_YET


def spans_of(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Group the versions of successive tokens into spans of the same version."""
    return tuple((version, len(list(run))) for version, run in groupby(versions))


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of decoding, for any back-end.

    Attributes:
        sampling: how tokens are sampled. `max_rows` and `kv_tokens` limit the number of running rows; for `kv_tokens`
            each row counts with its maximum length.
        eos_ids: tokens that end a rollout, as `sampling.stop_ids` do.
        pad_id: any id in the vocabulary.
        seed: seed of the random draws.
        longest_prompt: number of tokens of the longest prompt.
    """

    sampling: Sampling
    eos_ids: tuple[int, ...]
    pad_id: int
    seed: int
    longest_prompt: int

    @property
    def slots(self) -> int:
        """Maximum number of rows that run at the same time.

        Raises:
            ValueError: `kv_tokens` is too small for one rollout.
        """
        sampling, tokens = self.sampling, self.longest_prompt + self.sampling.max_new_tokens
        if sampling.kv_tokens is None:
            return sampling.max_rows
        sampling.refuse_small_cache(tokens)
        return min(sampling.max_rows, sampling.kv_tokens // tokens)

    def refuse_unfit(self, rows: Sequence[RunningRow], running: Iterable[int]) -> None:
        """Raise a ValueError if some of these rows cannot run beside the present ones. It names the first of them."""
        there = set(running)
        for row in rows:
            if row.rollout in there:
                raise ValueError(f"rollout {row.rollout} is already running")
            if not 0 < len(row.tokens) <= self.longest_prompt:
                expected = f"expected a prompt of 1 to {self.longest_prompt} tokens, got {len(row.tokens)}"
                raise ValueError(f"rollout {row.rollout}: {expected}")
            there.add(row.rollout)


class BackendDied(RuntimeError):
    """The back-end died and cannot be replaced. Its rollouts are lost."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The rows of a back-end that run or wait, in order, and the rollouts that ended but were not returned by `poll` yet."""

    rows: tuple[RunningRow, ...] = ()
    ended: tuple[Generation, ...] = ()


class Backend(Protocol):
    """Samples many rollouts at a time; each starts and ends independently of the others."""

    def capacity(self) -> int:
        """Number of rows that may be started now. It may be 0 for a while."""
        ...

    def submit(self, rows: Sequence[RunningRow]) -> None:
        """Start to sample these rows. Rows beyond `capacity` wait until there is room.

        Raises:
            ValueError: a row is already running, is empty, or can never fit.
        """

    def cancel(self, rollouts: Sequence[int]) -> None:
        """Stop these rollouts soon. Those that have ended or were never submitted are ignored."""

    def poll(self, wait_s: float) -> list[Generation]:
        """Return the rollouts that ended since the last call. A back-end in this process runs one decoding step.

        Args:
            wait_s: maximum seconds to wait if nothing has ended and something runs, 0 or more.

        Raises:
            BackendDied: the back-end died and cannot be replaced.
            FloatingPointError: the model's logits are not numbers.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from now on, or from the next possible moment. Running rollouts continue.

        When this returns, the caller may change the tensors. `Generation.spans` says under which version each token was
        sampled. Cached keys and values of earlier weights may be kept, because importance weights only need the
        log-probabilities of the distribution from which a token was really drawn.

        Args:
            weights: by name, as `rollalloc.models.weights.weights_of` gives them.
            version: larger than all earlier versions.
        """

    def paces(self) -> Sequence[tuple[int, float]]:
        """(rows, seconds) of the decoding steps since the last call, for a cost model; empty if they are unknown."""
        ...

    def figures(self) -> dict[str, Any]:
        """Return counts for the metrics as plain data, such as how often its process was restarted."""
        ...

    def close(self) -> None:
        """Free everything. Running rollouts are lost. A second call does nothing."""


@runtime_checkable
class Pausable(Backend, Protocol):
    """A back-end whose running rollouts can be saved, so that a resumed run continues them."""

    def pause(self) -> Paused:
        """Return all rows in a form with which another back-end can start. The next `poll` continues them.

        If it starts with these rows in this order and the same weights, it samples the same tokens.
        """
        ...
