"""REINFORCE and RAFT: one rollout for each of many prompts, instead of several rollouts for each of a few prompts.

For runs with many prompts: no rollouts are spent on a separate baseline for each prompt.

REINFORCE was published by Williams (1992) with a running mean of rewards as the baseline. Our default is the mean of
the batch's other rollouts. A weight `neg` below 1 for failures is our addition. RAFT was published in arXiv 2304.06767;
`raft` follows its form in arXiv 2504.11343. The papers sample several rollouts of a prompt and keep the best rollout or
all right rollouts. Here, each rollout is weighted by its reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe, one_of
from rollalloc.core.rule import Drawn, Memory, PromptTraits, View
from rollalloc.recipes.grpo import grpo, replayed
from rollalloc.recipes.shapes import Sizes, plain, sized
from rollalloc.rules import advantages
from rollalloc.rules.prompts import Shuffled


def shape(rows: int = 32, group_rows: int = 1) -> Sizes:
    """One rollout of each of `rows` prompts: these methods do not compare rollouts of a prompt.

    Args:
        rows: rows of a batch, at least 1.
        group_rows: rows of a group in other methods; without effect.
    """
    return plain(rows, group_rows=1)


@sized(shape)
def reinforce(
    groups: int = 32,
    n: int = 1,
    baseline: Literal["batch", "running"] = "batch",
    neg: float | None = None,
    replay: int = 0,
    replay_staleness: int = 12,
    replay_moved: float | None = None,
    replay_pause: int = 4,
) -> Recipe:
    """REINFORCE: one rollout for each of many prompts, and one baseline for the whole batch. Williams 1992.

        A = r - b,  multiplied by neg if it is negative

    1. Draw `groups` prompts, in random order and each once an epoch, and generate n rollouts of each.
    2. Subtract the baseline b from each reward. Multiply negative advantages by `neg`.
    3. Train on all rollouts.

    A batch has n times as many prompts as with `grpo(groups // n, n)`, at the same number of rollouts.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        baseline: "batch": the mean reward of the batch's other rollouts. "running": a running mean of all rewards so far,
            with more weight on newer rewards; until the first reward, "batch" is used.
        neg: weight of rollouts that did worse than the baseline, 0 or more. None: the weight that minimises the variance
            of the update (`advantages.variance_ratio`). With neg=1, our runs on skills/late did not learn, and those on
            skills/graded did.
        replay: maximum number of rows of earlier batches to train on again in each batch; 0 or more. Only rollouts that
            did better than the baseline are replayed. Saves rollouts on most tasks, and on most costs processor time, see
            docs/train.md.
        replay_staleness: maximum age of a replayed rollout, in updates of the weights; at least 1.
        replay_moved: leave the replayed rows of a batch out if the policy has moved away from more than this share of
            their tokens, in [0, 1]; see docs/train.md. None: never.
        replay_pause: number of batches without replay after a batch whose replayed rows were left out; 0 or more.
    """
    one_of("baseline", baseline, ("batch", "running"))
    base = replace(grpo(groups, n), replay=replayed(replay, replay_staleness, replay_moved, replay_pause))
    prompts = RunningMean() if baseline == "running" else base.prompts
    return replace(base, prompts=prompts, advantage=advantages.Rewards(), over_batch=advantages.BatchMean(neg))


@sized(shape)
def raft(groups: int = 32, n: int = 1) -> Recipe:
    """RAFT: learn only from rewarded rollouts, A = max(r, 0). arXiv 2304.06767, as in 2504.11343.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
    """
    return replace(grpo(groups, n), advantage=advantages.Successes())


@dataclass(frozen=True, slots=True)
class RunningMean(Shuffled):
    """Draw every prompt once an epoch, in random order. The baseline is the running mean of all rewards.

        b = Σ w_i r_i / Σ w_i,  w_i = 2^(-number of rollouts after i / half_life)

    This is REINFORCE's oldest baseline (Williams 1992). A prompt drawn before the first reward gets no baseline.

    Attributes:
        half_life: number of rollouts after which the weight of a reward has halved, above 0.

    Raises:
        ValueError: the half-life is not above 0, or not finite.
    """

    half_life: float = 500.0

    def __post_init__(self) -> None:
        if not 0 < self.half_life < inf:
            raise ValueError(f"half_life must be above 0 and finite, got {self.half_life!r}")

    traits = PromptTraits(reads=("rewards_G",), gives_baseline=True)

    def init(self, table: PromptTable) -> Memory:
        return Shuffled.init(self, table) | {"reward_sum": 0.0, "reward_count": 0.0}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[Drawn]:
        mean = memory["reward_sum"] / memory["reward_count"] if memory["reward_count"] else None
        return [Drawn(prompt, baseline=mean) for prompt in self.beside([], memory, k, free_N, rng)]

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        kept = 0.5 ** (group.scored / self.half_life)
        memory["reward_sum"] = kept * memory["reward_sum"] + float(group.rewards_G.sum())
        memory["reward_count"] = kept * memory["reward_count"] + group.scored

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """Return the memory for another data set: a new order of the prompts, and the saved running mean."""
        return self.init(table) | {name: memory[name] for name in ("reward_sum", "reward_count")}

    def promises(
        self, picked: Sequence[Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        total, count = before["reward_sum"], before["reward_count"]
        promised = Shuffled.promises(self, picked, before, k, free_N, view)
        return promised | {
            "the baseline is the mean of the rewards so far, or None before the first reward": all(
                each.baseline is None
                if not count
                else abs((each.baseline or 0.0) * count - total) <= 1e-9 * (1 + abs(total))
                for each in picked
            )
        }
