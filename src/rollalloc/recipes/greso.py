"""GRESO, arXiv 2506.02177: skip prompts at random before generation, if their last visits gave no learning signal.

For runs that have several epochs, and many groups that are all right or all wrong. DAPO generates such groups and drops
them; GRESO avoids most of them.

How this differs from the released code: a prompt counts as solved or failed if all its metrics are equal. (The code has
thresholds on the mean reward.) The share of groups without variance is counted since the last update. If a pass would
skip all prompts, one prompt is drawn. See PAPERS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.packing import natural
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import IntakeRule, Memory, PromptRule, PromptTraits, View
from rollalloc.recipes.dapo import dapo
from rollalloc.recipes.grpo import batches_ahead, shape
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages
from rollalloc.rules.judges import mixed


@sized(shape)
def greso(
    groups: int = 16,
    n: int = 4,
    gen_groups: int | None = None,
    zero_share: float = 0.25,
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """GRESO: DAPO that skips prompts whose last visits gave no learning signal. arXiv 2506.02177.

        drawn at its turn with probability max(p^z, 0.01)
        z: number of most recent visits in a row that were all solved, or all failed

    1. Go through the prompts in random order, once an epoch. Draw each prompt with the probability above. p starts at
       0.5 and adapts, separately for solved and failed prompts.
    2. Generate n rollouts of each prompt. The prompts in generation are expected to give 1.25 times as many useful groups
       as the batch needs.
    3. Keep groups whose metrics differ, until there are `groups` of them, and train as GRPO does.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        gen_groups: maximum number of prompts in generation at a time, at least 1. None: three times `groups`.
        zero_share: target for the share of groups without variance, in (0, 1); p adapts to reach it.
        max_candidates: maximum number of prompts tried for one batch, see `dapo`.
        deviation: the kind of standard deviation, see `grpo`.
    """
    gen_groups = batches_ahead(groups, gen_groups)
    return replace(
        dapo(groups, n, gen_groups, max_candidates=max_candidates, deviation=deviation),
        prompts=Selective(zero_share),
        intake=Estimated(gen_groups),
    )


_WITHIN = (0.05, 0.95)  # range of p


_LONGEST_RUN = 100  # upper limit of z; at this limit, p^z is below the minimum probability 0.01 for every p


@dataclass(frozen=True, slots=True)
class Selective(PromptRule):
    """Draw each prompt at most once an epoch, and skip prompts whose last visits gave no learning signal.

        drawn at its turn with probability max(p^z, least)
        z: number of most recent visits in a row that were all solved, or all failed
        p: one value for prompts that were solved, another value for prompts that failed

    A visit is solved or failed if all its metrics are equal. A visit with fewer than two scores changes nothing. A
    skipped prompt has its next turn in the next epoch. If a pass would skip all prompts, one prompt is drawn, in
    proportion to these probabilities.

    p adapts after each batch, from the second epoch on. If at least `zero_share` / 3 of the batch's groups were solved,
    p of solved prompts becomes p - step, otherwise p + step. For failed prompts, the threshold is 2/3 · `zero_share`.

    GRESO, arXiv 2506.02177; see PAPERS.md.

    Attributes:
        zero_share: target share of groups without variance, in (0, 1).
        start: initial value of p for solved and for failed prompts, in [0.05, 0.95]. p stays in this range.
        step: change of p after a batch, 0 or more.
        least: smallest probability with which a prompt is drawn at its turn, in (0, 1].

    Raises:
        ValueError: a value is out of its range.
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

    traits = PromptTraits(reads_rate=True, reads=("metrics_G",), gives_baseline=False)

    def init(self, table: PromptTable) -> Memory:
        return {
            "order": np.arange(len(table), dtype=np.int32), "cursor": len(table), "pass": -1,
            "run_N": np.zeros(len(table), np.int8),  # z; negative for visits that failed
            "p_solved": self.start, "p_failed": self.start,
            "version": 0, "solved": 0, "failed": 0, "mixed": 0,  # counts of groups that ended since `version`
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
        """After an update of the weights, adapt both values of p and restart the counts of groups."""
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
        if mixed(group):
            run, fate = 0, "mixed"
        elif metrics_G[0] > 0.5:
            run, fate = min(max(run, 0) + 1, _LONGEST_RUN), "solved"
        else:
            run, fate = max(min(run, 0) - 1, -_LONGEST_RUN), "failed"
        run_N[prompt] = run
        memory[fate] += 1

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Raise an error if this rule cannot have written the saved memory."""
        for name in ("cursor", "version", "solved", "failed", "mixed"):
            natural(memory[name], name)
        natural(memory["pass"] + 1, "pass")
        low, high = _WITHIN
        if memory["cursor"] > len(table) or not all(low <= memory[name] <= high for name in ("p_solved", "p_failed")):
            raise ValueError(
                f"expected a cursor up to {len(table)} and probabilities in [{low}, {high}]; the state is corrupt"
            )

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        order, cursor = before["order"].tolist(), before["cursor"]
        new = {prompt for prompt in order if free_N[prompt] and not before["run_N"][prompt]}
        begins = cursor == len(order)
        over = begins and before["pass"] == view.epoch
        if not begins:  # only the prompts that had their turn in this call
            turns = order[cursor:] if len(picked) < k else order[cursor : order.index(picked[-1]) + 1]
            new &= set(turns)
        return {
            "after the pass, no prompt is drawn before the next epoch": not over or not picked,
            "a pass draws at least one prompt if one is free": over or not begins or bool(picked) or not free_N.any(),
            "a prompt whose last visit gave a learning signal is never skipped": (
                over or (begins and len(picked) == k) or new <= set(picked)
            ),
        }


def without_variance(memory: Memory, version: int) -> int:
    """Number of groups without variance that ended since this version; 0 if the prompt rule does not count them."""
    return memory["solved"] + memory["failed"] if memory.get("version") == version and "mixed" in memory else 0


@dataclass(frozen=True, slots=True)
class Estimated(IntakeRule):
    """Keep as many groups in the first stage as are expected to fill the batch. GRESO, arXiv 2506.02177.

        min(groups, ⌈spare · need / (1 - share)⌉);  share: fraction of groups without variance since the last update

    The number is `groups` if no group is ready yet. `share` is 0 if the prompt rule is not `Selective`. No group is opened
    while `need` groups have passed the first stage and are not ready for a batch yet.

    Attributes:
        groups: maximum number of groups in the first stage, at least 1.
        spare: the expected number of useful groups, divided by the number of groups needed; above 0 and finite.

    Raises:
        ValueError: a value is out of its range.
    """

    groups: int
    spare: float = 1.25

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)
        if not 0 < self.spare < inf:
            raise ValueError(f"spare must be above 0 and finite, got {self.spare!r}")

    def __call__(self, view: View, memory: Memory) -> int:
        if view.on_the_way - view.running_S[0] >= view.need:
            return 0
        met, without = view.held_S[-1], without_variance(memory, view.version)
        enough = ceil(self.spare * view.need * (met + without) / met) if met else self.groups
        return max(0, min(self.groups, enough) - view.running_S[0])

    def promises(self, opened: int, view: View, memory: Memory) -> dict[str, bool]:
        met, without = view.held_S[-1], without_variance(memory, view.version)
        share = without / (met + without) if met else 0.0
        running = view.running_S[0] + opened
        later = sum(view.running_S[1:]) + sum(view.held_S[:-1])
        expected, wanted = running * (1 - share), self.spare * view.need
        return {
            "no group is opened while enough groups have passed the first stage": opened == 0 or later < view.need,
            "no more than `groups` run in the first stage": opened == 0 or running <= self.groups,
            "the running groups are expected to fill the batch, as far as `groups` allows": (
                later >= view.need or running >= self.groups or (met > 0 and expected >= wanted - 1e-9)
            ),
            "no more groups are opened than are expected to be needed": opened == 0
            or not met
            or expected - (1 - share) < wanted + 1e-9,
        }
