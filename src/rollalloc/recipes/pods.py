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
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, rows

_ROW_RULES = {
    "max_variance": rows.MaxVariance,
    "max_reward": rows.MaxReward,
    "random": rows.Random,
    "percentile": rows.Percentile,
}


@sized
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
    if m is not None:
        at_least("m", m, 2, "so that their rewards can differ")
    if n is None:
        n = 16 if m is None else 4 * m
    at_least("n", n, 2, "so that rewards can differ")
    m = max(2, n // 4) if m is None else m
    one_of("rule", rule, tuple(_ROW_RULES))
    if m > n:
        raise ValueError(f"m must be at most n={n}, the number of rollouts to choose from, got {m}")
    return replace(grpo(groups, n), rows=_ROW_RULES[rule](m), advantage=advantages.OverChosen(advantages.pods))
