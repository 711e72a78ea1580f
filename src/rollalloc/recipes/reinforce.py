"""REINFORCE and RAFT: one rollout for each of many prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Recipe, one_of
from rollalloc.core.rule import Drawn, Memory, PromptRule, PromptTraits, View
from rollalloc.core.table import PromptTable
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages
from rollalloc.rules.prompts import Shuffled


@sized
def reinforce(
    groups: int = 32,
    n: int = 1,
    baseline: Literal["batch", "running"] = "batch",
    neg: float | None = None,
    replay: int = 0,
    replay_staleness: int = 12,
) -> Recipe:
    """REINFORCE: one rollout for each of many prompts, and one baseline for all of them. The plainest estimator there is.

        A = r - b, times neg where that is below 0

    Williams 1992. At the price of `grpo(groups // n, n)` it sees n times as many prompts, and no rollout is spent on a
    baseline of its prompt's own.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        baseline: "batch": the mean reward of the batch's other rollouts; "running": the mean of all rewards so far, the
            newest counting most, and the batch's where a prompt was drawn before the first reward.
        neg: weight of what did worse than the baseline, 0 or more; None: what makes the update vary least, by how uncertain
            successes and failures were (`advantages.variance_ratio`). At 1 runs fell below where they began.
        replay: as for `foresight`.
        replay_staleness: as for `foresight`.
    """
    one_of("baseline", baseline, ("batch", "running"))
    base = grpo(groups, n, replay=replay, replay_staleness=replay_staleness)
    prompts = RunningMean() if baseline == "running" else base.prompts
    return replace(base, prompts=prompts, advantage=advantages.Rewards(), over_batch=advantages.BatchMean(neg))


@sized
def raft(groups: int = 32, n: int = 1) -> Recipe:
    """RAFT: only what was rewarded is learned from, A = max(r, 0). arXiv 2304.06767, as in 2504.11343.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
    """
    return replace(grpo(groups, n), advantage=advantages.Successes())


@dataclass(frozen=True, slots=True)
class RunningMean(PromptRule):
    """Every prompt once an epoch, in random order; the baseline of each is the running mean of all rewards.

        b = Σ w_i r_i / Σ w_i,  w_i = 2^(-rollouts since / half_life)

    REINFORCE's oldest baseline (Williams 1992). None before the first reward.

    Attributes:
        half_life: rollouts after which a reward counts half, above 0.
        order: draws the prompts.

    Raises:
        ValueError: a half-life that is not above 0.
    """

    half_life: float = 500.0
    order: Shuffled = field(default_factory=Shuffled)

    def __post_init__(self) -> None:
        if not 0 < self.half_life < inf:
            raise ValueError(f"half_life must be above 0 and finite, got {self.half_life!r}")

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits(reads=("rewards_G",))

    def init(self, table: PromptTable) -> Memory:
        return self.order.init(table) | {"reward_sum": 0.0, "reward_count": 0.0}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        mean = memory["reward_sum"] / memory["reward_count"] if memory["reward_count"] else None
        return [Drawn(prompt, baseline=mean) for prompt in self.order.pick(memory, k, free_N, view, rng)]

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        kept = 0.5 ** (group.scored / self.half_life)
        memory["reward_sum"] = kept * memory["reward_sum"] + float(group.rewards_G.sum())
        memory["reward_count"] = kept * memory["reward_count"] + group.scored

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """The memory for another data set: a new order, and the same mean."""
        return self.init(table) | {name: memory[name] for name in ("reward_sum", "reward_count")}

    def promises(
        self, picked: Sequence[Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        total, count = before["reward_sum"], before["reward_count"]
        promised = self.order.promises([each.prompt for each in picked], before, k, free_N, view)
        return promised | {
            "the baseline is the mean of the rewards so far, and none before the first": all(
                each.baseline is None
                if not count
                else abs((each.baseline or 0.0) * count - total) <= 1e-9 * (1 + abs(total))
                for each in picked
            )
        }
