"""A rule of your own: a judge that keeps a group as soon as it has two successes and two failures.

A rule is a frozen value derived from the base class of its slot, so that a recipe with it can be compared, printed and found
again in a checkpoint. The conformance kit puts it through the laws of the protocol. Run it:

    python examples/new_judge.py
"""

from dataclasses import dataclass

from rollalloc import recipes
from rollalloc.core.group import GroupView
from rollalloc.core.rule import Act, JudgeRule, Verdict, View
from rollalloc.testing import check_recipe


@dataclass(frozen=True, slots=True)
class SomeOfEach(JudgeRule):
    """Train on a group with at least `least` successes and as many failures; drop it when it ends without.

    Attributes:
        least: at least 1.
    """

    least: int

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        wins = int((group.metrics_G > 0.5).sum())
        if min(wins, group.metrics_G.size - wins) >= self.least:
            return Verdict(Act.TRAIN)  # whatever still runs is cancelled
        return None if group.unfinished else Verdict(Act.DROP, "out_of_band/one_sided")


recipe = recipes.dapo(groups=4, n=8, gen_groups=12).replace(judge=SomeOfEach(least=2))

if __name__ == "__main__":
    check_recipe(recipe)
    print("the recipe keeps every law:", recipe.stages[0].judge)
