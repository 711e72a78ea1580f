"""Tasks by name: their target, budget, evaluation grid, and the tuned settings for each recipe.

A family of tasks is made in one way: `skills`, `sort`, those of reasoning-gym. Another distribution adds families by an
entry point of the group `rollalloc.tasks`, a function that returns them. So the laboratory adds `ladder` and `walks`.

The settings are in `tuned/TASK.json`. A search by successive halving found them (log of 2026-11-22 and 23). For every
recipe, GRPO included, it tried the same number of learning rates and batch shapes on the same tuning seeds. No comparison
uses these seeds. `settings_tried` is the number of settings of a recipe's grid that were tried. If `budget` is present, the
recipe's search runs were censored earlier than those of other recipes. A task without a search uses another task's settings.
A recipe without a search on a task uses its settings for skills/late.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollalloc.models.settings import Precision
from rollalloc.named import near
from rollalloc.tasks import gym, skills, sort
from rollalloc.tasks.files import Shown, TaskFiles, unseen
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


@dataclass(frozen=True, slots=True)
class Family:
    """Tasks that are made in one way.

    Attributes:
        presets: the preset of each task, by its name: the family's name, or "FAMILY/TASK".
        prepare: makes a task's files unless they are there. It gets the task's name, the folder where tasks are kept, and a
            function that is told about progress.
        tuned: folder with `TASK.json`, the tuned settings of the tasks that name themselves in `tuned_on`.
        installed: raises an ImportError, which says what to install, if a package that the tasks need is missing.
    """

    presets: Mapping[str, Preset]
    prepare: Callable[[str, Path, Shown], TaskFiles]
    tuned: Traversable = field(default_factory=lambda: files("rollalloc.tasks") / "tuned")
    installed: Callable[[], object] = bool


def _prepare_skills(name: str, folder: Path, shown: Shown) -> TaskFiles:
    return skills.prepare(folder / "skills", name.partition("/")[2], progress=shown)


def _prepare_sort(_: str, folder: Path, shown: Shown) -> TaskFiles:
    return sort.prepare(folder / "sort", progress=shown)


def _prepare_gym(name: str, folder: Path, shown: Shown) -> TaskFiles:
    return gym.prepare(folder / name.replace("/", "-"), name, progress=shown)


_OURS = (
    Family(
        {
            "skills/balanced": Preset(0.80, 40_000, 1000),
            "skills/mixed": Preset(0.80, 60_000, 1000),
            "skills/late": Preset(0.85, 60_000, 1000),
            "skills/graded": Preset(0.93, 40_000, 500, tuned_on="skills/graded"),
        },
        _prepare_skills,
    ),
    Family({"sort": Preset(0.60, 40_000, 1000)}, _prepare_sort),
    Family(
        {
            "rg/gcd": Preset(0.55, 20_000, 250),
            "rg/number_filtering_misled": Preset(0.58, 20_000, 250, tuned_on="rg/number_filtering_misled"),
            "rg/letter_counting": Preset(0.79, 20_000, 250),
            "rg/spell_backward": Preset(0.60, 20_000, 250),
            "rg/count_bits": Preset(0.59, 20_000, 250),
            # The target is half-way between the initial accuracy and pass@8.
            "rg/simple_equations": Preset(0.64, 20_000, 250),
        },
        _prepare_gym,
        installed=gym.installed,
    ),
)
_OWN = {name: family for family in _OURS for name in family.presets}
_GROUP = "rollalloc.tasks"  # entry points of other distributions
_SWEPT_FOR_ALL = "skills/late"  # every recipe was tuned on this task, so all other tasks fall back to its settings


@lru_cache
def families() -> Mapping[str, Family]:
    """The family of each task, by the task's name: the library's first, then those of other distributions.

    Raises:
        ValueError: another distribution has a task with a name that is taken.
        ImportError: another distribution cannot be imported.
    """
    tasks = dict(_OWN)
    for point in entry_points(group=_GROUP):
        try:
            added = point.load()()
        except ImportError as error:
            raise ImportError(
                f"{point.value}, which adds tasks, cannot be imported ({error}); install its distribution again"
            ) from error
        for family in added:
            if taken := tasks.keys() & family.presets.keys():
                raise ValueError(f"{point.value} adds the task {min(taken)}, which there is already; rename it there")
            tasks |= dict.fromkeys(family.presets, family)
    return tasks


def family_of(name: str) -> Family:
    """The family of a task. For a task of the library, no other distribution is imported."""
    return _OWN[name] if name in _OWN else families()[name]


def task_names() -> list[str]:
    """The names of all tasks, as `--task` takes them."""
    return list(families())


def preset_of(task: str) -> tuple[str, Preset]:
    """The name of a task, with its pool, and its preset. Where tasks have pools and none is named, it is "late".

    Raises:
        ValueError: no such task or pool.
    """
    known = _OWN if {task, f"{task}/late"} & _OWN.keys() else families()
    name = f"{task}/late" if f"{task}/late" in known else task
    if name not in known:
        raise ValueError(f"unknown task {name!r}{near(name, known)}; there are {', '.join(known)}")
    return name, known[name].presets[name]


@lru_cache
def tuned_of(task: str) -> Mapping[str, Tuned]:
    """The tuned settings of each recipe on a task: those found for the task, or else those for `skills/late`."""
    recipes: dict[str, Any] = {}
    for name in dict.fromkeys((_SWEPT_FOR_ALL, task)):
        file = family_of(name).tuned / f"{name.replace('/', '-')}.json"
        recipes |= json.loads(file.read_text(encoding="utf-8"))["recipes"]
    return {recipe: Tuned(entry["parameters"], entry["learning_rate"]) for recipe, entry in recipes.items()}


def tuned_for(task: str, recipe: str) -> Tuned:
    """The tuned settings of a recipe on a task, by their names.

    Raises:
        ValueError: no settings were searched for this recipe.
    """
    name, preset = preset_of(task)
    known = tuned_of(preset.tuned_on)
    if recipe not in known:
        raise ValueError(
            f"{recipe} has no tuned settings for {name}; leave it out, or give its settings. Recipes with tuned settings: "
            f"{', '.join(known)}"
        )
    return known[recipe]


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
    return family_of(name).prepare(name, folder, shown)


def task_run(task: str, recipe: str, seed: int, folder: Path, *, tuned: Tuned | None = None, **changes: Any) -> Config:
    """A run of a recipe on a task, with its preset.

    Args:
        task: a name of `task_names()`, or a name of tasks with pools, such as "skills".
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
    family_of(name).installed()  # before anything is created
    chosen = tuned or tuned_for(name, recipe)
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
