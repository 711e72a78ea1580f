r"""The reward of the papers' runs under verl (recipes/verl): +1 for a right answer in a closed `\boxed{}`, otherwise -1.

verl loads `reward` by `reward.custom_reward_function.path=pkg://rollalloc.rewards.signed`, on any node and from any folder.
"""

from __future__ import annotations

from typing import Any

from rollalloc.rewards import math
from rollalloc.rewards.extract import boxed
from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.scorers import WorkerScorer


def compute_score(**sample: Any) -> dict[str, float]:
    """Return the reward as `score`, and the success rate for selection as `acc`.

    With this reward, a right answer with DAPO's full overlong penalty, 1 − 1, is still better than a wrong answer, −1. A
    completion is wrong if it has no box, or if its last box is not closed.

    Args:
        sample: the arguments that verl passes to a reward function.
    """
    right = math.required(**sample)
    return {"score": 2 * right - 1, "acc": right}


reward = Reward(WorkerScorer(f"{__name__}:compute_score", workers=2), answer=boxed)
"""For verl: runs `compute_score` in processes that may be killed. `pred`, for verl's `maj@k`, is the boxed answer."""
