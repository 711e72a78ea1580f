"""Defaults that depend on the recipe or on the number of prompts: parameters, budget, grid of evaluations.

All other defaults are in `rollalloc.train.config.Config`. The benchmark uses the same defaults, so its results hold for
users' runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_SHAPE: Mapping[str, int] = {"groups": 16, "n": 4}
DEFAULT_ALONE: Mapping[str, int] = {"groups": 32, "n": 1}  # default sizes of recipes with one rollout per prompt
_ALONE = ("reinforce", "raft", "spo", "foresight")
ROLLOUTS_PER_PROMPT, LEAST_ROLLOUTS = 16, 4096  # the default budget
_EVALUATIONS = 10  # number of evaluations over the budget, not counting the initial model's


def default_parameters(recipe: str) -> dict[str, Any]:
    """Default parameters of a recipe, the same for every task and model.

    Raises:
        ValueError: the recipe is not one of this package.
    """
    return dict(DEFAULT_ALONE) if recipe in _ALONE else matched(recipe, **DEFAULT_SHAPE)


def default_budget(prompts: int) -> int:
    """Default budget in rollouts for this number of training prompts; the same for every recipe."""
    return max(ROLLOUTS_PER_PROMPT * prompts, LEAST_ROLLOUTS)


def default_grid(budget: int) -> int:
    """Rollouts between two evaluations: a tenth of the budget, at least 1."""
    return max(1, budget // _EVALUATIONS)


def matched(recipe: str, groups: int, n: int) -> dict[str, Any]:
    """A recipe's parameters for comparisons in which all recipes have the same groups per batch and rollouts per group.

    Most recipes generate n rollouts per group and train on all of them. In Pilot-Commit, n is the number of pilots plus
    commits; in racing and C-GRPO, the last size; in Knapsack, the mean. PODS trains on half of n rollouts. DARTS trains on
    n rows, and generates up to twice as many rollouts. Reinforce-Ada trains on n rows, and generates n rollouts per round.
    Recipes that search for prompts generate three batches at a time. Recipes without groups get groups · n prompts per
    batch, with one rollout of each prompt.

    Args:
        recipe: a key of `rollalloc.named.RECIPES`.
        groups: prompts in a batch, at least 1.
        n: rollouts per group, even and at least 4, so that n/2 rollouts still form a group.

    Raises:
        ValueError: the recipe is unknown, or n cannot be halved.
    """
    if n < 4 or n % 2:
        raise ValueError(f"n must be even and at least 4, so that n/2 rollouts still form a group, got {n}")
    half, ahead = n // 2, {"gen_groups": 3 * groups}
    alone = {"groups": groups * n, "n": 1}
    shapes: dict[str, dict[str, Any]] = {
        "grpo": {"n": n},
        "dr_grpo": {"n": n},
        "rloo": {"n": n},
        "mopps": {"n": n},
        **dict.fromkeys(_ALONE, alone),
        "dapo": {"n": n, **ahead},
        "dapo_carry": {"n": n, **ahead},
        "greso": {"n": n, **ahead},
        "knapsack": {"n": n},
        "vcrl": {"n": n},
        "cgrpo": {"sizes_S": (half, n)},
        "reinforce_ada": {"n": n, "round_n": n},
        "pilot_commit": {"n_pilot": half, "n_commit": half, **ahead},
        "pods": {"n": n, "m": half},
        "darts": {"shortest": n - 1, "longest": 1},
        "racing": {"sizes_S": (half, n), **ahead},
        "pilot_commit+pods": {"n_pilot": half, "n_commit": half, "m": half, **ahead},
    }
    if recipe not in shapes:
        raise ValueError(f"{recipe} has no matched shape; the recipes with a matched shape are {', '.join(shapes)}")
    return {"groups": groups, **shapes[recipe]}
