"""The protocol of a back-end: it samples tokens for the asynchronous engine, in this process or in another process.

The engine calls all methods from one thread. Only `poll` waits:

    backend.submit([RunningRow(7, prompt=3, tokens=(5, 9, 2))])
    for ended in backend.poll(wait_s=0.1): ...      # call it repeatedly, until it returns rollout 7
    backend.load_weights(weights, version=1)        # if rollout 7 is running, version 1 samples its next tokens
    backend.cancel([7])                             # `poll` still returns rollout 7, cancelled or complete
    backend.close()

`poll` returns each submitted rollout exactly once, as a `Generation`. It raises `BackendDied` if the back-end is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from rollalloc.generate.sampler import Generation
from rollalloc.models.settings import Sampling

NOTHING_YET = Generation(-1, (), np.zeros(0, np.float32), truncated=False)


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A rollout to sample.

    Attributes:
        rollout: its id; running rows have different ids.
        prompt: index of its prompt. The keys of random draws depend on this index and on the rollout's id.
        tokens: the prompt's token ids, at least one.
        sampled: the tokens sampled before the rollout was paused, with the versions of the weights. Sampling continues
            after them.
        limit: maximum number of its tokens, if it is lower than `Sampling.max_new_tokens`; else None.
    """

    rollout: int
    prompt: int
    tokens: tuple[int, ...]
    sampled: Generation = NOTHING_YET
    limit: int | None = None


def spans_of(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Group the versions of successive tokens into spans of the same version."""
    return tuple((version, len(list(run))) for version, run in groupby(versions))


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of decoding, for any back-end.

    Attributes:
        sampling: how tokens are sampled. `max_rows` and `kv_tokens` limit the number of running rows. For `kv_tokens`,
            each row is assumed to have `longest_prompt` + `max_new_tokens` tokens.
        eos_ids: tokens that end a rollout, in addition to `sampling.stop_ids`.
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
        """Raise a ValueError that names the first of these rows that cannot run together with the rows in `running`."""
        there = set(running)
        for row in rows:
            if row.rollout in there:
                raise ValueError(f"rollout {row.rollout} is already running")
            if not 0 < len(row.tokens) <= self.longest_prompt:
                expected = f"expected a prompt of 1 to {self.longest_prompt} tokens, got {len(row.tokens)}"
                raise ValueError(f"rollout {row.rollout}: {expected}")
            there.add(row.rollout)


class BackendDied(RuntimeError):
    """The back-end died, and starting a new process would not help. Its rollouts are lost."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The running and waiting rows of a paused back-end, in order; and rollouts that ended but were not yet returned."""

    rows: tuple[RunningRow, ...] = ()
    ended: tuple[Generation, ...] = ()


class Backend(Protocol):
    """Samples many rollouts at a time. Each starts and ends independently of the others."""

    def capacity(self) -> int:
        """Number of rows that may be started now, 0 or more."""
        ...

    def submit(self, rows: Sequence[RunningRow]) -> None:
        """Start to sample these rows. If there are more than `capacity`, the others wait until there is room.

        Raises:
            ValueError: a row is already running, is empty, or can never fit.
        """

    def cancel(self, rollouts: Sequence[int]) -> None:
        """Stop these rollouts soon. Rollouts that have ended or were never submitted are ignored."""

    def poll(self, wait_s: float) -> list[Generation]:
        """Return the rollouts that ended since the last call. A back-end in this process runs one decoding step per call.

        Args:
            wait_s: maximum number of seconds to wait while a rollout is running and none has ended; 0 or more.

        Raises:
            BackendDied: the back-end died, and starting a new process would not help.
            FloatingPointError: the model's logits contain NaN or +inf.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights as soon as possible. Running rollouts continue.

        When the call returns, the caller may change the tensors. `Generation.spans` says which version sampled each token.
        Keys and values that earlier weights computed may stay in the cache: importance weights need only the
        log-probabilities of the distribution from which a token was drawn.

        Args:
            weights: by name, as `rollalloc.models.weights.weights_of` gives them.
            version: larger than all earlier versions.
        """

    def paces(self) -> Sequence[tuple[int, float]]:
        """(rows, seconds) of each decoding step since the last call, for a cost model; empty if unknown."""
        ...

    def figures(self) -> dict[str, Any]:
        """Return counts for the metrics as plain data, such as the number of restarts of a process."""
        ...

    def close(self) -> None:
        """Free everything. Running rollouts are lost. A second call does nothing."""


@runtime_checkable
class Pausable(Backend, Protocol):
    """A back-end whose running rollouts can be saved, so that a resumed run continues them."""

    def pause(self) -> Paused:
        """Return all rows. The next `poll` continues them.

        Another back-end that starts with these rows, in this order and with the same weights, samples the same tokens.
        """
        ...
