r"""The reward of the papers' runs under verl (recipes/verl): +1 for a right answer in a closed `\boxed{}`, and -1 otherwise.

verl loads `reward` by `reward.custom_reward_function.path=pkg://rollalloc.rewards.signed`, on any node and from any folder.
"""

from __future__ import annotations

from typing import Any

from rollalloc.rewards import math
from rollalloc.rewards.extract import boxed
from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.scorers import WorkerScorer


def compute_score(**sample: Any) -> dict[str, float]:
    """Return the reward and, as `acc`, the success rate that selection uses.

    The reward is signed so that DAPO's overlong penalty of at most 1 does not outweigh a right answer. An answer without a
    box, or in a box that a truncated completion left open, is wrong.

    Args:
        sample: verl's arguments of a reward function.
    """
    right = math.required(**sample)
    return {"score": 2 * right - 1, "acc": right}


reward = Reward(WorkerScorer(f"{__name__}:compute_score", workers=2), answer=boxed)
"""For verl: `compute_score` in processes that may be killed, with the boxed answer as `pred` for verl's `maj@k`."""
