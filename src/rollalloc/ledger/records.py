"""From a log's rollouts to the records and marks of a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.table import key_digests
from rollalloc.waste.groups import NOT_SAID, SAME, Groups

Record = tuple[
    str, int, int, int, float | None, float, int | None
]  # key, step, attempts, scored, successes, rewards, tokens


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The rollouts of a log, as columns sorted by step.

    Attributes:
        keys: of its prompts, as a ledger writes them.
        prompt_R: index into `keys`.
        step_R: of training, ascending.
        metric_R: NaN where a rollout has no score.
        reward_R: what training used, NaN where there is none.
        tokens_R: `NOT_SAID` where the log does not say.
        mark_R: ascending within a step, each once in it.
        rates: whether every metric lies in [0, 1], so that their sum counts successes.
    """

    keys: tuple[str, ...]
    prompt_R: NDArray[np.int64]
    step_R: NDArray[np.int64]
    metric_R: NDArray[np.float64]
    reward_R: NDArray[np.float64]
    tokens_R: NDArray[np.int64]
    mark_R: NDArray[np.uint64]
    rates: bool

    @classmethod
    def of(cls, groups: Groups) -> Rollouts:
        """Those of some groups."""
        keys = tuple(map(written_key, groups.keys))
        prompt_R = np.repeat(groups.prompt_V, groups.size_V)
        step_R = np.repeat(groups.step_V, groups.size_V)
        mark_R = _marks(key_digests(keys)[prompt_R], step_R, groups.marks_R)
        order_R = np.lexsort((mark_R, step_R))
        scored_R = groups.rewards_R[~np.isnan(groups.rewards_R)]
        return cls(
            keys,
            prompt_R[order_R],
            step_R[order_R],
            groups.rewards_R[order_R],
            groups.returns_R[order_R],
            groups.tokens_R[order_R],
            mark_R[order_R],
            bool(((scored_R >= -SAME) & (scored_R <= 1 + SAME)).all()),
        )

    def __len__(self) -> int:
        return len(self.prompt_R)

    def by_step(self) -> dict[int, slice]:
        """Where the rollouts of each step are."""
        steps, begins = np.unique(self.step_R, return_index=True)
        ends = np.append(begins[1:], len(self))
        return {int(step): slice(int(begin), int(end)) for step, begin, end in zip(steps, begins, ends, strict=True)}

    def records(self, keep_R: NDArray[np.bool_]) -> Iterator[Record]:
        """A record for each prompt and step, of the rollouts that `keep_R` says."""
        rows = np.flatnonzero(keep_R)
        rows = rows[np.lexsort((self.prompt_R[rows], self.step_R[rows]))]
        if not rows.size:
            return iter(())
        prompt_R, step_R = self.prompt_R[rows], self.step_R[rows]
        metric_R, reward_R, tokens_R = self.metric_R[rows], self.reward_R[rows], self.tokens_R[rows]
        begin_K = np.flatnonzero((np.diff(prompt_R, prepend=-1) != 0) | (np.diff(step_R, prepend=step_R[0]) != 0))
        attempts_K = np.diff(begin_K, append=len(rows))
        scored_K = np.add.reduceat(~np.isnan(metric_R), begin_K, dtype=np.int64)
        hits_K = np.add.reduceat(np.clip(np.nan_to_num(metric_R), 0, 1), begin_K) if self.rates else None
        reward_K = np.add.reduceat(np.nan_to_num(reward_R), begin_K)
        said_K = np.add.reduceat(tokens_R != NOT_SAID, begin_K, dtype=np.int64)
        tokens_K = np.add.reduceat(np.where(tokens_R == NOT_SAID, 0, tokens_R), begin_K)
        keys = [self.keys[prompt] for prompt in prompt_R[begin_K].tolist()]
        hits = [None] * len(keys) if hits_K is None else hits_K.tolist()
        tokens = [count if said else None for count, said in zip(tokens_K.tolist(), said_K.tolist(), strict=True)]
        columns = (step_R[begin_K].tolist(), attempts_K.tolist(), scored_K.tolist(), hits, reward_K.tolist(), tokens)
        return zip(keys, *columns, strict=True)


def written_key(key: str) -> str:
    """A key as SQLite can hold it: half surrogates, which JSON allows, as Python writes them."""
    return key.encode("utf-8", "backslashreplace").decode()


def _marks(prompt_R: NDArray[np.uint64], step_R: NDArray[np.int64], said_R: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits for each rollout, of its prompt, of what it said, and of its number among those alike at its step."""
    alike_R = _mixed(_mixed(prompt_R) ^ said_R)
    order_R = np.lexsort((alike_R, step_R))
    sorted_R, sorted_step_R = alike_R[order_R], step_R[order_R]
    first_R = np.ones(len(order_R), np.bool_)
    first_R[1:] = (sorted_R[1:] != sorted_R[:-1]) | (sorted_step_R[1:] != sorted_step_R[:-1])
    begin_R = np.maximum.accumulate(np.where(first_R, np.arange(len(order_R)), 0))
    number_R = np.empty(len(order_R), np.uint64)
    number_R[order_R] = (np.arange(len(order_R)) - begin_R).astype(np.uint64)
    return _mixed(alike_R + number_R)


def _mixed(value_R: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's last steps: each bit of the input moves about half of the bits."""
    value_R = value_R + np.uint64(0x9E3779B97F4A7C15)
    value_R = (value_R ^ (value_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value_R = (value_R ^ (value_R >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value_R ^ (value_R >> np.uint64(31))
