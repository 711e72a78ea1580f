"""The record of each prompt, in arrays: attempts, successes, tokens, version and how its last visit ended (`fate`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.packing import exact_keys, move_in, pack

NEW, QUARANTINED = "new", "quarantined"
HALF_LIFE = 64  # an attempt counts half in `recent_attempts` after this number of later attempts on the same prompt
_MOST_RECENT = 2.0**15  # upper limit of the recent counts, which are float16 (at most 65,504)


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one prompt.

    Attributes:
        attempts: scored rollouts so far.
        successes: sum of their metrics.
        tokens: tokens paid for the prompt, including failed and cancelled rollouts.
        version: version of the weights at its last visit, -1 before the first.
        fate: how its last visit ended, such as "trained" or "out_of_band/solved"; "new" before the first.
        failures: visits in a row without any score because rollouts failed, counted up to 255.
        recent_attempts: a weighted number of attempts. An attempt counts half after `HALF_LIFE` later attempts on the
            prompt, a quarter after twice as many, and so on. Use it as evidence about a success rate that changes while
            the policy learns. Accurate to three digits; 0 if no judge of the recipe has the trait `reads_recent`.
        recent_failures: `attempts` minus `successes` with the same weights, clipped to [0, `recent_attempts`].
    """

    attempts: int = 0
    successes: float = 0.0
    tokens: int = 0
    version: int = -1
    fate: str = NEW
    failures: int = 0
    recent_attempts: float = 0.0
    recent_failures: float = 0.0


def aged(counted: float, newer: int) -> float:
    """The value of a recent count after `newer` more attempts on the prompt: counted · 2^(-newer / HALF_LIFE)."""
    return counted * 0.5 ** (newer / HALF_LIFE)


class PromptStatistics:
    """The records of all prompts, in arrays of shape (N,). The allocator writes them, rules read them.

    A prompt takes 26 bytes, or 30 with `recent`.

    Args:
        prompts: N, the number of prompts.
        recent: whether to count recent attempts and failures.
    """

    def __init__(self, prompts: int, recent: bool = False) -> None:
        self.attempts_N: NDArray[np.uint32] = np.zeros(prompts, np.uint32)
        self.successes_N: NDArray[np.float64] = np.zeros(prompts, np.float64)
        self.recent_2N: NDArray[np.float16] | None = np.zeros((2, prompts), np.float16) if recent else None
        self.tokens_N: NDArray[np.int64] = np.zeros(prompts, np.int64)
        self.version_N: NDArray[np.int32] = np.full(prompts, -1, np.int32)
        self.fate_N: NDArray[np.uint8] = np.zeros(prompts, np.uint8)
        self.failures_N: NDArray[np.uint8] = np.zeros(prompts, np.uint8)
        self.fates: list[str] = [NEW]  # `fate_N` contains indices into this list

    def record(self, prompt: int) -> Record:
        """The record of one prompt."""
        recent_2 = (0.0, 0.0) if self.recent_2N is None else self.recent_2N[:, prompt].tolist()
        return Record(
            attempts=int(self.attempts_N[prompt]),
            successes=float(self.successes_N[prompt]),
            tokens=int(self.tokens_N[prompt]),
            version=int(self.version_N[prompt]),
            fate=self.fates[int(self.fate_N[prompt])],
            failures=int(self.failures_N[prompt]),
            recent_attempts=recent_2[0],
            recent_failures=recent_2[1],
        )

    def counts(self) -> dict[str, int]:
        """Number of prompts for each `Record.fate`."""
        count_F: list[int] = np.bincount(self.fate_N, minlength=len(self.fates)).tolist()
        return dict(zip(self.fates, count_F, strict=True))

    def with_fate(self, fate: str) -> list[int]:
        """The prompts with this `Record.fate`."""
        return np.flatnonzero(self.fate_N == self.fates.index(fate)).tolist() if fate in self.fates else []

    def fail(self, prompt: int) -> int:
        """Count a visit in which rollouts failed and none was scored. Return the number of such visits in a row."""
        self.failures_N[prompt] = min(int(self.failures_N[prompt]) + 1, np.iinfo(np.uint8).max)
        return int(self.failures_N[prompt])

    def close_visit(self, prompt: int, fate: str, version: int, metrics: list[float]) -> None:
        """Record that a visit ended. `metrics` has the metric of each scored rollout."""
        if fate not in self.fates:
            if len(self.fates) == np.iinfo(np.uint8).max:
                raise ValueError(
                    f"more than {len(self.fates)} different fates; a judge's reasons must come from a small set"
                )
            self.fates.append(fate)
        self.fate_N[prompt] = self.fates.index(fate)
        self.version_N[prompt] = version
        # A visit without a score is no evidence, and does not end a row of failed visits.
        if not metrics:
            return
        attempts, successes = len(metrics), sum(metrics)
        self.attempts_N[prompt] += attempts
        self.successes_N[prompt] += successes
        if self.recent_2N is not None:
            failures = min(max(attempts - successes, 0.0), attempts)
            before_2: list[float] = self.recent_2N[:, prompt].tolist()
            self.recent_2N[:, prompt] = [
                min(aged(before, attempts) + now, _MOST_RECENT)
                for before, now in zip(before_2, (attempts, failures), strict=True)
            ]
        self.failures_N[prompt] = 0

    _ARRAYS = ("attempts_N", "successes_N", "tokens_N", "version_N", "fate_N", "failures_N")

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON data."""
        recent = None if self.recent_2N is None else pack(self.recent_2N)
        return {"fates": list(self.fates), "recent_2N": recent} | {
            name: pack(getattr(self, name)) for name in self._ARRAYS
        }

    def load_state_dict(self, state: dict[str, Any], source_N: NDArray[np.int64] | None = None) -> None:
        """Restore saved statistics.

        Args:
            state: the result of `state_dict`.
            source_N: index of each prompt in the saved statistics, or -1 for a new prompt. None: the data set is the
                same.

        Raises:
            ValueError: a key is missing or unexpected, or an array or a fate is invalid.
        """
        exact_keys(state, ("fates", "recent_2N", *self._ARRAYS), "statistics")
        self.fates = [str(fate) for fate in state["fates"]]
        for name in self._ARRAYS:
            move_in(getattr(self, name), state[name], source_N, f"statistics, {name}")
        if self.recent_2N is not None and state["recent_2N"] is not None:  # None: not counted under the saved recipe
            move_in(self.recent_2N, state["recent_2N"], source_N, "statistics, recent_2N")
        if self.fate_N.size and int(self.fate_N.max()) >= len(self.fates):
            raise ValueError(
                f"statistics, fate_N: index {int(self.fate_N.max())} of {len(self.fates)} fates; the state is corrupt"
            )
