"""A recipe as an engine carries it out that trains a batch while rollouts go on."""

from __future__ import annotations

from dataclasses import replace
from logging import Logger

from rollalloc.core.recipe import Recipe, at_least
from rollalloc.recipes.pilot_commit import EveryRound
from rollalloc.rules.intake import Ahead, Fill
from rollalloc.rules.promote import Oldest


def streamed(recipe: Recipe, *, staleness: int | None = None, ahead: int | None = None) -> Recipe:
    """The recipe for rollouts that stream: opened further ahead, and without a wait for the last of a stage.

    Where it allows staleness, a promote rule that suits waves only, and that nobody asked for (`in_waves` of its traits),
    gives way to the oldest first: highest variance first would keep every pilot waiting for the last of them.

    Args:
        recipe: any; under one without staleness nothing overlaps, and it stays what it is.
        staleness: instead of its `max_staleness`; None: that, or what `ahead` wants where it is more: 1 for one batch, twice
            as much as `ahead` for several, since a batch is made of the groups that ended first, and what is too old when
            its turn comes is dropped, which with less befalls groups with long rollouts.
        ahead: batches that are generated while one is trained, at least; 1 is what most recipes do where staleness is
            allowed, and Pilot-Commit opens 2. None: as many as the recipe does.

    Raises:
        ValueError: a number out of its range, or an `ahead` beyond the staleness.
    """
    if ahead is not None:
        at_least("ahead", ahead, 1, "nothing is ahead where staleness is 0")
    if staleness is None:
        wanted = 0 if ahead is None else 1 if ahead == 1 else 2 * ahead
        staleness = max(recipe.max_staleness, wanted)
    at_least("staleness", staleness, 0)
    if ahead is not None and ahead > staleness:
        raise ValueError(
            f"ahead={ahead}: the last of so many batches is trained {ahead} updates after it was begun, and staleness "
            f"allows {staleness}; give staleness={ahead} or more, or ahead={staleness} at most"
        )
    if staleness == 0:
        return replace(recipe, max_staleness=0)
    stages = [replace(each, promote=Oldest()) if each.promote.traits.in_waves else each for each in recipe.stages]
    more = 0 if ahead is None else ahead - 1 - recipe.intake.traits.looks_ahead
    intake = Ahead(recipe.intake, more * recipe.groups) if more > 0 else recipe.intake
    return replace(recipe, stages=tuple(stages), intake=intake, max_staleness=staleness)


def streaming_notes(recipe: Recipe, made: Recipe) -> list[str]:
    """What to say of a recipe and of what `streamed` made of it, each a sentence without a stop."""
    if made.max_staleness == 0:
        return ["the recipe trains on the newest weights only, so nothing overlaps; staleness 1 allows it"]
    notes: list[str] = []
    for before, after in zip(recipe.stages, made.stages, strict=True):
        if before.promote != after.promote:
            notes.append(
                f"rollouts stream, so of the prompts that passed the {before.name}s the oldest go on first; "
                "promote=top_variance waits for all of them"
            )
    if isinstance(recipe.intake, EveryRound):
        notes.append(
            "pilots=every_round begins a round when the last one is over, so that little overlaps; pilots=as_needed streams"
        )
    if made.max_staleness > 1 and made.replay is None and isinstance(made.intake, Fill):
        notes.append(
            f"staleness {made.max_staleness} cannot be used: one batch is opened beyond the one that trains, so that no "
            f"rollout is more than 1 update old; to open more, give ahead=2"
        )
    return notes


def streamed_aloud(recipe: Recipe, log: Logger, *, ahead: int | None) -> Recipe:
    """As `streamed`, with its notes in a driver's log."""
    made = streamed(recipe, ahead=ahead)
    for note in streaming_notes(recipe, made):
        log.info(note)
    return made
