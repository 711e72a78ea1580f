"""verl's three V1 trainer modes under our names, and what an asynchronous one makes of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor, inf
from typing import Any

from rollalloc.core.recipe import Recipe
from rollalloc.recipes.streaming import streamed
from rollalloc.rules.intake import Ahead

MODES = {  # ours -> verl's own
    "rollalloc": "sync",
    "rollalloc_colocate_async": "colocate_async",
    "rollalloc_separate_async": "separate_async",
}
_THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"


def verls_mode(name: str) -> str:
    """verl's mode that one of ours goes by.

    Raises:
        ValueError: it is none of ours.
    """
    if name not in MODES:
        raise ValueError(f"trainer.v1.trainer_mode must be one of {', '.join(MODES)}, got {name!r}")
    return MODES[name]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What verl's own keys say of a mode in which rollouts go on over an update.

    Attributes:
        mode: verl's.
        max_versions: versions of the weights that a trajectory may span, of which the batch's own is one
            (`trainer.v1.sampler.max_off_policy_threshold`).
        batches: batches of prompts that are generated beside the one in the making (`num_warmup_batches` of the mode).
    """

    mode: str
    max_versions: Any
    batches: Any

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with rollouts that are trained after later updates, and groups for the next batches.

        What a recipe says of either itself, as Pilot-Commit does, holds.

        Raises:
            ValueError: verl's keys leave no update between a rollout and its batch, or no limit.
        """
        recipe = streamed(recipe, staleness=recipe.max_staleness or self._max_staleness())
        ahead = floor(self._batches() * recipe.groups)
        if ahead == 0 or recipe.intake.traits.looks_ahead:
            return recipe
        return replace(recipe, intake=Ahead(recipe.intake, ahead))

    def _max_staleness(self) -> int:
        versions = self.max_versions
        if type(versions) is not int or versions < 2:
            raise ValueError(
                f"{_THRESHOLD} must be a whole number of at least 2 where the recipe has no max_staleness of its own and "
                f"rollouts go on over an update, got {versions!r}; or use trainer_mode=rollalloc"
            )
        return versions - 1

    def _batches(self) -> float:
        batches = self.batches
        if type(batches) not in (int, float) or not 0 <= batches < inf:
            raise ValueError(
                f"trainer.v1.{self.mode}.num_warmup_batches must be a number of 0 or more, got {batches!r}"
            )
        return float(batches)
