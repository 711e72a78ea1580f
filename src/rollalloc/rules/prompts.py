"""Prompt rules: they choose the prompts that are drawn next, before any rollout of them exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.prompts import PromptTable
from rollalloc.core.rule import Drawn, Memory, OfferedPromptRule, PromptRule, PromptTraits, View


@dataclass(frozen=True, slots=True)
class Shuffled(PromptRule):
    """Draw each prompt once an epoch, in random order."""

    traits = PromptTraits(reads=(), gives_baseline=False)

    def init(self, table: PromptTable) -> Memory:
        # A cursor at the end makes the first `pick` shuffle the order.
        return {"order": np.arange(len(table), dtype=np.int32), "cursor": len(table)}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int | Drawn]:
        return self.beside([], memory, k, free_N, rng)

    def beside(
        self, taken: Sequence[int], memory: Memory, k: int, free_N: NDArray[np.bool_], rng: np.random.Generator
    ) -> list[int]:
        """Draw k prompts, as `pick` does. `taken` lists free prompts that the caller has already drawn in the same call.

        Prompts that were not drawn in this pass come first. Then the order is shuffled, and a new pass begins.
        """
        picked, order, wanted = list(taken), memory["order"], len(taken) + k
        cursor = _search(order, int(memory["cursor"]), free_N, wanted, picked)
        if len(picked) < wanted:
            _shuffle(order, free_N, rng)
            cursor = _search(order, 0, free_N, wanted, picked)
        memory["cursor"] = cursor
        return picked[len(taken) :]

    def promises(
        self, picked: Sequence[Any], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        return {"k prompts, or all that are free": len(picked) == min(k, int(np.count_nonzero(free_N)))}


def _search(order: NDArray[np.int32], cursor: int, free_N: NDArray[np.bool_], wanted: int, picked: list[int]) -> int:
    """Add free prompts to `picked` until it has `wanted`, in order from the cursor on. Return the cursor after them."""
    size = 4 * (wanted - len(picked)) + 64
    while len(picked) < wanted and cursor < order.size:  # search in growing blocks, to skip evicted prompts fast
        missing = wanted - len(picked)
        block = order[cursor : cursor + size]
        at = np.flatnonzero(free_N[block])
        if picked:
            at = at[~np.isin(block[at], picked)]
        at = at[:missing]
        picked += block[at].tolist()
        cursor += int(at[-1]) + 1 if len(at) == missing else len(block)
        size *= 2
    return cursor


_LARGE, _FEW = 1 << 20, 8  # up to this number of prompts, or if a larger share than 1 / 8 is free, all are shuffled


def _shuffle(order: NDArray[np.int32], free_N: NDArray[np.bool_], rng: np.random.Generator) -> None:
    """Shuffle the order in place. If few of many prompts are free, bring these to the front and shuffle them alone.

    A pass through the order then begins with the same distribution, but ten million prompts are not shuffled to draw ten.
    """
    if order.size <= _LARGE or _FEW * np.count_nonzero(free_N) > order.size:
        rng.shuffle(order)
        return
    places = np.flatnonzero(free_N[order])
    free, front = order[places], order[: places.size].copy()
    order[places[places >= places.size]] = front[~free_N[front]]
    rng.shuffle(free)
    order[: places.size] = free


@dataclass(frozen=True, slots=True)
class InOrder(PromptRule):
    """Draw each prompt once an epoch, in the order of the data set. Use this rule for your own curriculum."""

    traits = PromptTraits(reads=(), gives_baseline=False)

    def init(self, table: PromptTable) -> Memory:
        return {"next": 0}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        begin, end = memory["next"], free_N.size
        picked = self._free(free_N, begin, end, k)
        if len(picked) < k:  # look for prompts that became free after their turn
            picked += self._free(free_N, 0, begin, k - len(picked))
        memory["next"] = picked[-1] + 1 if len(picked) == k else 0
        return picked

    @staticmethod
    def _free(free_N: NDArray[np.bool_], begin: int, end: int, count: int) -> list[int]:
        """The first `count` free prompts from `begin` on, found in blocks of growing size."""
        found: list[int] = []
        block = 4 * count + 64
        while len(found) < count and begin < end:
            stop = min(end, begin + block)
            found += (begin + np.flatnonzero(free_N[begin:stop])).tolist()
            begin, block = stop, 2 * block
        return found[:count]

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        turns = sorted(np.flatnonzero(free_N).tolist(), key=lambda prompt: (prompt - before["next"]) % free_N.size)
        return {
            "the next free prompts in the order of the data set, starting over at its end": list(picked) == turns[:k]
        }


@dataclass(frozen=True, slots=True)
class AsOffered(OfferedPromptRule):
    """Draw the prompts that a framework's own data loader offers, in the loader's order. Skip prompts that are not free."""

    traits = PromptTraits(reads=(), gives_baseline=False)

    def init(self, table: PromptTable) -> Memory:
        return {"queue": [], "ended": False}

    def offer(self, memory: Memory, prompts: Sequence[int]) -> None:
        memory["queue"] = memory["queue"] + [int(prompt) for prompt in prompts]
        memory["ended"] = not prompts

    def waiting(self, memory: Memory) -> int:
        return len(memory["queue"])

    def ended(self, memory: Memory) -> bool:
        return bool(memory["ended"])

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        queue, picked = memory["queue"], dict[int, None]()
        used = 0
        while used < len(queue) and len(picked) < k:
            if free_N[queue[used]]:
                picked[queue[used]] = None
            used += 1
        memory["queue"] = queue[used:]
        return list(picked)

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        turns = [before["queue"].index(prompt) if prompt in before["queue"] else -1 for prompt in picked]
        return {"only prompts that were offered, in the loader's order": -1 not in turns and turns == sorted(turns)}


def some_free(free_N: NDArray[np.bool_], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """At most `count` different random free prompts. The function scans all prompts only if free prompts are rare."""
    tried = np.unique(rng.integers(free_N.size, size=4 * count))
    found = tried[free_N[tried]]
    if found.size < count:
        found = np.flatnonzero(free_N)
    return rng.permutation(found)[:count]


def prior_rate(table: PromptTable, prompt: int) -> float:
    """The prior success rate of one prompt, in [0, 1]; see `prior_rates`."""
    prior = float("nan") if table.prior_N is None else float(np.asarray(table.prior_N)[prompt])
    return 0.5 if isnan(prior) else prior


def prior_rates(table: PromptTable) -> NDArray[np.float64]:
    """The prior success rate of each prompt, before its first rollout, shape (N,); 1/2 if it is unknown."""
    if table.prior_N is None:
        return np.full(len(table), 0.5)
    return np.nan_to_num(np.asarray(table.prior_N, np.float64), nan=0.5)


def prior_counts(table: PromptTable, weight: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Prior numbers of successes and failures of each prompt, before its first rollout, shape (N,) each.

    α₀ = w · p and β₀ = w · (1 - p), where p is the prompt's prior rate in the table, or 1/2.

    Args:
        table: the data set.
        weight: w, the number of rollouts that the prior counts for.
    """
    rate_N = prior_rates(table)
    return rate_N * weight, (1 - rate_N) * weight


def rises(picked: Sequence[Drawn], score_K: Sequence[float]) -> bool:
    """Whether the `sampling_ratio`s of the prompts rise with their scores."""
    chance_K = np.array([each.sampling_ratio or 0.0 for each in picked])[np.argsort(score_K, kind="stable")]
    return bool((np.diff(chance_K) >= -1e-6).all() and (chance_K > 0).all())


def without_replacement(chance_K: NDArray[np.float64], k: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw at most k different indices, without replacement, with probability ∝ `chance_K` (Gumbel's trick).

    Returns:
        The indices in the order in which they were drawn.
    """
    key_K = np.log(chance_K) + rng.gumbel(size=chance_K.size)
    return np.argsort(-key_K, kind="stable")[:k]
