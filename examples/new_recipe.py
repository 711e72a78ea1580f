"""A recipe of your own on the leaderboard: GRPO that drops groups in which a single rollout differs from the others.

One file with three names: a function that returns the recipe, `GRID`, the settings that it is tuned over, and `matched`,
its parameters where every method has the same groups and rollouts per group. From the folder of this file:

    rollalloc bench --recipe new_recipe:no_loners
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollalloc import Recipe, recipes
from rollalloc.core.group import GroupView
from rollalloc.core.rule import Act, JudgeRule, Verdict, View


@dataclass(frozen=True, slots=True)
class NoLoners(JudgeRule):
    """Train on a group with at least two successes and two failures; drop any other."""

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        wins = int((group.metrics_G > 0.5).sum())
        if min(wins, group.metrics_G.size - wins) >= 2:
            return Verdict(Act.TRAIN)
        return Verdict(Act.DROP, "out_of_band/loner")


def no_loners(groups: int, n: int, gen_groups: int) -> Recipe:
    """DAPO's sampling with another judge."""
    plain = recipes.dapo(groups=groups, n=n, gen_groups=gen_groups)
    return replace(plain, stages=(replace(plain.stages[0], judge=NoLoners()),))


# Function -> the settings that are tuned over, as many as the tier takes of every method: the best guess first.
GRID: Mapping[str, list[dict[str, Any]]] = {
    "no_loners": [
        {"groups": 8, "n": 4, "gen_groups": 24},
        {"groups": 8, "n": 8, "gen_groups": 24},
        {"groups": 4, "n": 8, "gen_groups": 12},
    ]
}


def matched(recipe: str, groups: int, n: int) -> dict[str, Any]:
    """Its parameters for these groups per batch and rollouts per group."""
    return {"groups": groups, "n": n, "gen_groups": 3 * groups}
