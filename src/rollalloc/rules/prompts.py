"""Prompts: which are drawn next, before any rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Memory, View, at_least
from rollalloc.core.table import PromptTable

# A posterior of so many rollouts is sure of its means; a promise tries it on data sets of at most so many prompts.
_SURE, _MOST_SURE = 1e7, 10_000


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Each prompt once an epoch, in random order; several sources by weight.

    Attributes:
        weights: share of the draws for each source of the table, by its index; None: one order over all prompts. A source
            that is used up before the others begins a new pass with the next epoch, while the others go on in theirs.

    Raises:
        ValueError: a weight that is not above 0, or not one for each source.
    """

    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(self.weights))
            if not self.weights or min(self.weights) <= 0:
                raise ValueError(f"weights must be above 0, one for each source, got {self.weights}")

    def init(self, table: PromptTable) -> Memory:
        source_N = np.zeros(len(table), np.int64)
        if self.weights is not None and table.source_N is not None:
            source_N = np.asarray(table.source_N)
        sources = 1 if self.weights is None else len(self.weights)
        size_S = np.bincount(source_N, minlength=sources)
        if len(size_S) != sources or not size_S.all():
            raise ValueError(
                f"expected {sources} weights for sources with prompts, the table has {size_S.tolist()} prompts a source"
            )
        ends_S = np.cumsum(size_S)
        # `order` lists the prompts source by source; a source is shuffled afresh when its cursor stands at its end.
        order = np.argsort(source_N, kind="stable").astype(np.int32)
        # `short`: the sources that could not give their share when last asked.
        return {"order": order, "ends": ends_S, "cursors": ends_S.copy(), "short": np.zeros(sources, np.bool_)}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        picked: list[int] = []
        short_S, missing = memory["short"], 0
        open_S = np.ones(len(short_S), np.bool_)
        for source, count in enumerate(self._shares(k, open_S, rng)):
            lacking = count - self._take(memory, source, count, free_N, picked, rng)
            if lacking and short_S[source]:  # the next epoch did not help: the others take its share
                missing += lacking
            if count:
                short_S[source], open_S[source] = lacking > 0, lacking == 0
        if missing and open_S.any():
            for source, count in enumerate(self._shares(missing, open_S, rng)):
                if count and self._take(memory, source, count, free_N, picked, rng) == count:
                    short_S[source] = False
        return picked

    def _shares(self, k: int, open_S: NDArray[np.bool_], rng: np.random.Generator) -> list[int]:
        if self.weights is None:
            return [k]
        weight_S = np.where(open_S, self.weights, 0.0)
        return rng.multinomial(k, weight_S / weight_S.sum()).tolist()

    def _take(
        self, memory: Memory, source: int, count: int, free_N: NDArray[np.bool_], picked: list[int],
        rng: np.random.Generator,
    ) -> int:  # fmt: skip
        """Append the next `count` free prompts of one source to `picked`; returns how many there were.

        First those whose turn is still to come in this pass, then, from a fresh order, those that came back after theirs.
        """
        before = len(picked)
        order, end = memory["order"], int(memory["ends"][source])
        begin = int(memory["ends"][source - 1]) if source else 0
        cursor = int(memory["cursors"][source])
        while len(picked) - before < count and cursor < end:  # in blocks: many evicted prompts cost no Python loop
            missing = count - (len(picked) - before)
            block = order[cursor : min(end, cursor + 4 * missing + 64)]
            at = np.flatnonzero(_free(block, free_N, picked))[:missing]
            picked += block[at].tolist()
            cursor += int(at[-1]) + 1 if len(at) == missing else len(block)
        if missing := count - (len(picked) - before):
            rng.shuffle(order[begin:end])
            at = np.flatnonzero(_free(order[begin:end], free_N, picked))[:missing]
            picked += order[begin + at].tolist()
            cursor = begin + int(at[-1]) + 1 if len(at) == missing else end
        memory["cursors"][source] = cursor
        return len(picked) - before

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        pass

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        free = int(np.count_nonzero(free_N))
        return {"fewer than asked only where no more are free": self.weights is not None or len(picked) == min(k, free)}


def _free(block: NDArray[np.int32], free_N: NDArray[np.bool_], picked: list[int]) -> NDArray[np.bool_]:
    """Which prompts of a block may be drawn: those picked already in the same call still count as free in `free_N`."""
    return free_N[block] & ~np.isin(block, picked) if picked else free_N[block]


@dataclass(frozen=True, slots=True)
class InOrder:
    """Each prompt once an epoch, in the order of the data set: a curriculum that the user laid out."""

    def init(self, table: PromptTable) -> Memory:
        return {"next": 0}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        begin, end = memory["next"], free_N.size
        picked = self._free(free_N, begin, end, k)
        if len(picked) < k:  # what came back after its turn
            picked += self._free(free_N, 0, begin, k - len(picked))
        memory["next"] = picked[-1] + 1 if len(picked) == k else 0
        return picked

    @staticmethod
    def _free(free_N: NDArray[np.bool_], begin: int, end: int, count: int) -> list[int]:
        """The first `count` free prompts from `begin` on, looked for in blocks that grow."""
        found: list[int] = []
        block = 4 * count + 64
        while len(found) < count and begin < end:
            stop = min(end, begin + block)
            found += (begin + np.flatnonzero(free_N[begin:stop])).tolist()
            begin, block = stop, 2 * block
        return found[:count]

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        pass

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        turns = sorted(np.flatnonzero(free_N).tolist(), key=lambda prompt: (prompt - before["next"]) % free_N.size)
        return {"the next free ones, round and round": list(picked) == turns[:k]}


@dataclass(frozen=True, slots=True)
class AsOffered:
    """The prompts that a framework's own loader hands over, in its order; those not free to be drawn are passed over."""

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

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        pass

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        turns = [before["queue"].index(prompt) if prompt in before["queue"] else -1 for prompt in picked]
        return {"only what was offered, in the loader's order": -1 not in turns and turns == sorted(turns)}


def some_free(free_N: NDArray[np.bool_], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """At most `count` different free prompts at random; looks at all of them only where free ones are rare."""
    tried = np.unique(rng.integers(free_N.size, size=4 * count))
    found = tried[free_N[tried]]
    if found.size < count:
        found = np.flatnonzero(free_N)
    return rng.permutation(found)[:count]


def prior_rates(table: PromptTable) -> NDArray[np.float64]:
    """The success rate believed of each prompt before its first rollout, shape (N,); 1/2 where the table says nothing."""
    if table.prior_N is None:
        return np.full(len(table), 0.5)
    return np.nan_to_num(np.asarray(table.prior_N, np.float64), nan=0.5)


def prior_counts(table: PromptTable, weight: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Successes and failures believed of each prompt before its first rollout, shape (N,) each.

    α₀ = w · p where the table says no more than a rate p, or 1/2; α₀ = w/2 + n · p where it says for how many rollouts n
    that counts; β₀ likewise with 1 - p.

    Args:
        table: of the prompts.
        weight: w, the rollouts that a rule's own belief counts for.
    """
    rate_N = prior_rates(table)
    if table.prior_rollouts_N is None:
        return rate_N * weight, (1 - rate_N) * weight
    rollouts_N = np.asarray(table.prior_rollouts_N)
    return weight / 2 + rate_N * rollouts_N, weight / 2 + (1 - rate_N) * rollouts_N


@dataclass(frozen=True, slots=True)
class Posterior:
    """Thompson sampling from a Beta posterior over each prompt's success rate, nearest to a target first.

    After a visit with s successes in n rollouts: α ← λα + (1 - λ)α₀ + s, β likewise with n - s. A draw takes the k whose
    sampled rates lie nearest to `target`, out of `pool`·k random free prompts. The table's priors, where known, give the
    first α and β, see `prior_counts`. MoPPS, as summarised in PAPERS.md.

    Attributes:
        target: in (0, 1).
        decay: λ in [0, 1]; the past fades by it at every visit.
        pool: candidates for each prompt drawn, at least 1.
        prior_weight: above 0.
    """

    reads_rate: ClassVar = True
    reads_priors: ClassVar = True
    reads: ClassVar = ("metrics_G",)

    target: float = 0.5
    decay: float = 0.5
    pool: int = 16
    prior_weight: float = 2.0

    def __post_init__(self) -> None:
        at_least("pool", self.pool, 1)
        if not (0 < self.target < 1 and 0 <= self.decay <= 1 and self.prior_weight > 0):
            raise ValueError(f"expected target in (0, 1), decay in [0, 1] and prior_weight above 0, got {self}")

    def init(self, table: PromptTable) -> Memory:
        hits_N, misses_N = prior_counts(table, self.prior_weight)
        # Never a prior of exactly 0 or 1, from which no evidence could move it.
        least_N = 0.02 * (hits_N + misses_N)
        return {
            "hits_N": (least_N + 0.96 * hits_N).astype(np.float32),
            "misses_N": (least_N + 0.96 * misses_N).astype(np.float32),
        }

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        pool = some_free(free_N, self.pool * k, rng)
        rate = rng.beta(memory["hits_N"][pool], memory["misses_N"][pool])
        return pool[np.argsort(np.abs(rate - self.target), kind="stable")[:k]].tolist()

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if not group.metrics_G.size:
            return
        hits_N, misses_N, prompt = memory["hits_N"], memory["misses_N"], group.prompt
        successes = float(group.metrics_G.sum())
        fresh = (1 - self.decay) * self.prior_weight / 2
        hits_N[prompt] = self.decay * hits_N[prompt] + fresh + max(0.0, successes)
        misses_N[prompt] = self.decay * misses_N[prompt] + fresh + max(0.0, group.metrics_G.size - successes)

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        free = np.flatnonzero(free_N)
        promised = {"as many as asked, or all that are free": len(picked) == min(k, free.size)}
        if free.size > _MOST_SURE or len(picked) == free.size:
            return promised
        # A posterior that is sure of its means draws just those: with all free prompts in the pool, the nearest must come.
        sure = {name: before[name].astype(np.float64) * _SURE for name in ("hits_N", "misses_N")}
        every = replace(self, pool=free.size)
        nearest = every.pick(sure, k, free_N, view, np.random.Generator(np.random.Philox(0)))
        off_N = np.abs(before["hits_N"] / (before["hits_N"] + before["misses_N"]) - self.target)
        left = np.setdiff1d(free, nearest)
        return promised | {
            "where it is sure, none is drawn that is farther from the target than one left": bool(
                not left.size or off_N[list(nearest)].max() <= off_N[left].min() + 0.01
            )
        }
