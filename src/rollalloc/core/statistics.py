"""What is known about each prompt: attempts, successes, tokens, version and fate, in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.packing import exact_keys, move_in, pack

NEW, QUARANTINED = "new", "quarantined"
HALF_LIFE = 64  # attempts on a prompt after which an earlier one has half of its weight as evidence
_MOST_RECENT = 2.0**15  # attempts that are kept as evidence; float16 holds 65,504
_NEWEST = 0.3  # weight of the newest visit in the running mean and deviation of lengths (DARTS, arXiv 2605.30859)


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt's line in the statistics.

    Attributes:
        attempts: scored rollouts so far.
        successes: sum of their metric.
        tokens: tokens paid for the prompt, those of failed and cancelled rollouts included.
        version: version of the weights at its last visit, -1 before the first.
        fate: how its last visit ended, e.g. "trained" or "out_of_band/solved"; "new" before the first.
        length_mean: running mean of its rollouts' lengths in tokens; a rollout that was stopped counts with the tokens it
            had. NaN before a visit with two rollouts.
        length_std: running standard deviation of the same, within a visit.
        failures: visits in a row that gave no score because rollouts failed, at most 255.
        recent_attempts: `attempts`, where each counts half after `HALF_LIFE` later attempts on the prompt, and a quarter
            after twice as many: evidence about a rate that moves while the policy learns. To three digits; 0 where no judge
            of the recipe has the trait `reads_recent`.
        recent_failures: `attempts` less `successes`, with the same weights; kept in [0, `recent_attempts`], whatever the
            metrics.
    """

    attempts: int = 0
    successes: float = 0.0
    tokens: int = 0
    version: int = -1
    fate: str = NEW
    length_mean: float = float("nan")
    length_std: float = float("nan")
    failures: int = 0
    recent_attempts: float = 0.0
    recent_failures: float = 0.0


def aged(counted: float, newer: int) -> float:
    """What is left of a recent count after `newer` more attempts on the prompt: counted · 2^(-newer / HALF_LIFE)."""
    return counted * 0.5 ** (newer / HALF_LIFE)


class PromptStatistics:
    """The per-prompt record in arrays of shape (N,). Rules read it, the allocator writes it.

    It takes 34 bytes per prompt, 4 more with `recent`.

    Args:
        prompts: N.
        recent: whether a judge reads recent attempts and failures.
    """

    def __init__(self, prompts: int, recent: bool = False) -> None:
        self.attempts_N: NDArray[np.uint32] = np.zeros(prompts, np.uint32)
        self.successes_N: NDArray[np.float64] = np.zeros(prompts, np.float64)
        self.recent_2N: NDArray[np.float16] | None = np.zeros((2, prompts), np.float16) if recent else None
        self.tokens_N: NDArray[np.int64] = np.zeros(prompts, np.int64)
        self.version_N: NDArray[np.int32] = np.full(prompts, -1, np.int32)
        self.fate_N: NDArray[np.uint8] = np.zeros(prompts, np.uint8)
        self.length_mean_N: NDArray[np.float32] = np.full(prompts, np.nan, np.float32)
        self.length_std_N: NDArray[np.float32] = np.full(prompts, np.nan, np.float32)
        self.failures_N: NDArray[np.uint8] = np.zeros(prompts, np.uint8)
        self.fates: list[str] = [NEW]  # fate_N holds indices into this list

    def record(self, prompt: int) -> Record:
        """The line of one prompt."""
        recent_2 = (0.0, 0.0) if self.recent_2N is None else self.recent_2N[:, prompt].tolist()
        return Record(
            attempts=int(self.attempts_N[prompt]),
            successes=float(self.successes_N[prompt]),
            tokens=int(self.tokens_N[prompt]),
            version=int(self.version_N[prompt]),
            fate=self.fates[int(self.fate_N[prompt])],
            length_mean=float(self.length_mean_N[prompt]),
            length_std=float(self.length_std_N[prompt]),
            failures=int(self.failures_N[prompt]),
            recent_attempts=recent_2[0],
            recent_failures=recent_2[1],
        )

    def counts(self) -> dict[str, int]:
        """Number of prompts by the fate of their last visit."""
        count_F: list[int] = np.bincount(self.fate_N, minlength=len(self.fates)).tolist()
        return dict(zip(self.fates, count_F, strict=True))

    def with_fate(self, fate: str) -> list[int]:
        """The prompts whose last visit ended so."""
        return np.flatnonzero(self.fate_N == self.fates.index(fate)).tolist() if fate in self.fates else []

    def fail(self, prompt: int) -> int:
        """Book that a visit gives no score because rollouts failed; returns how many visits in a row that makes."""
        self.failures_N[prompt] = min(int(self.failures_N[prompt]) + 1, np.iinfo(np.uint8).max)
        return int(self.failures_N[prompt])

    def close_visit(self, prompt: int, fate: str, version: int, metrics: list[float]) -> None:
        """Book a visit that ended, and the metrics of its scored rollouts."""
        if fate not in self.fates:
            if len(self.fates) == np.iinfo(np.uint8).max:
                raise ValueError(
                    f"more than {len(self.fates)} different fates; a judge's reasons must come from a small set"
                )
            self.fates.append(fate)
        self.fate_N[prompt] = self.fates.index(fate)
        self.version_N[prompt] = version
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

    def see_lengths(self, prompt: int, lengths: Sequence[int]) -> None:
        """Learn from a visit how long the prompt's rollouts are and how much that varies; one rollout teaches nothing.

            mean ← mean + 0.3 (m - mean),   std ← std + 0.3 (s - std)

        m and s are the visit's mean and population deviation. The first visit gives m and s themselves.

        Args:
            prompt: its index.
            lengths: in tokens; of a rollout that was stopped, the tokens it had.
        """
        if len(lengths) < 2:
            return
        for running_N, newest in (
            (self.length_mean_N, sum(lengths) / len(lengths)),
            (self.length_std_N, _deviation(lengths)),
        ):
            last = float(running_N[prompt])
            running_N[prompt] = newest if isnan(last) else last + _NEWEST * (newest - last)

    def pay(self, prompt: int, tokens: int) -> None:
        """Book tokens that one rollout of the prompt has cost."""
        self.tokens_N[prompt] += tokens

    _ARRAYS = (
        "attempts_N",
        "successes_N",
        "tokens_N",
        "version_N",
        "fate_N",
        "length_mean_N",
        "length_std_N",
        "failures_N",
    )

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        recent = None if self.recent_2N is None else pack(self.recent_2N)
        return {"fates": list(self.fates), "recent_2N": recent} | {
            name: pack(getattr(self, name)) for name in self._ARRAYS
        }

    def load_state_dict(self, state: dict[str, Any], source_N: NDArray[np.int64] | None = None) -> None:
        """Take over a saved statistics.

        Args:
            state: what `state_dict` gave.
            source_N: for each prompt its index in the saved statistics, -1 where it is new; None when nothing moved.

        Raises:
            ValueError: keys, arrays or fates that are not those of a statistics; names them.
        """
        exact_keys(state, ("fates", "recent_2N", *self._ARRAYS), "statistics")
        self.fates = [str(fate) for fate in state["fates"]]
        for name in self._ARRAYS:
            move_in(getattr(self, name), state[name], source_N, f"statistics, {name}")
        if self.recent_2N is not None and state["recent_2N"] is not None:  # else saved under another recipe
            move_in(self.recent_2N, state["recent_2N"], source_N, "statistics, recent_2N")
        if self.fate_N.size and int(self.fate_N.max()) >= len(self.fates):
            raise ValueError(
                f"statistics, fate_N: index {int(self.fate_N.max())} of {len(self.fates)} fates; the state is corrupt"
            )


def _deviation(lengths: Sequence[int]) -> float:
    """Population standard deviation, in whole numbers as far as possible; NumPy would cost more than the rest of a visit."""
    count, total = len(lengths), sum(lengths)
    return sqrt(count * sum(map(mul, lengths, lengths)) - total * total) / count
