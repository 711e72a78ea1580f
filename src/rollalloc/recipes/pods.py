"""PODS: many rollouts, of which those with the largest reward variance are trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from rollalloc.core.recipe import Recipe, at_least, one_of
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, rows


@sized
def pods(
    groups: int = 16,
    n: int | None = None,
    m: int | None = None,
    rule: Literal["max_variance", "max_reward", "random", "percentile"] = "max_variance",
) -> Recipe:
    """PODS: roll out n, train on the m of largest reward variance, statistics after the choice. arXiv 2504.13818.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt; None: four times m, or 16.
        m: rollouts trained on, in [1, n]; None: a quarter of n.
        rule: which m: "max_variance", or one of those that the paper compares it with, "max_reward", "random" and
            "percentile". Under "max_reward" a prompt with m or more right answers of n teaches nothing.

    Raises:
        ValueError: m out of its range, or a rule that there is not.
    """
    if m is not None:
        at_least("m", m, 1)
    if n is None:
        n = 16 if m is None else 4 * m
    at_least("n", n, 1)
    m = max(1, n // 4) if m is None else m
    one_of("rule", rule, tuple(_row_rules(1)))
    if m > n:
        raise ValueError(f"m must be at most n={n}, the rollouts there are to choose from, got {m}")
    return replace(grpo(groups, n), rows=_row_rules(m)[rule], advantage=advantages.OverChosen(advantages.pods))


def _row_rules(m: int) -> dict[str, Any]:
    return {
        "max_variance": rows.MaxVariance(m),
        "max_reward": rows.MaxReward(m),
        "random": rows.Random(m),
        "percentile": rows.Percentile(m),
    }
