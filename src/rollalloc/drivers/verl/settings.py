"""`trainer.v1.rollalloc` in verl's configuration: the recipe, its parameters, and a few settings of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any

from rollalloc.core.recipe import Recipe, at_least, refuse_unmeasured
from rollalloc.drivers.verl.modes import Overlap
from rollalloc.named import in_shape, parameters_of, refuse_unknown
from rollalloc.recipes import grpo
from rollalloc.rules.advantages import GRPO, settled
from rollalloc.rules.prompts import AsOffered, Shuffled

SECTION = "trainer.v1.rollalloc"
VERLS_GRPO = GRPO(ddof=1, eps=1e-6)  # what verl's own estimator of that name computes
_VERL_KEYS = {"groups": "data.train_batch_size", "n": "actor_rollout_ref.rollout.n"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the section says.

    Attributes:
        recipe: which prompts get how many rollouts, and which are trained on.
        seed: of the core's draws.
        max_rollouts: rollouts to pay at most in the whole run; None: no limit.
        reward_timeout: seconds in which a rollout must be scored; then it has failed.
        tool_timeout: seconds that an agent loop may take before each turn of the model, as for a tool; then it has failed.
        poll_interval: seconds for which results are collected before the core is asked again.
        rollout_correction: where rows may be older than the weights, correct for it by verl's truncated importance weights
            unless those are configured otherwise.
        features: file of features of the prompts (`rollalloc features`), for a recipe that predicts; None: none.
        notices: say in the log when most of the last rollouts taught nothing.

    Raises:
        ValueError: a value of another kind, or out of its range; or no such file.
    """

    recipe: Recipe
    seed: int = 0
    max_rollouts: int | None = None
    reward_timeout: float = 300.0
    tool_timeout: float = 300.0
    poll_interval: float = 0.02
    rollout_correction: bool = True
    features: str | None = None
    notices: bool = True

    def __post_init__(self) -> None:
        at_least(f"{SECTION}.seed", self.seed, 0)
        if self.max_rollouts is not None:
            at_least(f"{SECTION}.max_rollouts", self.max_rollouts, 1, "null: no limit")
        for name in ("reward_timeout", "tool_timeout"):
            seconds = getattr(self, name)
            if not (_is_number(seconds) and 0 < seconds < inf):
                raise ValueError(f"{SECTION}.{name} must be a number of seconds above 0, got {seconds!r}")
        if not (_is_number(self.poll_interval) and 0 <= self.poll_interval <= 1):
            raise ValueError(f"{SECTION}.poll_interval must be in [0, 1] seconds, got {self.poll_interval!r}")
        for name in ("rollout_correction", "notices"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{SECTION}.{name} must be true or false, got {getattr(self, name)!r}")
        if self.features is not None and not (isinstance(self.features, str) and Path(self.features).is_file()):
            raise ValueError(
                f"{SECTION}.features must be a file, got {self.features!r}; `rollalloc features --model MODEL --prompts "
                "FILES --out FILE.safetensors` makes one"
            )

    @property
    def loader_draws(self) -> bool:
        """Whether verl's own loader says which prompt is next."""
        return isinstance(self.recipe.prompts, AsOffered)

    @property
    def own_advantages(self) -> bool:
        """Whether advantages are the core's; plain GRPO's are left to verl's estimator, where no row comes again.

        One that does has the advantage of its own batch, which verl's estimator would not find in another.
        """
        recipe = self.recipe
        plain = recipe.advantage == grpo(1, 1).advantage and recipe.over_batch is None
        return not plain or recipe.replay is not None

    @property
    def stops(self) -> bool:
        """Whether rollouts may be stopped while they generate."""
        return bool(self.recipe.stopping)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def read_settings(section: Mapping[str, Any], groups: int, n: int, overlap: Overlap | None = None) -> Settings:
    """The settings that verl's configuration holds.

    `groups` and `n` of a recipe are verl's own `data.train_batch_size` and `actor_rollout_ref.rollout.n`; the sizes of
    stages that the section does not say follow from `n` (`recipes.shapes.sizes_for`). A prompt rule
    that only shuffles is replaced by the order of verl's loader. Advantages that leave the deviation open get verl's.

    Args:
        section: `trainer.v1.rollalloc` as a dictionary: `recipe`, its parameters, and the fields of `Settings`. A recipe
            is a name, `module:object` (which runs that module's code), or several joined by "+", which are mixed.
        groups: verl's prompts in a batch.
        n: verl's rollouts per prompt.
        overlap: of an asynchronous mode; None: nothing runs during an update.

    Raises:
        ValueError: a key or a value that is wrong, naming the right one.
    """
    given = dict(section)
    name = given.pop("recipe", None)
    if not isinstance(name, str):
        raise ValueError(f"{SECTION}.recipe must be a name, module:object, or names joined by '+', got {name!r}")
    for parameter, key in _VERL_KEYS.items():
        if parameter in given:
            raise ValueError(f"{SECTION}.{parameter} is verl's own {key}; set it there")
    own = {field.name: given.pop(field.name) for field in fields(Settings) if field.name in given}
    known = parameters_of(name)
    takes = [parameter for parameter in known if parameter not in _VERL_KEYS]
    refuse_unknown(name, given, dict.fromkeys([*takes, *[field.name for field in fields(Settings)][1:]]))
    recipe = in_shape(name, given, groups, n, trained=False)
    if recipe.groups != groups:
        raise ValueError(
            f"{name} trains on {recipe.groups} groups per batch and {_VERL_KEYS['groups']} is {groups}; make them equal"
        )
    refuse_unmeasured(recipe, "verl")
    settings = Settings(recipe=recipe if overlap is None else overlap.of(recipe), **own)
    recipe = settings.recipe
    if settings.own_advantages:
        recipe = replace(recipe, advantage=settled(recipe.advantage, VERLS_GRPO))
    if recipe.prompts == Shuffled():
        recipe = replace(recipe, prompts=AsOffered())
    if settings.max_rollouts is not None:
        recipe = replace(recipe, budget=replace(recipe.budget, run_rollouts=settings.max_rollouts))
    return replace(settings, recipe=recipe)
