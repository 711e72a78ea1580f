"""Turn the options of a command into the configuration of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollalloc.cli.config_fields import config_fields
from rollalloc.cli.options import RunOptions, changed_options
from rollalloc.data._files import read_rows
from rollalloc.named import sizes_of
from rollalloc.train.config import (
    LEAST_ROLLOUTS,
    ROLLOUTS_PER_PROMPT,
    Config,
    default_budget,
    default_grid,
)

SETTINGS = ("defaults", "tuned")
_ASYNC_ONLY = ("ahead", "overlap", "generator_limit")  # options of the asynchronous engine
_OF_EVALUATION = ("target", "eval_every", "single_answer", "accept_overlap")  # options that need held-out prompts


def run_of(options: RunOptions, recipe: str, parameters: Mapping[str, Any], seed: int) -> Config:
    """The configuration of a run of a recipe under the given options.

    The files of a built-in task are not made yet: `rollalloc.cli.tasks.with_task_files` makes them.

    Raises:
        ValueError: there is neither a task nor a model, or there are both; a model lacks prompts or a reward; an option has
            no effect; or the recipe cannot be made.
    """
    if options.settings not in SETTINGS:
        raise ValueError(f"--settings must be one of {', '.join(SETTINGS)}, got {options.settings!r}")
    if (options.task is None) == (options.model is None):
        from rollalloc.cli.tasks import task_names  # imported only where tasks are named, because it needs PyTorch

        raise ValueError(f"give either --task ({', '.join(task_names())}), or --model with --prompts and --reward")
    unused = changed_options(options, _ASYNC_ONLY)
    if options.engine == "sync" and unused:
        raise ValueError(
            f"{unused}: only the asynchronous engine uses it; give --engine async as well, or leave it out"
        )
    if options.task is None:
        config = _own_run(options, recipe, parameters, seed)
    else:
        from rollalloc.cli.tasks import task_run  # imported only for a task, because it needs PyTorch

        config = task_run(options, recipe, parameters, seed)
    config.make_recipe()  # an unknown recipe or parameter is an error now, before a task is made
    return config


def _own_run(options: RunOptions, recipe: str, parameters: Mapping[str, Any], seed: int) -> Config:
    missing = [f"--{name}" for name in ("prompts", "reward") if not getattr(options, name)]
    if missing:
        raise ValueError(f"--model needs {' and '.join(missing)} as well")
    if options.settings != "defaults":
        raise ValueError("--settings tuned: there are tuned settings only for built-in tasks; leave it out")
    unused = changed_options(options, _OF_EVALUATION)
    if options.heldout is None and unused:
        raise ValueError(f"{unused}: it has no effect without held-out prompts; give --heldout as well")
    values = config_fields(options)
    prompts = prompts_in(values["prompts"])
    budget = default_budget(prompts) if options.max_rollouts is None else options.max_rollouts
    sizes = sizes_of(recipe, parameters)
    if "groups" in sizes and "groups" not in parameters:  # a batch cannot have more prompts than the files have
        sizes["groups"] = max(1, min(sizes["groups"], prompts))
    values |= {
        "recipe": recipe,
        "parameters": {**sizes, **parameters},
        "max_rollouts": budget,
        "seed": seed,
        "eval_every": values.get("eval_every", default_grid(budget)),
    }
    return Config(**values)


@lru_cache
def prompts_in(files: tuple[str, ...]) -> int:
    """Number of different prompts in files."""
    rows = (row for file in files for _, row in read_rows(Path(file)) if isinstance(row, dict))
    return len({repr([row.get(name) for name in ("data_source", "prompt", "reward_model")]) for row in rows})


def end_said(options: RunOptions, run: Config) -> str:
    """Say when a run ends: its budget and its target. Of a default, say whose it is and how it is changed."""
    of_task = f"{run.task}'s" if options.task is not None else ""
    per_prompt = f"{ROLLOUTS_PER_PROMPT} a prompt and at least {LEAST_ROLLOUTS:,}"
    rollouts = "rollouts without a limit" if run.max_rollouts is None else f"at most {run.max_rollouts:,} rollouts"
    if run.max_rollouts is not None and options.max_rollouts is None:
        rollouts += f" ({of_task or f'the default: {per_prompt}'}; --max-rollouts changes it)"
    if run.target is None or run.target >= 1:
        return rollouts
    target = f"{rollouts}, until a held-out accuracy of {run.target:g}"
    return target if options.target is not None else f"{target} ({of_task}; --target changes it)"
