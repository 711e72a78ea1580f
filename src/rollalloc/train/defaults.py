"""Defaults that depend on the number of prompts: the budget, and the grid of evaluations.

The defaults of a recipe's sizes are in its module (`shape`), all others in `rollalloc.train.config.Config`. The benchmark
uses the same defaults, so its results hold for users' runs.
"""

from __future__ import annotations

ROLLOUTS_PER_PROMPT, LEAST_ROLLOUTS = 16, 4096  # the default budget
_EVALUATIONS = 10  # number of evaluations over the budget, not counting the initial model's


def default_budget(prompts: int) -> int:
    """Default budget in rollouts for this number of training prompts; the same for every recipe."""
    return max(ROLLOUTS_PER_PROMPT * prompts, LEAST_ROLLOUTS)


def default_grid(budget: int) -> int:
    """Rollouts between two evaluations: a tenth of the budget, at least 1."""
    return max(1, budget // _EVALUATIONS)
