"""Tasks ready to run, with the settings of each recipe.

Those that were swept, on skills/late, were found by `rollalloc.bench.sweep`: every recipe got a grid of the same size over
learning rate and shape of a batch, the same budget and the same tuning seeds, GRPO included. The seeds of a comparison are
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollalloc.bench.runs import Run, Source
from rollalloc.bench.tasks import skills, sort
from rollalloc.engines.native import Settings
from rollalloc.engines.sampler import Sampling

TUNING_SEEDS = (1000, 1001, 1002)


@dataclass(frozen=True, slots=True)
class Tuned:
    """A recipe's parameters and learning rate on a task."""

    parameters: Mapping[str, Any]
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Preset:
    """A task's target, budget and tuned recipes.

    Attributes:
        target: held-out accuracy to reach.
        max_rollouts: what a run may pay before it is censored.
        eval_every: rollouts paid between evaluations.
        tuned: by recipe name.
    """

    target: float
    max_rollouts: int
    eval_every: int
    tuned: Mapping[str, Tuned]


# Swept on skills/late (LOG.md, 2026-11-21): grpo, dapo, pilot_commit. The others, and the other pools and sort, have not
# been: they begin with the same learning rate and as many rollouts a batch as GRPO.
_SKILLS = {
    "grpo": Tuned({"groups": 16, "n": 4}, 3e-4),
    "dapo": Tuned({"groups": 8, "n": 4, "gen_groups": 24}, 6e-4),
    "pilot_commit": Tuned({"groups": 4, "n_pilot": 4, "n_commit": 4, "gen_groups": 12}, 3e-4),
    "pods": Tuned({"groups": 8, "n": 8, "m": 4}, 3e-4),
    "darts": Tuned({"groups": 16, "shortest": 3, "longest": 1}, 3e-4),
    "racing": Tuned({"groups": 8, "sizes_S": (2, 8), "gen_groups": 16}, 3e-4),
}
PRESETS = {
    "skills/balanced": Preset(0.80, 40_000, 1000, _SKILLS),
    "skills/mixed": Preset(0.80, 60_000, 1000, _SKILLS),
    "skills/late": Preset(0.85, 60_000, 1000, _SKILLS),
    "sort": Preset(0.60, 40_000, 1000, _SKILLS),
}


def preset_of(task: str, pool: str) -> tuple[str, Preset]:
    """The preset of a task, with its name.

    Raises:
        ValueError: no such task or pool.
    """
    name = f"{task}/{pool}" if task == "skills" else task
    if name not in PRESETS:
        raise ValueError(f"unknown task {name!r}; there are {', '.join(PRESETS)}")
    return name, PRESETS[name]


def task_source(task: str, pool: str, folder: Path) -> tuple[Source, int]:
    """A task's model, prompts and reward, made in the folder unless they are there, and the tokens of a rollout."""
    files = skills.prepare(folder / "skills", pool) if task == "skills" else sort.prepare(folder / "sort")
    source = Source(
        model=str(files.model),
        prompts=(str(files.train),),
        heldout=str(files.heldout),
        reward=files.reward,
        single_answer=files.single_answer,
        reward_workers=0,  # a comparison of two lists of words
        device="cpu",
    )
    return source, files.max_new_tokens


def task_run(
    task: str, pool: str, recipe: str, seed: int, folder: Path, *, tuned: Tuned | None = None, **changes: Any
) -> Run:
    """A run of a recipe on a task, with its preset.

    Args:
        task: "skills" or "sort".
        pool: of skills.
        recipe: name of the recipe.
        seed: of the run.
        folder: where tasks are kept.
        tuned: instead of the preset's.
        changes: of the trainer's settings.

    Raises:
        ValueError: an unknown task, or a recipe without a preset for it and none given.
    """
    name, preset = preset_of(task, pool)
    chosen = tuned or preset.tuned.get(recipe)
    if chosen is None:
        raise ValueError(
            f"{recipe} has no tuned settings for {name}; give its parameters. There are {', '.join(preset.tuned)}"
        )
    source, tokens = task_source(task, pool, folder)
    settings: dict[str, Any] = {
        "learning_rate": chosen.learning_rate,
        "target": preset.target,
        "eval_every": preset.eval_every,
    }
    return Run(
        source=source,
        recipe=recipe,
        parameters=dict(chosen.parameters),
        settings=Settings(seed=seed, sampling=Sampling(tokens), **settings | changes),
        max_rollouts=preset.max_rollouts,
        task=name,
    )
