"""PODS, arXiv 2504.13818: generate many rollouts of each prompt, and train on a subset with the largest reward variance.

For runs in which an update costs more than generation: the update sees m rows of a prompt instead of n.

The best subset consists of some of the highest and some of the lowest rewards. It is found exactly, in O(n log n).
recipes/verl has configurations for the runs of the paper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rollalloc.core.recipe import Recipe, at_least, one_of
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.shapes import Sizes, groups_of, sized
from rollalloc.rules import advantages, rows

_ROW_RULES = {
    "max_variance": rows.MaxVariance,
    "max_reward": rows.MaxReward,
    "random": rows.Random,
    "percentile": rows.Percentile,
}


def shape(rows: int = 64, group_rows: int = 4, n: int | None = None, m: int | None = None) -> Sizes:
    """Four rollouts for each row that is trained on, as published (64 → 16).

    Args:
        rows: rows of a batch, at least 1.
        group_rows: m, unless n or m is set.
        n: rollouts per prompt, if the user set it; a quarter of them is trained on, at least 2.
        m: rows of a group, if the user set it.
    """
    if m is None:
        m = group_rows if n is None else max(2, n // 4)
    return {"groups": groups_of(rows, group_rows), "n": 4 * m if n is None else n, "m": m}


@sized(shape)
def pods(
    groups: int = 16,
    n: int | None = None,
    m: int | None = None,
    rule: Literal["max_variance", "max_reward", "random", "percentile"] = "max_variance",
) -> Recipe:
    """PODS: generate n rollouts, train on the m rollouts with the largest reward variance. arXiv 2504.13818.

    1. Generate n rollouts of each prompt.
    2. Choose m rollouts by `rule`. "max_variance" chooses some of the highest and some of the lowest rewards.
    3. Compute GRPO's advantages with the mean and the standard deviation of the m chosen rewards.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2. None: four times m, or 16 if m is None too.
        m: rollouts of each prompt to train on, in [2, n]. None: a quarter of n, at least 2.
        rule: how the m rollouts are chosen. "max_variance" is the paper's method; "max_reward", "random" and "percentile"
            are its comparisons. With "max_reward", a prompt with m or more right answers gives no learning signal.

    Raises:
        ValueError: m is out of its range, or the rule is unknown.
    """
    made = shape(n=n, m=m)
    size: int = made["n"]
    kept: int = made["m"]
    at_least("m", kept, 2, "so that their rewards can differ")
    at_least("n", size, 2, "so that rewards can differ")
    one_of("rule", rule, tuple(_ROW_RULES))
    if kept > size:
        raise ValueError(f"m must be at most n={size}, the number of rollouts to choose from, got {kept}")
    return replace(grpo(groups, size), rows=_ROW_RULES[rule](kept), advantage=advantages.OverChosen(advantages.pods))
