"""Presets of built-in tasks: target, budget, evaluation grid, and the tuned settings for each recipe.

The settings are in `tuned/TASK.json`. A search by successive halving found them (dev/LOG.md, 2026-11-22 and 23). For every
recipe, GRPO included, it tried the same number of learning rates and batch shapes on the same tuning seeds. No comparison
uses these seeds. `settings_tried` is the number of settings of a recipe's grid that were tried. If `budget` is present, the
recipe's search runs were censored earlier than those of other recipes. A task without a search uses another task's settings.
A recipe without a search on a task uses its settings for skills/late.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollalloc.lab.bench.rungs import PREFIX as LADDER_PREFIX
from rollalloc.lab.bench.rungs import RUNGS
from rollalloc.lab.bench.tasks import gym, ladder, skills, sort, walks
from rollalloc.lab.bench.tasks.files import Shown, TaskFiles, unseen
from rollalloc.models.dtypes import Precision
from rollalloc.named import near
from rollalloc.train.config import Config

DEFAULT_RATE = 6e-4  # learning rate of every recipe, if no other was set or tuned
# The optimizer that was the default when the settings in `tuned/` were found.
TUNED_WITH: Mapping[str, Any] = MappingProxyType({"betas": (0.9, 0.999), "averaging": 0})
DEFAULT_OPTIMIZER: Mapping[str, Any] = MappingProxyType({name: getattr(Config, name) for name in TUNED_WITH})


@dataclass(frozen=True, slots=True)
class Tuned:
    """A recipe's parameters, learning rate and optimizer on a task. `optimizer` has fields of `Config`."""

    parameters: Mapping[str, Any]
    learning_rate: float
    optimizer: Mapping[str, Any] = field(default_factory=lambda: TUNED_WITH)


@dataclass(frozen=True, slots=True)
class Preset:
    """A task's target and budget.

    Attributes:
        target: held-out accuracy to reach. For skills/graded, it is a mean score.
        max_rollouts: number of rollouts after which a run is censored.
        eval_every: number of rollouts between two points of the evaluation grid.
        eval_samples: number of samples per held-out prompt, for tasks with more than one right answer.
        tuned_on: name of the task whose tuned settings are used.
        rate: learning rate of every recipe, unless it is set or tuned.
        precision: precision of updates and exact evaluations.
    """

    target: float
    max_rollouts: int
    eval_every: int
    eval_samples: int = 4
    tuned_on: str = "skills/late"
    rate: float = DEFAULT_RATE
    precision: Precision = "auto"


POOLED = ("skills", "walks")  # tasks with several pools of prompts; if none is named, the pool is "late"
PRESETS = {
    "skills/balanced": Preset(0.80, 40_000, 1000),
    "skills/mixed": Preset(0.80, 60_000, 1000),
    "skills/late": Preset(0.85, 60_000, 1000),
    "skills/graded": Preset(0.93, 40_000, 500, tuned_on="skills/graded"),
    "walks/mixed": Preset(0.70, 40_000, 1000, eval_samples=8, tuned_on="walks/mixed"),
    "walks/late": Preset(0.75, 40_000, 1000, eval_samples=8, tuned_on="walks/mixed"),
    "walks/long": Preset(0.70, 40_000, 1000, eval_samples=8, tuned_on="walks/mixed"),
    "walks/brief": Preset(0.70, 40_000, 1000, eval_samples=8, tuned_on="walks/mixed"),
    "sort": Preset(0.60, 40_000, 1000),
    "rg/gcd": Preset(0.55, 20_000, 250),
    "rg/number_filtering_misled": Preset(0.58, 20_000, 250, tuned_on="rg/number_filtering_misled"),
    "rg/letter_counting": Preset(0.79, 20_000, 250),
    "rg/spell_backward": Preset(0.60, 20_000, 250),
    "rg/count_bits": Preset(0.59, 20_000, 250),
    "rg/simple_equations": Preset(0.64, 20_000, 250),  # the target is half-way between the initial accuracy and pass@8
    "ladder/0.15m": Preset(0.70, 6_000, 500),
    "ladder/1m": Preset(0.70, 6_000, 500),
    "ladder/8m": Preset(0.70, 4_096, 512, rate=3e-4, precision="bf16"),
    "ladder/135m": Preset(0.50, 1_024, 256, rate=2e-5, precision="bf16"),
}
_SWEPT_FOR_ALL = "skills/late"  # every recipe was tuned on this task, so all other tasks fall back to its settings


def preset_of(task: str) -> tuple[str, Preset]:
    """The preset of a task, by name.

    Raises:
        ValueError: no such task or pool.
    """
    name = f"{task}/late" if task in POOLED else task
    if name not in PRESETS:
        raise ValueError(f"unknown task {name!r}{near(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return name, PRESETS[name]


@lru_cache
def tuned_of(task: str) -> Mapping[str, Tuned]:
    """The tuned settings of each recipe on a task: those found for the task, or else those for `skills/late`."""
    recipes: dict[str, Any] = {}
    for name in dict.fromkeys((_SWEPT_FOR_ALL, task)):
        file = files("rollalloc.lab.bench") / "tuned" / f"{name.replace('/', '-')}.json"
        recipes |= json.loads(file.read_text(encoding="utf-8"))["recipes"]
    return {recipe: Tuned(entry["parameters"], entry["learning_rate"]) for recipe, entry in recipes.items()}


def fields_of(task: TaskFiles) -> dict[str, Any]:
    """A task's files as fields of a configuration."""
    return {
        "model": str(task.model),
        "prompts": (str(task.train),),
        "heldout": str(task.heldout),
        "reward": task.reward,
        "single_answer": task.single_answer,
        "reward_workers": 0,
        "device": task.device,
    }


def task_files(name: str, folder: Path, shown: Shown = unseen) -> TaskFiles:
    """A task's model, prompts and reward, created in the folder if missing."""
    if name.startswith(gym.PREFIX):
        return gym.prepare(folder / name.replace("/", "-"), name, progress=shown)
    if name.startswith(LADDER_PREFIX):
        return ladder.prepare(folder / "ladder", RUNGS[name.removeprefix(LADDER_PREFIX)], progress=shown)
    pooled, _, pool = name.partition("/")
    if pooled in POOLED:
        return {"skills": skills, "walks": walks}[pooled].prepare(folder / pooled, pool, progress=shown)
    return sort.prepare(folder / "sort", progress=shown)


def task_run(task: str, recipe: str, seed: int, folder: Path, *, tuned: Tuned | None = None, **changes: Any) -> Config:
    """A run of a recipe on a task, with its preset.

    Args:
        task: "skills", "walks", "sort", "skills/POOL", "walks/POOL", "ladder/RUNG" or a name of `PRESETS`.
        folder: where tasks are kept.
        tuned: settings to use instead of the preset's.
        changes: trainer settings to change.

    Raises:
        ValueError: for the same reasons as in `planned_run`.
    """
    return with_task_files(planned_run(task, recipe, seed, tuned=tuned, **changes), folder)


def planned_run(task: str, recipe: str, seed: int, *, tuned: Tuned | None = None, **changes: Any) -> Config:
    """Like `task_run`, but nothing is created yet. `with_task_files` adds the model and the prompts to the run.

    Raises:
        ValueError: the task is unknown, or `tuned` is None and the recipe has no tuned settings for the task.
        ImportError: a package that the task needs is not installed.
    """
    name, preset = preset_of(task)
    if name.startswith(gym.PREFIX):
        gym.installed()  # check this before anything is created
    known = tuned_of(preset.tuned_on)
    chosen = tuned or known.get(recipe)
    if chosen is None:
        raise ValueError(
            f"{recipe} has no tuned settings for {name}; give its settings. Recipes with tuned settings: {', '.join(known)}"
        )
    settings: dict[str, Any] = {
        **chosen.optimizer,
        "learning_rate": chosen.learning_rate,
        "max_rollouts": preset.max_rollouts,
        "target": preset.target,
        "eval_every": preset.eval_every,
        "eval_samples": preset.eval_samples,
        "precision": preset.precision,
    }
    return Config(
        recipe=recipe,
        parameters=dict(chosen.parameters),
        task=name,
        seed=seed,
        **settings | changes,
    )


def with_task_files(run: Config, folder: Path, shown: Shown = unseen) -> Config:
    """Add the files of its task to a planned run, and create them if they are missing. A run on other data is returned
    unchanged.

    Raises:
        ValueError: a folder does not belong to a task, or was created with other settings.
    """
    if run.model:
        return run
    task = task_files(run.task, folder, shown)
    return replace(run, sampling=replace(run.sampling, max_new_tokens=task.max_new_tokens), **fields_of(task))
