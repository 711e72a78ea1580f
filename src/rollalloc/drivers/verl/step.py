"""What one training step of a configuration generates and trains on, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from rollalloc.core.recipe import Recipe
from rollalloc.core.rule import SizeRule
from rollalloc.drivers.verl.minibatches import optimizer_steps
from rollalloc.drivers.verl.modes import MODES
from rollalloc.drivers.verl.settings import SECTION, VerlSettings
from rollalloc.recipes.darts import Redundant
from rollalloc.recipes.pilot_commit import EveryRound
from rollalloc.rules.intake import Ahead, KeepInFlight
from rollalloc.rules.sizes import Fixed


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """One training step of a configuration.

    Attributes:
        recipe: the rules of the recipe.
        prompts: number of groups in a batch.
        n: rollouts per prompt of the command without a recipe, `actor_rollout_ref.rollout.n`.
        rounds: smallest number of rounds of new prompts that can fill a batch.
        stages: for each stage of the recipe: its name, its number of groups in these rounds, and the mean number of
            rollouts of a group. The mean is None if it depends on the rollouts.
        rows: number of rows per group in a batch. None: it varies.
        optimizer_steps: optimizer steps per batch. With a recipe, at most `train_batch_size // ppo_mini_batch_size`.
        mode: verl's name of the trainer mode.
        unchecked: a part that verl could not validate here, and the reason. "": everything was validated.
    """

    recipe: str
    prompts: int
    n: int
    rounds: int
    stages: tuple[tuple[str, int, float | None], ...]
    rows: int | None
    optimizer_steps: float
    mode: str
    unchecked: str = ""

    @property
    def rollouts(self) -> float | None:
        """Rollouts of the step; None if the rollouts decide how many there are."""
        sizes = [size for _, _, size in self.stages]
        return None if None in sizes else sum(groups * size for _, groups, size in self.stages if size is not None)


def planned(config: Any, settings: VerlSettings | None, unchecked: str = "") -> PlannedStep:
    """The training step of a configuration.

    Args:
        config: verl's configuration.
        settings: the settings of our section. None: a command without a recipe.
        unchecked: a part that could not be validated, and the reason.
    """
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mode, mini_batch = str(config.trainer.v1.trainer_mode), config.actor_rollout_ref.actor.ppo_mini_batch_size
    opened = prompts if settings is None else _opened(settings.recipe)
    rounds = ceil(prompts / opened)
    return PlannedStep(
        recipe=f"stock verl, {n} rollouts per prompt" if settings is None else repr(settings.recipe),
        prompts=prompts,
        n=n,
        rounds=rounds,
        stages=(("rollouts", prompts, n),) if settings is None else _stages(settings.recipe, rounds * opened),
        rows=n if settings is None else settings.recipe.rows.traits.rows,
        optimizer_steps=prompts / mini_batch if settings is None else optimizer_steps(prompts // mini_batch, prompts),
        mode=MODES.get(mode, mode),
        unchecked=unchecked,
    )


def _opened(recipe: Recipe) -> int:
    """Number of new groups in a round."""
    intake = recipe.intake.of if isinstance(recipe.intake, Ahead) else recipe.intake
    return intake.groups if isinstance(intake, EveryRound | KeepInFlight) else recipe.groups


def _stages(recipe: Recipe, opened: int) -> tuple[tuple[str, int, float | None], ...]:
    """The groups and rollouts of each stage, for a step in which this number of new groups fills the batch."""
    return tuple(
        (stage.name, recipe.groups if at else opened, _mean_size(stage.size, recipe.group_rows))
        for at, stage in enumerate(recipe.stages)
    )


def _mean_size(size: SizeRule, rows: int | None) -> float | None:
    if isinstance(size, Fixed):
        return size.n
    return size.mean_factor * rows if isinstance(size, Redundant) and rows else None


def described(step: PlannedStep) -> str:
    """Describe an accepted step in words, for the terminal."""
    rows = "as many rows as a group has" if step.rows is None else f"{step.rows} rows each"
    accepted = (
        f"accepted by verl and by rollalloc, mode {step.mode}: {step.prompts} groups per batch, {rows}, "
        f"{step.optimizer_steps:g} optimizer steps per batch"
    )
    unchecked = [f"not checked: {step.unchecked}"] if step.unchecked else []
    return "\n".join([accepted, *cost_of(step), step.recipe, *unchecked])


def cost_of(step: PlannedStep) -> Iterator[str]:
    """The rollouts of a step, and how many more or fewer they are than those of the command without a recipe."""
    stages = [f"{groups} × {'?' if size is None else f'{size:g}'} ({name})" for name, groups, size in step.stages]
    total = "by the recipe" if step.rollouts is None else f"{step.rollouts:,.0f}"
    fill = "one round of prompts fills" if step.rounds == 1 else f"{step.rounds} rounds of prompts fill"
    yield f"rollouts of a step, if {fill} the batch: {total} = {' + '.join(stages)}"
    before = step.prompts * step.n
    if step.rollouts is not None and step.rollouts != before:
        yield (
            f"the same command without a recipe generates {before:,} = {step.prompts:,} × {step.n} "
            f"(actor_rollout_ref.rollout.n): with the recipe, a step generates {step.rollouts / before:.3g} times as many"
        )
    if (passes := step.stages[0][1] / step.prompts) > 1:
        yield (
            f"it tries {step.stages[0][1]:,} prompts for a batch of {step.prompts:,}, so that an epoch of verl goes "
            f"through the data about {passes:.3g} times"
        )
    if step.rounds > 1:
        yield (
            f"{SECTION}.gen_groups={step.stages[0][1] // step.rounds} is below the {step.prompts:,} prompts of a batch, so "
            f"that a batch needs at least {step.rounds} rounds; by default, it is {3 * step.prompts:,}, three batches"
        )
