"""The methods that can be named, and the shape each has for a given number of groups and of rollouts a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollalloc import recipes
from rollalloc.core.recipe import Recipe


def dapo_carry(groups: int, n: int, gen_groups: int, max_candidates: int | None = None) -> Recipe:
    """DAPO, with more mixed groups than needed carried into the next batch instead of discarded.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts a prompt, at least 2.
        gen_groups: prompts generated at a time, at least 1.
        max_candidates: prompts tried for one batch at most; then it is short. None: no limit.

    Raises:
        ValueError: a number out of its range.
    """
    return recipes.dapo(groups, n, gen_groups, surplus="carry", max_candidates=max_candidates)


def pilot_commit_pods(groups: int, n_pilot: int, n_commit: int, gen_groups: int, m: int) -> Recipe:
    """Pilot-Commit, trained on the m rollouts of largest reward variance of each group, as PODS does.

    Args:
        groups: prompts in a batch, at least 1.
        n_pilot: rollouts that estimate a prompt, at least 1.
        n_commit: rollouts for a prompt in the window, at least 1.
        gen_groups: prompts piloted at a time, at least 1.
        m: rollouts trained on, in [1, n_pilot + n_commit].

    Raises:
        ValueError: a number out of its range.
    """
    commits = recipes.pilot_commit(groups, n_pilot, n_commit, gen_groups)
    return recipes.mix(commits, recipes.pods(groups, n_pilot + n_commit, m))


RECIPES: Mapping[str, Callable[..., Recipe]] = {
    "grpo": recipes.grpo,
    "dapo": recipes.dapo,
    "dapo_carry": dapo_carry,
    "pilot_commit": recipes.pilot_commit,
    "pods": recipes.pods,
    "darts": recipes.darts,
    "racing": recipes.racing,
    "pilot_commit+pods": pilot_commit_pods,
}


def matched(recipe: str, groups: int, n: int) -> dict[str, Any]:
    """A recipe's parameters where every recipe is to have the same groups a batch and rollouts a group.

    A group has n rollouts: GRPO's and DAPO's n, Pilot-Commit's pilots and commits, racing's last size, what PODS
    chooses half of, and what DARTS trains on, of up to twice as many. Methods that look for prompts generate three
    batches' worth at a time.

    Args:
        recipe: a key of `RECIPES`.
        groups: prompts in a batch, at least 1.
        n: rollouts a group, even and at least 4, so that half of them is a group too.

    Raises:
        ValueError: an unknown recipe, or an n that cannot be halved.
    """
    if n < 4 or n % 2:
        raise ValueError(f"n must be even and at least 4, so that every method can have its shape, got {n}")
    half, ahead = n // 2, {"gen_groups": 3 * groups}
    shapes: dict[str, dict[str, Any]] = {
        "grpo": {"n": n},
        "dapo": {"n": n, **ahead},
        "dapo_carry": {"n": n, **ahead},
        "pilot_commit": {"n_pilot": half, "n_commit": half, **ahead},
        "pods": {"n": n, "m": half},
        "darts": {"shortest": n - 1, "longest": 1},
        "racing": {"sizes_S": (half, n), **ahead},
        "pilot_commit+pods": {"n_pilot": half, "n_commit": half, "m": half, **ahead},
    }
    if recipe not in shapes:
        raise ValueError(f"{recipe} has no matched shape; there is one for {', '.join(shapes)}")
    return {"groups": groups, **shapes[recipe]}
