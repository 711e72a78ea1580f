"""VCRL, arXiv 2509.19803: train on groups whose metrics vary enough, and use their prompts again.

For runs in which many groups are nearly all right or all wrong.

We know only a summary of the paper, and there is no released code. Differences from the summary: the groups of
replacement prompts must reach kappa too. Replacement continues until the batch is full. If the bank is empty, new
prompts are drawn instead. The bank holds 1,024 prompts. A prompt's priority is a running mean of its relative variance.
See PAPERS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import pvariance
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.packing import naturals
from rollalloc.core.prompts import NOW, PromptTable
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import (
    Act,
    JudgeRule,
    JudgeTraits,
    Memory,
    PromptTraits,
    Verdict,
    View,
)
from rollalloc.recipes.grpo import grpo, shape
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages
from rollalloc.rules.judges import TINY, mixed
from rollalloc.rules.prompts import Shuffled


@sized(shape)
def vcrl(
    groups: int = 16,
    n: int = 4,
    kappa: float = 0.8,
    kappa_first: float = 0.3,
    first: int = 20,
    replays: int = 2,
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """VCRL: train on groups whose metrics vary enough, and draw their prompts again. arXiv 2509.19803.

        trained on if  G Σ (m_i - mean)² / (⌊G/2⌋ ⌈G/2⌉) ≥ kappa        G rollouts with metrics m_i

    1. Draw `groups` new prompts and generate n rollouts of each.
    2. Keep the groups that satisfy the inequality, and drop the others. The left side is the variance as a share of
       the largest possible variance.
    3. Replace dropped prompts by prompts that were kept before, from the bank. Prompts with the highest variance come
       first. Generate new rollouts of these prompts, and go back to step 2 until `groups` groups are kept.
    4. Train as GRPO does.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        kappa: smallest relative variance to train on, in (0, 1].
        kappa_first: smallest relative variance during the first `first` updates of the weights, in (0, 1].
        first: number of updates with `kappa_first`, 0 or more.
        replays: maximum number of draws of a prompt from the bank, at least 1.
        max_candidates: maximum number of prompts tried for one batch, see `dapo`.
        deviation: the kind of standard deviation, see `grpo`.
    """
    at_least("n", n, 2, "so that metrics can vary")
    base = grpo(groups, n, deviation)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=Varied(kappa, kappa_first, first)),),
        prompts=Banked(replays),
        max_candidates=max_candidates,
    )


def relative_variance(metrics_G: NDArray[np.float64]) -> float:
    """The variance of metrics in [0, 1], as a share of the largest variance that this many metrics can have.

        G Σ (m_i - mean)² / (⌊G/2⌋ ⌈G/2⌉);  for k ones and G - k zeros this is  k (G - k) / (⌊G/2⌋ ⌈G/2⌉)

    This is VCRL's p, arXiv 2509.19803. The result is 0 for fewer than two metrics.
    """
    count = metrics_G.size
    if count < 2:
        return 0.0
    over_G = metrics_G - metrics_G.mean()
    return count * float(over_G @ over_G) / ((count // 2) * (count - count // 2))


@dataclass(frozen=True, slots=True)
class Varied(JudgeRule):
    """Train on a complete group whose metrics vary enough, and drop it otherwise. VCRL, arXiv 2509.19803.

        relative_variance ≥ `kappa`, or ≥ `kappa_first` in the first `first` updates of the weights

    Whether the group is trained on or dropped, its prompt may be drawn again at once.

    Attributes:
        kappa: smallest relative variance to train on, in (0, 1]. One success in 4 rollouts has a relative variance of
            0.75, two in 8 have 0.75, three in 8 have 0.94.
        kappa_first: smallest relative variance in the first `first` updates, in (0, 1].
        first: number of updates with `kappa_first`, 0 or more.

    Raises:
        ValueError: a number is out of its range.
    """

    kappa: float = 0.8
    kappa_first: float = 0.3
    first: int = 20

    def __post_init__(self) -> None:
        at_least("first", self.first, 0)
        if not (0 < self.kappa <= 1 and 0 < self.kappa_first <= 1):
            raise ValueError(f"kappa and kappa_first must be in (0, 1], got {self.kappa} and {self.kappa_first}")

    traits = JudgeTraits(reads=("metrics_G",), reads_rate=True, least_scored=2, waits_for_all=True, after_failure=NOW)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        varies = relative_variance(group.metrics_G)
        if varies >= (self.kappa_first if view.version < self.first else self.kappa) - TINY:
            return Verdict(Act.TRAIN, until=NOW)
        return Verdict(Act.DROP, "out_of_band/low_variance" if mixed(group) else "zero_variance", NOW)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        metrics, count = group.metrics_G.tolist(), group.scored
        most = pvariance([0.0] * (count // 2) + [1.0] * (count - count // 2)) if count > 1 else 1.0
        share = pvariance(metrics) / most if count > 1 else 0.0
        least = self.kappa_first if view.version < self.first else self.kappa
        return {
            "the judge decides exactly when all rollouts have ended": (verdict is None) == (group.unfinished > 0),
            "exactly the groups that vary enough are trained on": (
                verdict is None or abs(share - least) < 1e-6 or (verdict.act is Act.TRAIN) == (share > least)
            ),
            "the prompt may be drawn again at once": verdict is None or verdict.until == NOW,
        }


@dataclass(frozen=True, slots=True)
class Banked(Shuffled):
    """Draw new prompts first. If a batch needs more prompts, draw from a bank of prompts whose metrics varied most.

    1. After each update of the weights, draw one new prompt for each group of a batch, in random order and each prompt
       once an epoch.
    2. Then draw the prompts with the highest priority from the bank. If the bank is empty, draw new prompts.
    3. A prompt enters the bank if its group was trained on. Its priority P is the relative variance of its metrics. After
       a later visit, P ← momentum · P + (1 - momentum) · relative variance.
    4. A prompt leaves the bank if its group was dropped, if it was drawn from the bank `replays` times, or if
       `capacity` prompts have a higher priority.

    VCRL, arXiv 2509.19803; see PAPERS.md.

    Attributes:
        replays: maximum number of draws of a prompt from the bank, at least 1.
        momentum: weight of the earlier priority, in [0, 1).
        capacity: maximum number of prompts in the bank, at least 1.

    Raises:
        ValueError: a number is out of its range.
    """

    replays: int = 2
    momentum: float = 0.9
    capacity: int = 1024

    def __post_init__(self) -> None:
        at_least("replays", self.replays, 1)
        at_least("capacity", self.capacity, 1)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")

    traits = PromptTraits(reads_rate=True, reads=("metrics_G",), gives_baseline=False)

    def init(self, table: PromptTable) -> Memory:
        # `bank`: [prompt, priority, draws left] for each prompt in the bank. `new`: number of new prompts since `version`.
        return Shuffled.init(self, table) | {"bank": [], "version": 0, "new": 0}

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
        new = self.beside(drawn, memory, k - len(drawn), free_N, rng)
        memory["new"] += len(new)
        return drawn + new

    @staticmethod
    def _best(memory: Memory, count: int, free_N: NDArray[np.bool_]) -> list[list[Any]]:
        """At most `count` entries of the bank that may be drawn now, highest priority first."""
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
        """Return the memory for another data set: a new order of the prompts, and a bank of the prompts that still exist."""
        target = {int(old): new for new, old in enumerate(source_N.tolist()) if old >= 0}
        bank = [[target[prompt], priority, left] for prompt, priority, left in memory["bank"] if prompt in target]
        return self.init(table) | {"bank": bank} | {name: memory[name] for name in ("version", "new")}

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Raise an error if this rule cannot have written the saved memory."""
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
        turns = before["order"][int(before["cursor"]) :].tolist()
        turns = [prompt for prompt in turns if free_N[prompt] and prompt not in picked[:again]][: k - again]
        return {
            "as many as asked, or all free prompts": len(picked) == min(k, int(np.count_nonzero(free_N))),
            "after one batch of new prompts, the bank is used until it is empty": min(drawn, default=0.0) >= 0,
            "the other prompts are the next new prompts": set(turns) <= set(picked),
            "no prompt left in the bank has a higher priority than a drawn prompt": not left
            or not drawn
            or left[0] <= min(drawn),
            "a prompt is drawn from the bank at most `replays` times": all(
                e[2] <= self.replays for e in before["bank"]
            ),
        }


def _is_trained(view: View, prompt: int) -> bool:
    """Whether the judge passed the group of the prompt's last visit. The group may have been left out of the batch."""
    statistics = view.statistics
    return statistics.fates[int(statistics.fate_N[prompt])] in ("trained", "surplus", "stale")
