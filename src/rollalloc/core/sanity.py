"""Find recipes that can never teach, and settings that were probably not meant, before the first rollout."""

from __future__ import annotations

from itertools import accumulate

from rollalloc.core.recipe import Recipe
from rollalloc.core.rule import AdvantageTraits, SizeTraits, called


def refuse_unteachable(recipe: Recipe) -> None:
    """Raise a ValueError if the recipe can never teach, see `unteachable`."""
    if why := unteachable(recipe):
        raise ValueError(why)


def doubts(recipe: Recipe) -> list[str]:
    """What the user may not have meant, for drivers to log before the run, such as a window that no group can hit."""
    rollouts_S = _most_rollouts(recipe)
    return [
        doubt
        for stage, rollouts in zip(recipe.stages, rollouts_S, strict=True)
        for doubt in stage.judge.doubts(rollouts)
    ]


def unteachable(recipe: Recipe) -> str | None:
    """The reason why every advantage would be 0, or why no group could ever be trained on; None if neither is known.

    Only what the rules declare in their traits is known: the sizes, the rows and what the advantages compare.
    """
    rollouts_S = _most_rollouts(recipe)
    for stage, rollouts in zip(recipe.stages, rollouts_S, strict=True):
        needed = stage.judge.traits.least_scored
        if rollouts is not None and rollouts < needed:
            return (
                f"{called(stage.judge)} lets a group pass only if it has at least {needed} scored rollouts, but after the "
                f"stage {stage.name!r} it has {rollouts} at most; generate more rollouts"
            )
    rows = min((most for most in (recipe.group_rows, rollouts_S[-1]) if most is not None), default=None)
    compared = {"group": rollouts_S[-1], "chosen": rows, "batch": None if rows is None else rows * recipe.groups}
    for rule in (recipe.advantage, recipe.over_batch):
        if rule is None:
            continue
        traits = rule.traits
        if not isinstance(traits, AdvantageTraits) or traits.compares is None:
            continue
        if rule is recipe.advantage and not _keeps_zeros(recipe):
            continue
        if traits.or_baseline and recipe.prompts.traits.gives_baseline is not False:
            continue
        if compared[traits.compares] == 1:
            alone = "group" if traits.compares == "chosen" and rollouts_S[-1] == 1 else traits.compares
            return f"{called(rule)} {_ALONE[alone]}"
    return None


_ALONE = {
    "group": "compares the rollouts of a prompt, but the recipe generates one rollout of each, so every advantage would be "
    "0; use reinforce for one rollout per prompt, or generate at least 2",
    "chosen": "compares the rows of a prompt, but the recipe trains on one row of each, so every advantage would be 0; "
    "train on at least 2 rows of each prompt",
    "batch": "compares the rows of a batch, but a batch has one row, so every advantage would be 0; train on more groups",
}


def _most_rollouts(recipe: Recipe) -> list[int | None]:
    """The largest number of rollouts of a group after each stage; None if a size rule does not declare it."""
    sizes = [stage.size.traits for stage in recipe.stages]
    most_S = [traits.most if isinstance(traits, SizeTraits) else None for traits in sizes]
    return list(accumulate(most_S, lambda before, most: None if before is None or most is None else before + most))


def _keeps_zeros(recipe: Recipe) -> bool:
    """Whether advantages of 0 are known to stay 0 over the batch. A batch rule without this trait may use the rewards."""
    rule = recipe.over_batch
    return rule is None or (isinstance(rule.traits, AdvantageTraits) and rule.traits.compares is not None)
