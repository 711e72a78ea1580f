"""Our names for verl's three V1 trainer modes, and the changes that an asynchronous mode makes to a recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, inf
from typing import Any

from rollalloc.core.recipe import Recipe
from rollalloc.recipes.streaming import streamed
from rollalloc.rules.intake import Ahead

MODES = {  # our name: verl's name
    "rollalloc": "sync",
    "rollalloc_colocate_async": "colocate_async",
    "rollalloc_separate_async": "separate_async",
}
_THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
_STRATEGY = "trainer.v1.sampler.max_off_policy_strategy"


def verls_mode(name: str) -> str:
    """verl's name for one of our modes.

    Raises:
        ValueError: the name is not the name of a mode of rollalloc.
    """
    if name not in MODES:
        raise ValueError(f"trainer.v1.trainer_mode must be one of {', '.join(MODES)}, got {name!r}")
    return MODES[name]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """verl's settings for a mode in which rollouts continue during updates.

    Attributes:
        mode: verl's name of the mode.
        max_versions: maximum number of versions of the weights from a trajectory's first token to the batch that contains
            the trajectory, counting both ends (`trainer.v1.sampler.max_off_policy_threshold`).
        batches: number of batches to generate ahead, in addition to the next batch (`num_warmup_batches` of the mode).
        strategy: what happens to groups that get too old (`trainer.v1.sampler.max_off_policy_strategy`): "drop" drops them,
            "wait" delays the update until they have ended.
    """

    mode: str
    max_versions: Any
    batches: Any
    strategy: Any = "drop"

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe, changed to allow older rollouts in a batch, and to order groups for later batches.

        If the recipe itself sets `max_staleness`, this limit is kept. If the recipe already orders groups for later batches,
        as Pilot-Commit does, its rule is kept.

        Raises:
            ValueError: neither the recipe nor verl's settings limit the age of rollouts, or the limit allows no update; or
                `num_warmup_batches` is not a number of 0 or more.
        """
        recipe = streamed(recipe, staleness=recipe.max_staleness or self._max_staleness())
        ahead = floor(self._batches() * recipe.groups)
        if ahead == 0 or recipe.intake.traits.looks_ahead:
            return recipe
        return replace(recipe, intake=Ahead(recipe.intake, ahead))

    def patience(self, recipe: Recipe) -> int | None:
        """The minimum age, in updates, of a running group that delays the next update. None: no update is delayed.

            patience = max_staleness - ceil(batches ahead)

        An update waits for a group of this age. While it waits, only groups of the batches ahead can reach this age. The
        oldest groups are trained on first, so no group gets older than `max_staleness`.

        Args:
            recipe: the recipe that `of` returned.

        Raises:
            ValueError: the strategy is unknown; or the limit is too low for waiting and overlap at the same time.
        """
        if self.strategy == "drop":
            return None
        if self.strategy != "wait":
            raise ValueError(f"{_STRATEGY} must be drop or wait, got {self.strategy!r}")
        ahead = max(1, ceil(self._batches()))
        if recipe.max_staleness <= ahead:
            raise ValueError(
                f"{_STRATEGY}=wait with {ahead} batches generated ahead needs max_staleness of at least {ahead + 1}, got "
                f"{recipe.max_staleness}; set {_THRESHOLD} to at least {ahead + 2} (or, if the recipe sets max_staleness "
                f"itself, raise it there), generate fewer batches ahead, or set {_STRATEGY}=drop"
            )
        return recipe.max_staleness - ahead

    def _max_staleness(self) -> int:
        versions = self.max_versions
        if type(versions) is not int or versions < 2:
            raise ValueError(
                f"{_THRESHOLD} must be a whole number of at least 2 if the recipe has no max_staleness of its own and "
                f"rollouts continue during an update, got {versions!r}; or use trainer_mode=rollalloc"
            )
        return versions - 1

    def _batches(self) -> float:
        batches = self.batches
        if type(batches) not in (int, float) or not 0 <= batches < inf:
            raise ValueError(
                f"trainer.v1.{self.mode}.num_warmup_batches must be a number of 0 or more, got {batches!r}"
            )
        return float(batches)
