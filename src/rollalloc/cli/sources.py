"""Turn the options of a command into the configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from rollalloc.cli.options import RunOptions, changed_options, option_named
from rollalloc.data.encoding import template_arguments
from rollalloc.data.prompts import load_unless_loaded
from rollalloc.models.settings import Aggregation, Clip, Lora, Loss, Sampling, Streaming
from rollalloc.named import sizes_of
from rollalloc.train.config import (
    LEAST_ROLLOUTS,
    MAX_NEW_TOKENS,
    ROLLOUTS_PER_PROMPT,
    Config,
    Schedule,
    Shape,
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
        return _own_run(options, recipe, parameters, seed)
    from rollalloc.cli.tasks import task_run  # imported only for a task, because it needs PyTorch

    config = task_run(options, config_fields(options), recipe, parameters, seed)
    config.make_recipe()  # an unknown recipe or parameter is an error now, before the task is made
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
    prompts = len(load_unless_loaded(*values["prompts"], keep=True))
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


# Options that are fields of `Config` under the same name. `_OTHER_NAME` has the options whose field has
# another name.
_SAME_NAME = {field.name for field in fields(RunOptions)} & {field.name for field in fields(Config)} - {"task"}
_OTHER_NAME = {
    "reward_limit": "reward_limit_s",
    "optimizer_steps": "optimizer_steps_per_batch",
    "generator_limit": "generator_limit_s",
}


def config_fields(options: RunOptions) -> dict[str, Any]:
    """The fields of `Config` that the options set. The others keep their defaults.

    Raises:
        ValueError: a value is out of its range; the message names the option.
    """
    values: dict[str, Any] = {name: getattr(options, name) for name in _SAME_NAME}
    values |= {field: getattr(options, name) for name, field in _OTHER_NAME.items()}
    with option_named("--schedule, --warmup-steps, --schedule-steps"):
        schedule = Schedule(options.warmup_steps, cast("Shape", options.schedule), options.schedule_steps)
    with option_named("--dual-clip"):
        clip = Clip(dual=options.dual_clip)
    values |= {
        "model": None if options.model is None else model_name(options.model),
        "prompts": tuple(map(str, options.prompts or ())),
        "heldout": None if options.heldout is None else str(options.heldout),
        "chat_template_args": _canonical(options.chat_template_args),
        "sampling": Sampling(
            MAX_NEW_TOKENS if options.max_new_tokens is None else options.max_new_tokens,
            temperature=options.temperature,
            max_rows=Sampling.max_rows if options.max_rows is None else options.max_rows,
            kv_tokens=options.kv_tokens,
        ),
        "schedule": schedule,
        "loss": Loss(clip=clip, aggregation=cast("Aggregation", options.aggregation), kl=options.kl),
        "lora": _lora(options),
        "betas": None if options.adam_beta2 is None else (Config.betas[0], options.adam_beta2),
        "streaming": Streaming(overlap=options.overlap),
        "track": tuple(options.track or ()),
    }
    return {name: value for name, value in values.items() if value is not None}


def _lora(options: RunOptions) -> Lora | None:
    if options.lora is not None:
        with option_named("--lora, --lora-alpha, --lora-target"):
            return Lora(options.lora, options.lora_alpha, tuple(options.lora_target or ()))
    if unused := changed_options(options, ("lora_alpha", "lora_target")):
        raise ValueError(f"{unused}: only for adapters; give --lora RANK as well, e.g. --lora 16")
    return None


def _canonical(arguments: str | None) -> str | None:
    """A JSON object with sorted keys, so that equal runs have equal descriptions; None for an empty object."""
    with option_named("--chat-template-args"):
        given = template_arguments(arguments)
    return json.dumps(given, sort_keys=True) if given else None


def model_name(text: str) -> str:
    """The name or folder of a model.

    Raises:
        ValueError: the text is empty.
    """
    if not text.strip():
        raise ValueError("--model: expected a model's name or folder, got an empty one")
    return text
