"""Turn the options of a command into a run on a built-in task.

It imports the tasks, so `rollalloc train` imports this module only for a built-in task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollalloc.cli.options import RunOptions, changed_options, option_named
from rollalloc.named import sizes_of, standard
from rollalloc.tasks.presets import (
    DEFAULT_OPTIMIZER,
    Tuned,
    planned_run,
    preset_of,
    task_names,
    tuned_for,
    with_task_files,
)
from rollalloc.train.config import Config, default_grid

__all__ = ["task_names", "task_run", "with_task_files"]

# Options that cannot be combined with --task, because the task itself sets them.
_OF_OWN_RUNS = (
    *("prompts", "heldout", "reward", "single_answer", "drop_overlong", "max_new_tokens", "temperature", "kv_tokens"),
    *("reward_workers", "reward_limit", "overlong_buffer", "device", "features"),
    *("lora", "lora_alpha", "lora_target", "chat_template_args", "accept_overlap"),
)


def task_run(
    options: RunOptions, given: Mapping[str, Any], recipe: str, parameters: Mapping[str, Any], seed: int
) -> Config:
    """The run of a recipe on the task of `--task`. Call `with_task_files` to create the task's files.

    Args:
        options: the options of the command.
        given: the fields of `Config` that they set.
        recipe: name of the recipe.
        parameters: its parameters.
        seed: seed of the run.

    Raises:
        ValueError: the task is unknown, the recipe has no tuned settings, or an option was given that the task determines.
    """
    task = str(options.task)
    if unused := changed_options(options, _OF_OWN_RUNS):
        raise ValueError(
            f"{unused}: the task sets this itself; leave it out, or give --model with --prompts and --reward"
        )
    if options.settings == "tuned":
        with option_named("--settings tuned"):
            usual = tuned_for(task, standard(recipe))
    else:
        _, preset = preset_of(task)
        usual = Tuned(sizes_of(recipe, parameters), preset.rate, DEFAULT_OPTIMIZER)
    chosen = replace(usual, parameters={**usual.parameters, **parameters})
    run = planned_run(task, recipe, seed, tuned=chosen, **given)
    if options.eval_every is None and run.max_rollouts is not None:
        run = replace(run, eval_every=min(run.eval_every, default_grid(run.max_rollouts)))
    return run
