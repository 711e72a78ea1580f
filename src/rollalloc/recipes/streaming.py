"""Adapt a recipe to an engine that trains on a batch while other rollouts are running."""

from __future__ import annotations

from dataclasses import replace

from rollalloc.core.recipe import Recipe, at_least
from rollalloc.recipes.pilot_commit import EveryRound
from rollalloc.rules.intake import Ahead, Fill
from rollalloc.rules.promote import Oldest


def streamed(recipe: Recipe, *, staleness: int | None = None, ahead: int | None = None) -> Recipe:
    """Return the recipe adapted to streaming rollouts: it opens groups earlier and does not wait for a whole stage.

    Some promote rules wait until all groups of a stage have ended, for example "highest variance first". If staleness is
    allowed, `Oldest` replaces such a rule, unless the user chose the rule.

    Args:
        recipe: any recipe. Without staleness, the recipe is unchanged: generation and training cannot overlap.
        staleness: replaces the recipe's `max_staleness`. None: the recipe's own value, or the following minimum if that is
            larger: 1 if `ahead` is 1, and 2 · ahead if `ahead` is more. A batch consists of the groups that ended first,
            so with less staleness, groups with long rollouts would become too old.
        ahead: number of batches that are generated while a batch is trained, at least 1; no effect without staleness.
            None: the recipe's own number, which is 1 for most recipes and 2 for Pilot-Commit.

    Raises:
        ValueError: a number is out of its range, or `ahead` is larger than the staleness.
    """
    if ahead is not None:
        at_least("ahead", ahead, 1, "with staleness 0 no batch can be generated ahead")
    if staleness is None:
        wanted = 0 if ahead is None else 1 if ahead == 1 else 2 * ahead
        staleness = max(recipe.max_staleness, wanted)
    at_least("staleness", staleness, 0)
    if ahead is not None and ahead > staleness:
        raise ValueError(
            f"ahead={ahead}: a batch would be trained up to {ahead} updates after its generation began, but staleness "
            f"allows only {staleness}; use staleness={ahead} or more, or ahead={staleness} at most"
        )
    if staleness == 0:
        return replace(recipe, max_staleness=0)
    stages = [replace(each, promote=Oldest()) if each.promote.traits.in_waves else each for each in recipe.stages]
    more = 0 if ahead is None else ahead - 1 - recipe.intake.traits.looks_ahead
    intake = Ahead(recipe.intake, more * recipe.groups) if more > 0 else recipe.intake
    return replace(recipe, stages=tuple(stages), intake=intake, max_staleness=staleness)


def streaming_notes(recipe: Recipe, made: Recipe) -> list[str]:
    """Return notes for the user about the changes that `streamed` made to a recipe. Notes do not end with a full stop."""
    if made.max_staleness == 0:
        return [
            "the newest weights sample all rollouts, so generation and training do not overlap; use staleness 1 for overlap"
        ]
    notes: list[str] = []
    for before, after in zip(recipe.stages, made.stages, strict=True):
        if before.promote != after.promote:
            notes.append(
                f"rollouts stream, so the oldest of the prompts that passed the {before.name} stage go on first; "
                "promote=top_variance would wait for the whole stage"
            )
    if isinstance(recipe.intake, EveryRound):
        notes.append(
            "pilots=every_round begins a round only after the last round, so generation and training hardly overlap; use "
            "pilots=as_needed to stream"
        )
    if made.max_staleness > 1 and made.replay is None and isinstance(made.intake, Fill):
        notes.append(
            f"staleness {made.max_staleness} is more than this run can use: only one batch is generated ahead, so no "
            f"rollout is more than 1 update old; set ahead=2 to generate more"
        )
    if isinstance(made.intake, Ahead):
        ahead = 1 + recipe.intake.traits.looks_ahead + made.intake.groups // made.groups
        if made.max_staleness < 2 * ahead:
            notes.append(
                f"staleness {made.max_staleness} is less than twice the {ahead} batches that are generated ahead, so groups "
                f"with long rollouts may become too old and be dropped; staleness={2 * ahead} keeps them"
            )
    return notes
