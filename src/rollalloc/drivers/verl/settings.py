"""The section `trainer.v1.rollalloc` of verl's configuration: the recipe, its parameters, and settings of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any

from rollalloc.core.recipe import Recipe, at_least
from rollalloc.drivers.verl.modes import Overlap
from rollalloc.drivers.verl.scores import ACC
from rollalloc.named import in_shape, parameters_of, refuse_unknown
from rollalloc.recipes import grpo
from rollalloc.rules.advantages import GRPO, settled
from rollalloc.rules.prompts import AsOffered, Shuffled

SECTION = "trainer.v1.rollalloc"
WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")  # estimators of verl that do not compare rollouts of a group
VERLS_GRPO = GRPO(ddof=1, eps=1e-6)  # the standard deviation of verl's estimator "grpo"
_VERL_KEYS = {"groups": "data.train_batch_size", "n": "actor_rollout_ref.rollout.n"}


@dataclass(frozen=True, kw_only=True)
class VerlSettings:
    """The settings in this section.

    Attributes:
        recipe: the recipe.
        seed: seed of the core's random numbers, at least 0.
        max_rollouts: maximum number of rollouts in the whole run, at least 1. None: no limit.
        reward_timeout: seconds for scoring a rollout, above 0. A rollout that takes longer has failed.
        tool_timeout: seconds that an agent loop may spend before each turn of the model, for example in a tool, above 0. A
            rollout that takes longer has failed.
        poll_interval: seconds for which results are collected before the core is asked again, in [0, 1].
        rollout_correction: True: turn on verl's truncated importance weights for recipes that train on older rows. A
            correction that verl's own configuration sets is kept.
        features: file of the prompts' features (`rollalloc features`), for a recipe that predicts success. None: no
            features.
        metric: name of the metric in the result of the reward function. "acc": if the result has no such field, the metric
            is the score.
        notices: True: warn when most of the recent rollouts had no effect on training.

    Raises:
        ValueError: a value has the wrong type or is out of range, or the file of features does not exist.
    """

    recipe: Recipe
    seed: int = 0
    max_rollouts: int | None = None
    reward_timeout: float = 300.0
    tool_timeout: float = 300.0
    poll_interval: float = 0.02
    rollout_correction: bool = True
    features: str | None = None
    metric: str = ACC
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
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"{SECTION}.metric must be the name of a field of the reward, got {self.metric!r}")
        if self.features is not None and not (isinstance(self.features, str) and Path(self.features).is_file()):
            raise ValueError(
                f"{SECTION}.features must be the path of a file, got {self.features!r}; `rollalloc features --model MODEL "
                "--prompts FILES --out FILE.safetensors` writes one"
            )

    @property
    def loader_draws(self) -> bool:
        """Whether verl's own loader decides the order of the prompts."""
        return isinstance(self.recipe.prompts, AsOffered)

    @property
    def own_advantages(self) -> bool:
        """Whether the core computes the advantages. For plain GRPO without replay, verl's estimator computes them.

        With replay, a later batch has a replayed row without the other rows of its group, so that verl's estimator could not
        compute its advantage. A replayed row keeps the advantage of its first batch.
        """
        recipe = self.recipe
        plain = recipe.advantage == grpo().advantage and recipe.over_batch is None
        return not plain or recipe.replay is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def read_settings(section: Mapping[str, Any], groups: int, n: int, overlap: Overlap | None = None) -> VerlSettings:
    """Read the settings from verl's configuration.

    A recipe's parameters `groups` and `n` are verl's `data.train_batch_size` and `actor_rollout_ref.rollout.n`. Stage sizes
    that the section does not set follow from `n` (the recipe function's `shape`). If the recipe's prompt rule is `Shuffled`,
    verl's loader decides the order instead. If the recipe's advantage rule uses the kernel `grpo`, `VERLS_GRPO`
    replaces this kernel.

    Args:
        section: `trainer.v1.rollalloc` as a dictionary: `recipe`, its parameters, and the fields of `VerlSettings`. `recipe`
            is a name, or `module:object`, or several of these joined by "+". The module is imported, so its code runs.
        groups: verl's number of prompts per batch.
        n: verl's number of rollouts per prompt.
        overlap: how an asynchronous mode overlaps rollouts with updates. None: no rollout runs during an update.

    Raises:
        ValueError: a key is unknown or a value is wrong. The message says what is allowed.
    """
    values = dict(section)
    name = values.pop("recipe", None)
    if not isinstance(name, str):
        raise ValueError(f"{SECTION}.recipe must be a name, module:object, or names joined by '+', got {name!r}")
    for parameter, key in _VERL_KEYS.items():
        if parameter in values:
            raise ValueError(f"{SECTION}.{parameter} is set by verl's {key}; remove it here and set {key}")
    own = {field.name: values.pop(field.name) for field in fields(VerlSettings) if field.name in values}
    accepted = [parameter for parameter in parameters_of(name) if parameter not in _VERL_KEYS]
    refuse_unknown(name, values, dict.fromkeys([*accepted, *[field.name for field in fields(VerlSettings)][1:]]))
    recipe = in_shape(name, values, rows=groups * n, group_rows=n, groups=groups, n=n)
    if recipe.groups != groups:
        raise ValueError(
            f"{name} trains on {recipe.groups} groups per batch and {_VERL_KEYS['groups']} is {groups}; make them equal"
        )
    settings = VerlSettings(recipe=recipe if overlap is None else overlap.of(recipe), **own)
    recipe = settings.recipe
    if settings.own_advantages:
        recipe = replace(recipe, advantage=settled(recipe.advantage, VERLS_GRPO))
    if recipe.prompts == Shuffled():
        recipe = replace(recipe, prompts=AsOffered())
    if settings.max_rollouts is not None:
        recipe = replace(recipe, budget=replace(recipe.budget, run_rollouts=settings.max_rollouts))
    return replace(settings, recipe=recipe)
