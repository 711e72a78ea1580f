"""The protocol of a back-end: it samples tokens for the asynchronous engine, in this process or in another one.

The engine calls all methods from one thread. Only `poll` waits:

    backend.submit([RunningRow(7, prompt=3, tokens=(5, 9, 2))])
    for ended in backend.poll(wait_s=0.1): ...       # now and then, until 7 is among them
    backend.load_weights(weights, version=1)         # 7, if it runs, goes on: its tokens from here on are of version 1
    backend.cancel([7])                             # `poll` still returns 7, once: cancelled, or as it ended before that
    backend.close()

`poll` returns each submitted rollout exactly once, whatever happens to it. A rollout that the back-end loses is returned as
"failed". If everything is lost, `poll` raises `BackendDied`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollalloc.generate.sampling import Sampling

NO_LOGPROBS = np.zeros(0, np.float32)
End = Literal["stop", "length", "cancelled", "failed"]
Span = tuple[int, int]  # a version of the weights, and how many tokens in a row were sampled under it


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """What a rollout has sampled so far: token ids, the log-probability of each, and the versions they are of."""

    tokens: tuple[int, ...] = ()
    logprobs: NDArray[np.float32] = field(default_factory=lambda: NO_LOGPROBS)
    spans: tuple[Span, ...] = ()


NOTHING_YET = SampledTokens()


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A rollout to sample.

    Attributes:
        rollout: its id; no other row that runs has it.
        prompt: index of its prompt; where draws are keyed, they are by this and the rollout's id.
        tokens: the prompt's token ids, at least one.
        sampled: what it sampled before it was paused; it continues after that.
    """

    rollout: int
    prompt: int
    tokens: tuple[int, ...]
    sampled: SampledTokens = NOTHING_YET


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A rollout that samples no more.

    Attributes:
        rollout: its id.
        tokens: token ids sampled; the one that ends it is the last.
        logprobs: float32 log-probability of each under the distribution that it was drawn from, temperature applied.
        spans: versions of the weights under which the tokens were sampled, in order; the counts sum to their number.
        end: "stop": by EOS or another token that ends a rollout; "length": at `max_new_tokens`; "cancelled": as asked;
            "failed": the back-end lost it.
        reason: why it failed, in words; "" otherwise.
    """

    rollout: int
    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    spans: tuple[Span, ...]
    end: End
    reason: str = ""


def spans_of(versions: Sequence[int]) -> tuple[Span, ...]:
    """Each token's version as runs of the same one."""
    return tuple((version, len(list(run))) for version, run in groupby(versions))


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How rollouts are decoded, whatever back-end does it.

    Attributes:
        sampling: how; `max_rows` and `kv_tokens` bound the rows that run, the latter as if each were as long as it may be.
        eos_ids: tokens that end a rollout, as `sampling.stop_ids` do.
        pad_id: any id in the vocabulary.
        seed: of the draws.
        longest_prompt: tokens of the longest prompt that will come.
    """

    sampling: Sampling
    eos_ids: tuple[int, ...]
    pad_id: int
    seed: int
    longest_prompt: int

    @property
    def slots(self) -> int:
        """Rows that run at a time at most.

        Raises:
            ValueError: `kv_tokens` too few for one rollout.
        """
        sampling, tokens = self.sampling, self.longest_prompt + self.sampling.max_new_tokens
        if sampling.kv_tokens is None:
            return sampling.max_rows
        sampling.refuse_small_cache(tokens)
        return min(sampling.max_rows, sampling.kv_tokens // tokens)

    def refuse_unfit(self, rows: Sequence[RunningRow], running: Iterable[int]) -> None:
        """Refuse rows that cannot run beside those that are there, before any of them is taken.

        Raises:
            ValueError: names the first of them, and why.
        """
        there = set(running)
        for row in rows:
            if row.rollout in there:
                raise ValueError(f"rollout {row.rollout} runs already")
            if not 0 < len(row.tokens) <= self.longest_prompt:
                expected = f"expected a prompt of 1 to {self.longest_prompt} tokens, got {len(row.tokens)}"
                raise ValueError(f"rollout {row.rollout}: {expected}")
            there.add(row.rollout)


class BackendDied(RuntimeError):
    """The back-end is gone and cannot be replaced. None of its rollouts comes back."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The rows of a back-end that run or wait, in order, and the rollouts that ended and that `poll` did not return yet."""

    rows: tuple[RunningRow, ...] = ()
    ended: tuple[Ended, ...] = ()


class Backend(Protocol):
    """Samples many rollouts at a time; each starts and ends independently of the others."""

    def capacity(self) -> int:
        """Rows that may be started now, 0 or more; it may fall to 0 and come back."""
        ...

    def submit(self, rows: Sequence[RunningRow]) -> None:
        """Begin to sample these rows. Rows beyond `capacity` wait until there is room.

        Raises:
            ValueError: a row that runs already, is empty, or can never fit.
        """

    def cancel(self, rollouts: Sequence[int]) -> None:
        """Stop these soon. Rollouts that have ended or were never submitted are ignored."""

    def poll(self, wait_s: float) -> list[Ended]:
        """Return what ended since the last call. In this process this takes one decoding step.

        Args:
            wait_s: seconds to wait at most if nothing has ended and something runs, 0 or more.

        Raises:
            BackendDied: the back-end is gone and cannot be replaced.
            FloatingPointError: the model's logits are not numbers.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from now on, or from the next safe point on. Running rollouts continue.

        When this returns the caller may change the tensors; each token says by `Ended.spans` under which version it was
        sampled. Keys and values that are cached of earlier weights may be kept: log-probabilities are those of the
        distribution that was drawn from, which is all that the importance weights need.

        Args:
            weights: by name, as `rollalloc.models.weights.weights_of` gives them.
            version: above all before it.
        """

    def paces(self) -> Sequence[tuple[int, float]]:
        """(rows, seconds) of decoding steps since the last call, for a cost model; empty where they are not known."""
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

        Started with these rows, in this order and under the same weights, that one samples the same tokens.
        """
        ...
