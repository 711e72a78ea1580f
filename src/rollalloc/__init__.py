"""Decides which prompts get how many rollouts, which rollouts are stopped early, and which are trained on.

from rollalloc import Allocator, recipes

allocator = Allocator(recipes.pilot_commit(groups=16, n_pilot=4, n_commit=12, gen_groups=48), prompts=8192, seed=0)
"""

from rollalloc import recipes
from rollalloc.core.allocator import Allocator, EventError, MetricError, NoProgress, RuleError
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Budget, Limit, Recipe, Replay, Retire, Stage

__version__ = "0.3.0"
__all__ = [
    "Allocator",
    "Budget",
    "EventError",
    "Limit",
    "MetricError",
    "NoProgress",
    "PromptTable",
    "Recipe",
    "Replay",
    "Retire",
    "RuleError",
    "Stage",
    "recipes",
]
