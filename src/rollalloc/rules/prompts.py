"""Prompts: which are drawn next, before any rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.packing import natural, naturals
from rollalloc.core.recipe import at_least
from rollalloc.core.rule import Memory, OfferedPromptRule, PromptRule, PromptTraits, View
from rollalloc.core.table import PromptTable
from rollalloc.rules.judges import first_success, relative_variance

# A posterior of so many rollouts is sure of its means; a promise tries it on data sets of at most so many prompts.
_SURE, _MOST_SURE = 1e7, 10_000


@dataclass(frozen=True, slots=True)
class Shuffled(PromptRule):
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
        return self.beside([], memory, k, free_N, rng)

    def beside(
        self, taken: Sequence[int], memory: Memory, k: int, free_N: NDArray[np.bool_], rng: np.random.Generator
    ) -> list[int]:
        """As `pick`, beside free prompts that were drawn otherwise in the same call."""
        picked = list(taken)
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
        return picked[len(taken) :]

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

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        free = int(np.count_nonzero(free_N))
        return {"fewer than asked only where no more are free": self.weights is not None or len(picked) == min(k, free)}


def _free(block: NDArray[np.int32], free_N: NDArray[np.bool_], picked: list[int]) -> NDArray[np.bool_]:
    """Which prompts of a block may be drawn: those picked already in the same call still count as free in `free_N`."""
    return free_N[block] & ~np.isin(block, picked) if picked else free_N[block]


@dataclass(frozen=True, slots=True)
class InOrder(PromptRule):
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

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        turns = sorted(np.flatnonzero(free_N).tolist(), key=lambda prompt: (prompt - before["next"]) % free_N.size)
        return {"the next free ones, round and round": list(picked) == turns[:k]}


@dataclass(frozen=True, slots=True)
class AsOffered(OfferedPromptRule):
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


def prior_rate(table: PromptTable, prompt: int) -> float:
    """That of one prompt, as `prior_rates` has it."""
    prior = float("nan") if table.prior_N is None else float(np.asarray(table.prior_N)[prompt])
    return 0.5 if isnan(prior) else prior


def prior_rates(table: PromptTable) -> NDArray[np.float64]:
    """The success rate believed of each prompt before its first rollout, shape (N,); 1/2 where the table says nothing."""
    if table.prior_N is None:
        return np.full(len(table), 0.5)
    return np.nan_to_num(np.asarray(table.prior_N, np.float64), nan=0.5)


def prior_counts(table: PromptTable, weight: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Successes and failures believed of each prompt before its first rollout, shape (N,) each.

    α₀ = w · p, with the table's rate p, or 1/2; β₀ = w · (1 - p).

    Args:
        table: of the prompts.
        weight: w, the rollouts that a rule's own predicted counts for.
    """
    rate_N = prior_rates(table)
    return rate_N * weight, (1 - rate_N) * weight


@dataclass(frozen=True, slots=True)
class Posterior(PromptRule):
    """Thompson sampling from a Beta posterior over each prompt's success rate, nearest to a target first.

    After a visit with s successes in n rollouts: α ← λα + (1 - λ)α₀ + s, β likewise with n - s. A draw takes the k whose
    sampled rates lie nearest to `target`, out of `pool`·k random free prompts. α₀ and β₀ are the table's prior rate, where
    known, with the weight of `prior_weight` rollouts. MoPPS, arXiv 2507.04632; see PAPERS.md.

    Attributes:
        target: in (0, 1).
        decay: λ in [0, 1]; the past fades by it at every visit.
        pool: candidates for each prompt drawn, at least 1.
        prior_weight: above 0.
    """

    target: float = 0.5
    decay: float = 0.5
    pool: int = 16
    prior_weight: float = 2.0

    def __post_init__(self) -> None:
        at_least("pool", self.pool, 1)
        if not (0 < self.target < 1 and 0 <= self.decay <= 1 and self.prior_weight > 0):
            raise ValueError(f"expected target in (0, 1), decay in [0, 1] and prior_weight above 0, got {self}")

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(reads_rate=True, reads=("metrics_G",))

    def init(self, table: PromptTable) -> Memory:
        hits_N, misses_N = prior_counts(table, self.prior_weight)
        # Never a prior of exactly 0 or 1, from which no evidence could move it.
        least_N = 0.02 * (hits_N + misses_N)
        return {
            "hits_N": (least_N + 0.96 * hits_N).astype(np.float32),
            "misses_N": (least_N + 0.96 * misses_N).astype(np.float32),
        }

    def _prior_hits(self, prior: Any) -> Any:
        """α₀ of prompts of these prior rates: never 0 or all, from which no evidence could move it."""
        return (0.02 + 0.96 * prior) * self.prior_weight

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
        hits_0 = self._prior_hits(prior_rate(view.table, prompt))
        before, fresh = self.decay, 1 - self.decay
        hits_N[prompt] = before * hits_N[prompt] + fresh * hits_0 + max(0.0, successes)
        missed = max(0.0, group.metrics_G.size - successes)
        misses_N[prompt] = before * misses_N[prompt] + fresh * (self.prior_weight - hits_0) + missed

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


_WITHIN = (0.05, 0.95)  # where GRESO keeps its probabilities
_LONGEST_RUN = 100  # visits in a row that are counted: whatever p, the chance has its floor long before


@dataclass(frozen=True, slots=True)
class Selective(PromptRule):
    """Each prompt once an epoch at most; one that taught nothing is passed over, the likelier the oftener in a row it did.

        drawn at its turn with probability max(p^z, least);  z: its last visits in a row whose metrics were all alike
        p: one for prompts that were solved, one for those that failed

    After each batch, from the second epoch on, p ← p - step where of the groups rolled out for it at least the share
    `zero_share` / 3 was solved, or 2/3 `zero_share` failed; else p + step. A visit that went otherwise than the one before
    begins a new z; one with fewer than two scores changes nothing. A prompt that was passed over has its next turn in the
    next epoch. Where a whole pass would draw none, one is drawn, in proportion to these probabilities.

    GRESO, arXiv 2506.02177; see PAPERS.md.

    Attributes:
        zero_share: share of groups without variance that is aimed at, in (0, 1).
        start: both p at first, in [0.05, 0.95], where they stay.
        step: 0 or more.
        least: probability with which any prompt is drawn, in (0, 1].

    Raises:
        ValueError: a value out of its range.
    """

    zero_share: float = 0.25
    start: float = 0.5
    step: float = 0.01
    least: float = 0.01

    def __post_init__(self) -> None:
        low, high = _WITHIN
        if not (0 < self.zero_share < 1 and low <= self.start <= high and self.step >= 0 and 0 < self.least <= 1):
            raise ValueError(
                f"expected zero_share in (0, 1), start in [{low}, {high}], step of 0 or more and least in (0, 1], got {self}"
            )

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(reads_rate=True, reads=("metrics_G",))

    def init(self, table: PromptTable) -> Memory:
        return {
            "order": np.arange(len(table), dtype=np.int32), "cursor": len(table), "pass": -1,
            "run_N": np.zeros(len(table), np.int8),  # z, below 0 where the visits failed
            "p_solved": self.start, "p_failed": self.start,
            "version": 0, "solved": 0, "failed": 0, "mixed": 0,  # groups that ended since that version
        }  # fmt: skip

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        self._count_from(memory, view)
        order, begins = memory["order"], memory["cursor"] == memory["order"].size
        if begins and memory["pass"] == view.epoch:
            return []
        if begins:
            rng.shuffle(order)
            memory |= {"cursor": 0, "pass": view.epoch}
        picked: list[int] = []
        cursor = memory["cursor"]
        while len(picked) < k and cursor < order.size:
            block = order[cursor : cursor + 4 * (k - len(picked)) + 64]
            drawn = free_N[block] & (rng.random(block.size) < self.chances(memory, block))
            at = np.flatnonzero(drawn)[: k - len(picked)]
            picked += block[at].tolist()
            cursor += int(at[-1]) + 1 if len(picked) == k else block.size
        memory["cursor"] = cursor
        return picked if picked or not begins else self._one(memory, free_N, rng)

    def chances(self, memory: Memory, prompts_K: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """The probability with which each of these prompts is drawn at its turn, shape (K,)."""
        run_K = memory["run_N"][prompts_K].astype(np.float64)
        p_K = np.where(run_K > 0, memory["p_solved"], memory["p_failed"])
        return np.maximum(p_K ** np.abs(run_K), self.least)

    def _one(self, memory: Memory, free_N: NDArray[np.bool_], rng: np.random.Generator) -> list[int]:
        free = np.flatnonzero(free_N)
        if not free.size:
            return []
        chance_K = self.chances(memory, free)
        return [int(rng.choice(free, p=chance_K / chance_K.sum()))]

    def _count_from(self, memory: Memory, view: View) -> None:
        """Where the weights are new: adapt both p to the groups of the batch before, and begin to count anew."""
        if view.version == memory["version"]:
            return
        count = memory["solved"] + memory["failed"] + memory["mixed"]
        if count and view.epoch > 0:
            for fate, share in (("solved", 1 / 3), ("failed", 2 / 3)):
                too_many = memory[fate] / count >= share * self.zero_share
                p = memory[f"p_{fate}"] + (-self.step if too_many else self.step)
                memory[f"p_{fate}"] = min(max(p, _WITHIN[0]), _WITHIN[1])
        memory |= {"version": view.version, "solved": 0, "failed": 0, "mixed": 0}

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if group.scored < 2:
            return
        self._count_from(memory, view)
        run_N, prompt, metrics_G = memory["run_N"], group.prompt, group.metrics_G
        run = int(run_N[prompt])
        if (metrics_G != metrics_G[0]).any():
            run, fate = 0, "mixed"
        elif metrics_G[0] > 0.5:
            run, fate = min(max(run, 0) + 1, _LONGEST_RUN), "solved"
        else:
            run, fate = max(min(run, 0) - 1, -_LONGEST_RUN), "failed"
        run_N[prompt] = run
        memory[fate] += 1

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Refuse a saved memory that is none of this rule."""
        for name in ("cursor", "version", "solved", "failed", "mixed"):
            natural(memory[name], name)
        natural(memory["pass"] + 1, "pass")
        low, high = _WITHIN
        if memory["cursor"] > len(table) or not all(low <= memory[name] <= high for name in ("p_solved", "p_failed")):
            raise ValueError(
                f"expected a cursor up to {len(table)} and chances in [{low}, {high}]; the state is corrupt"
            )

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        order, cursor = before["order"].tolist(), before["cursor"]
        new = {prompt for prompt in order if free_N[prompt] and not before["run_N"][prompt]}
        begins = cursor == len(order)
        over = begins and before["pass"] == view.epoch
        if not begins:  # the turns of this call, up to the last one drawn
            turns = order[cursor:] if len(picked) < k else order[cursor : order.index(picked[-1]) + 1]
            new &= set(turns)
        return {
            "none is drawn before the next epoch where the pass is over": not over or not picked,
            "a pass draws at least one where one is free": over or not begins or bool(picked) or not free_N.any(),
            "what taught something when last visited is never passed over": (
                over or (begins and len(picked) == k) or new <= set(picked)
            ),
        }


def without_variance(memory: Memory, version: int) -> int:
    """Groups that ended without variance since that version, as far as the prompt rule counts them."""
    return memory["solved"] + memory["failed"] if memory.get("version") == version and "mixed" in memory else 0


@dataclass(frozen=True, slots=True)
class Banked(PromptRule):
    """New prompts first; what lacks to the batch then comes from a bank of those whose metrics varied most.

    Since the last update of the weights as many prompts as a batch has groups are new ones, each once a pass, in random
    order; any further ones those of the bank of highest priority, and where it has none, new ones. A prompt that was trained
    on enters the bank with its relative variance for priority P, afterwards P ← momentum · P + (1 - momentum) · its relative
    variance. It leaves when a visit of it was dropped, when it was drawn from the bank `replays` times, or where there are
    `capacity` of higher priority. VCRL, arXiv 2509.19803; see PAPERS.md.

    Attributes:
        replays: draws of a prompt from the bank, at least 1.
        momentum: in [0, 1).
        capacity: prompts in the bank, at least 1.
        order: draws the new ones.

    Raises:
        ValueError: a number out of its range.
    """

    replays: int = 2
    momentum: float = 0.9
    capacity: int = 1024
    order: Shuffled = field(default_factory=Shuffled)

    def __post_init__(self) -> None:
        at_least("replays", self.replays, 1)
        at_least("capacity", self.capacity, 1)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(reads_rate=True, reads=("metrics_G",))

    def init(self, table: PromptTable) -> Memory:
        # Of each prompt of the bank [prompt, priority, draws left]; `new`: those drawn since the `version`.
        return self.order.init(table) | {"bank": [], "version": 0, "new": 0}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        if view.version != memory["version"]:
            memory |= {"version": view.version, "new": 0}
        memory["bank"] = [entry for entry in memory["bank"] if _is_trained(view, entry[0])]
        again = self._best(memory, k - max(0, view.groups - memory["new"]), free_N)
        for entry in again:
            entry[2] -= 1
        drawn = [entry[0] for entry in again]
        new = self.order.beside(drawn, memory, k - len(drawn), free_N, rng)
        memory["new"] += len(new)
        return drawn + new

    @staticmethod
    def _best(memory: Memory, count: int, free_N: NDArray[np.bool_]) -> list[list[Any]]:
        """At most `count` entries of the bank that may be drawn, the highest priority first."""
        there = [entry for entry in memory["bank"] if entry[2] > 0 and free_N[entry[0]]]
        return sorted(there, key=lambda entry: (-entry[1], entry[0]))[: max(0, count)]

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        varies, bank = relative_variance(group.metrics_G), memory["bank"]
        if group.scored < 2:
            return
        entry = next((entry for entry in bank if entry[0] == group.prompt), None)
        if entry is not None and entry[2] > 0:
            entry[1] = self.momentum * entry[1] + (1 - self.momentum) * varies
        elif entry is not None:
            bank.remove(entry)
        elif varies > 0:
            bank.append([group.prompt, varies, self.replays])
            if len(bank) > self.capacity:
                bank.remove(min(bank, key=lambda entry: (entry[1], -entry[0])))

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """The memory for another data set: a new order, and the bank's prompts where they are now."""
        target = {int(old): new for new, old in enumerate(source_N.tolist()) if old >= 0}
        bank = [[target[prompt], priority, left] for prompt, priority, left in memory["bank"] if prompt in target]
        return self.init(table) | {"bank": bank} | {name: memory[name] for name in ("version", "new")}

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Refuse a saved memory that is none of this rule."""
        bank = memory["bank"]
        naturals([memory["version"], memory["new"], *(left for _, _, left in bank)], "bank")
        prompts = naturals([prompt for prompt, _, _ in bank], "bank")
        known = isinstance(bank, list) and max(prompts, default=0) < len(table) and len(set(prompts)) == len(prompts)
        if not known or not all(0 <= priority <= 1 + 1e-9 for _, priority, _ in bank):
            raise ValueError(
                f"bank: expected each of {len(table)} prompts at most once, with a priority in [0, 1]; the state is corrupt"
            )

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        new = before["new"] if before["version"] == view.version else 0
        free = [e for e in before["bank"] if e[2] > 0 and free_N[e[0]] and _is_trained(view, e[0])]
        again = min(len(free), max(0, k - max(0, view.groups - new)))
        priority = {entry[0]: entry[1] for entry in free}
        drawn = [priority.get(prompt, -1.0) for prompt in picked[:again]]
        left = sorted((p for prompt, p in priority.items() if prompt not in picked[:again]), reverse=True)
        turns = before["order"][int(before["cursors"][0]) :].tolist()
        turns = [prompt for prompt in turns if free_N[prompt] and prompt not in picked[:again]][: k - again]
        return {
            "as many as asked, or all that are free": len(picked) == min(k, int(np.count_nonzero(free_N))),
            "beyond a batch of new prompts it draws from the bank, while that has one": min(drawn, default=0.0) >= 0,
            "the others are the next new ones": set(turns) <= set(picked),
            "none of the bank has a higher priority than one that is drawn": not left
            or not drawn
            or left[0] <= min(drawn),
            "a prompt is drawn from the bank `replays` times at most": all(
                e[2] <= self.replays for e in before["bank"]
            ),
        }


def _is_trained(view: View, prompt: int) -> bool:
    """Whether its last visit was good enough to be trained on."""
    statistics = view.statistics
    return statistics.fates[int(statistics.fate_N[prompt])] in ("trained", "surplus", "stale")


@dataclass(frozen=True, slots=True)
class FirstSuccesses(PromptRule):
    """Every prompt once an epoch, in random order; where the first success came is kept of the last visits.

    What `judges.Resolved` is calibrated by. A visit that was stopped at its first success says as much as one that was not.

    Attributes:
        visits: kept, at least 1.
        order: draws the prompts.

    Raises:
        ValueError: a number of visits below 1.
    """

    visits: int = 200
    order: Shuffled = field(default_factory=Shuffled)

    def __post_init__(self) -> None:
        at_least("visits", self.visits, 1)

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(reads_rate=True, reads=("metrics_G",))

    def init(self, table: PromptTable) -> Memory:
        return self.order.init(table) | {"places": []}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int]:
        return self.order.pick(memory, k, free_N, view, rng)

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if group.scored:
            memory["places"] = [*memory["places"], first_success(group.metrics_G)][-self.visits :]

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """The memory for another data set: a new order, and the same visits."""
        return self.init(table) | {"places": memory["places"]}

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Refuse a saved memory that is none of this rule."""
        naturals(memory["places"], "places")

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        return self.order.promises(picked, before, k, free_N, view) | {
            "no more visits are kept than said": len(before["places"]) <= self.visits
        }
