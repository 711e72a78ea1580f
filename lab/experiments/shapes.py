"""What does GRPO pay with other groups than 16 × 4, with REINFORCE's replay, and with its weight of failures?

Recipes for `rollalloc-lab bench`, by no settings but a shape of 64 rollouts a batch:

    PYTHONPATH=experiments rollalloc-lab bench --tier full --track defaults --recipes grpo,reinforce,raft,foresight \\
        --recipe shapes:grpo_n2 --recipe shapes:grpo_n16 --recipe shapes:grpo_replay
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc import Recipe, recipes
from rollalloc.rules import advantages


def grpo_n2(groups: int, n: int) -> Recipe:
    """GRPO with pairs, as arXiv 2510.00977 has it."""
    return recipes.grpo(groups, n)


def grpo_n16(groups: int, n: int) -> Recipe:
    """GRPO with groups as large as practised on clusters."""
    return recipes.grpo(groups, n)


def grpo_replay(groups: int, n: int) -> Recipe:
    """GRPO that trains again on rows that did better than their group, as many as a batch has, as REINFORCE does."""
    return recipes.grpo(groups, n, replay=groups * n)


def grpo_neg(groups: int, n: int) -> Recipe:
    """GRPO whose failures count a tenth, as REINFORCE's do."""
    return replace(recipes.grpo(groups, n), advantage=advantages.OverGroup(_tenth))


def grpo_replay_neg(groups: int, n: int) -> Recipe:
    """GRPO with both."""
    return replace(grpo_replay(groups, n), advantage=advantages.OverGroup(_tenth))


def _tenth(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    made_G = advantages.grpo(rewards_G)
    return np.where(made_G < 0, 0.1 * made_G, made_G)


def matched(recipe: str, groups: int, n: int) -> dict[str, Any]:
    """As many rollouts a batch for each, in groups of the size that the recipe's name says."""
    size = {"grpo_n2": 2, "grpo_n16": 16}.get(recipe.rpartition(":")[2], n)
    return {"groups": groups * n // size, "n": size}
