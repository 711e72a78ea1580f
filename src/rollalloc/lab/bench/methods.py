"""The shape that each recipe has for a given number of groups and of rollouts per group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_SHAPE: Mapping[str, int] = {"groups": 16, "n": 4}  # 64 rollouts per batch


_REPLAYED = ("reinforce", "foresight")


def default(recipe: str) -> dict[str, Any]:
    """A recipe's parameters where nobody says or searched for others, on every task and model; the rest are its defaults.

    REINFORCE and foresight train again on as many rows as a batch has. Not every trainer can, so that the recipes themselves
    have none.

    Raises:
        ValueError: a recipe that is not of this package.
    """
    shape = matched(recipe, **DEFAULT_SHAPE)
    return shape | ({"replay": shape["groups"]} if recipe in _REPLAYED else {})


def matched(recipe: str, groups: int, n: int) -> dict[str, Any]:
    """A recipe's parameters where every recipe is to have the same groups per batch and rollouts per group.

    A group has n rollouts: GRPO's and DAPO's n, Pilot-Commit's pilots and commits, racing's last size, what PODS
    chooses half of, what DARTS trains on, of up to twice as many, Knapsack's mean, Reinforce-Ada's rows and its rounds, and
    C-GRPO's last size. Methods that look for prompts generate three batches' worth at a time. Those that need no group have
    as many rollouts per batch, each of a prompt of its own.

    Args:
        recipe: a key of `rollalloc.named.RECIPES`.
        groups: prompts in a batch, at least 1.
        n: rollouts per group, even and at least 4, so that half of them is a group too.

    Raises:
        ValueError: an unknown recipe, or an n that cannot be halved.
    """
    if n < 4 or n % 2:
        raise ValueError(f"n must be even and at least 4, so that every method can have its shape, got {n}")
    half, ahead = n // 2, {"gen_groups": 3 * groups}
    alone = {"groups": groups * n, "n": 1}
    shapes: dict[str, dict[str, Any]] = {
        "grpo": {"n": n},
        "dr_grpo": {"n": n},
        "reinforce": alone,
        "rloo": {"n": n},
        "raft": alone,
        "mopps": {"n": n},
        "spo": alone,
        "foresight": alone,
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
        raise ValueError(f"{recipe} has no matched shape; there is one for {', '.join(shapes)}")
    return {"groups": groups, **shapes[recipe]}
