"""From the options of a command to the runs they mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from rollalloc.cli.options import Given
from rollalloc.data._files import read_rows
from rollalloc.data.encoding import template_arguments
from rollalloc.generate.sampling import Sampling, Streaming
from rollalloc.models.lora import Lora
from rollalloc.named import RECIPES, standard
from rollalloc.train.config import MAX_NEW_TOKENS, Config
from rollalloc.train.defaults import (
    LEAST_ROLLOUTS,
    ROLLOUTS_PER_PROMPT,
    default_budget,
    default_grid,
    default_parameters,
)
from rollalloc.train.objective import Aggregation, Clip, Loss
from rollalloc.train.schedule import Schedule, Shape, check_budget

SETTINGS = ("defaults", "tuned")
_ASYNC_ONLY = ("ahead", "overlap", "generator_limit")  # options of the asynchronous engine
_OF_EVALUATION = ("target", "eval_every", "single_answer", "accept_overlap")  # options that need held-out prompts


def run_of(given: Given, recipe: str, parameters: Mapping[str, Any], seed: int) -> Config:
    """The run of a recipe under the given options.

    The files of a built-in task are not made yet: `rollalloc.cli.tasks.with_task_files` makes them.

    Raises:
        ValueError: neither a task nor a model with prompts and a reward, or both; an option that has no effect; a recipe
            that cannot be made.
    """
    if given.settings not in SETTINGS:
        raise ValueError(f"--settings must be one of {', '.join(SETTINGS)}, got {given.settings!r}")
    if (given.task is None) == (given.model is None):
        raise ValueError(f"give either --task ({_task_names()}, rg/NAME), or --model with --prompts and --reward")
    unused = changed_options(given, _ASYNC_ONLY)
    if given.engine == "sync" and unused:
        raise ValueError(
            f"{unused}: only the asynchronous engine knows it; give --engine async as well, or take it out"
        )
    if given.task is None:
        run = _own_run(given, recipe, parameters, seed)
    else:
        from rollalloc.cli.tasks import task_run  # only a task needs the benchmark

        run = task_run(given, recipe, parameters, seed)
    run = replace(run, track=tuple(given.track or ()), staleness=given.staleness, ahead=given.ahead)
    if given.max_rows is not None:
        run = replace(run, sampling=replace(run.sampling, max_rows=given.max_rows))
    # Refuse an impossible schedule before a model is loaded.
    check_budget(run.schedule, run.make_recipe().budget, run.max_batches)
    return run


def _task_names() -> str:
    from rollalloc.cli.tasks import PRESETS

    return ", ".join(PRESETS)


def changed_options(given: Given, names: Sequence[str]) -> str:
    """Those of the options that have another value than the default, as the user gave them; "" if there are none."""
    changed = [name for name in names if getattr(given, name) != getattr(Given, name)]
    return ", ".join(f"--{'no-' if getattr(Given, name) is True else ''}{name.replace('_', '-')}" for name in changed)


def _own_run(given: Given, recipe: str, parameters: Mapping[str, Any], seed: int) -> Config:
    model = model_name(str(given.model))
    missing = [f"--{name}" for name in ("prompts", "reward") if not getattr(given, name)]
    if missing:
        raise ValueError(f"--model needs {' and '.join(missing)} as well")
    if given.settings != "defaults":
        raise ValueError("--settings tuned: nobody tuned anything for a model of your own; take it out")
    unused = changed_options(given, _OF_EVALUATION)
    if given.heldout is None and unused:
        raise ValueError(f"{unused}: without prompts to evaluate on it does nothing; give --heldout as well")
    prompts = tuple(map(str, given.prompts or ()))
    budget = default_budget(prompts_in(prompts)) if given.max_rollouts is None else given.max_rollouts
    defaults = usual_parameters(recipe)
    if defaults:  # a batch cannot have more prompts than there are
        defaults["groups"] = max(1, min(defaults["groups"], prompts_in(prompts)))
    return Config(
        model=model,
        prompts=prompts,
        heldout=None if given.heldout is None else str(given.heldout),
        reward=str(given.reward),
        single_answer=given.single_answer,
        drop_overlong=given.drop_overlong,
        reward_workers=given.reward_workers,
        reward_limit_s=given.reward_limit,
        reward_cache=given.reward_cache,
        overlong_buffer=given.overlong_buffer,
        device=given.device,
        features=given.features,
        lora=_lora(given),
        chat_template_args=_canonical(given.chat_template_args),
        accept_overlap=given.accept_overlap,
        recipe=recipe,
        parameters={**defaults, **parameters},
        max_rollouts=budget,
        seed=seed,
        sampling=Sampling(
            _or(given.max_new_tokens, MAX_NEW_TOKENS), temperature=given.temperature, kv_tokens=given.kv_tokens
        ),
        learning_rate=_or(given.learning_rate, Config.learning_rate),
        target=given.target,
        **update_settings(given),
        eval_every=_or(given.eval_every, default_grid(budget)),
    )


def usual_parameters(recipe: str) -> dict[str, Any]:
    """The default parameters of a recipe, by its name or an older one; empty for a recipe that is not of this package."""
    name = standard(recipe)
    return default_parameters(name) if name in RECIPES else {}


@lru_cache
def prompts_in(files: tuple[str, ...]) -> int:
    """Prompts in files, those that repeat another left out."""
    rows = (row for file in files for _, row in read_rows(Path(file)) if isinstance(row, dict))
    return len({repr([row.get(name) for name in ("data_source", "prompt", "reward_model")]) for row in rows})


def budget_said(given: Given, rollouts: int | None) -> str:
    """What a run pays at most, and where nobody said so, why that."""
    if rollouts is None:
        return "rollouts without a limit"
    if given.max_rollouts is not None or given.task is not None:
        return f"at most {rollouts:,} rollouts"
    default = f"{ROLLOUTS_PER_PROMPT} a prompt and at least {LEAST_ROLLOUTS:,}"
    return f"at most {rollouts:,} rollouts (the default: {default}; --max-rollouts changes it)"


def _lora(given: Given) -> Lora | None:
    if given.lora is not None:
        with _named("--lora, --lora-alpha, --lora-target"):
            return Lora(given.lora, given.lora_alpha, tuple(given.lora_target or ()))
    if unused := changed_options(given, ("lora_alpha", "lora_target")):
        raise ValueError(f"{unused}: of adapters, which --lora RANK asks for; give it as well, e.g. --lora 16")
    return None


def _canonical(arguments: str | None) -> str | None:
    """A JSON object in one spelling, so that a run is the same however it was written; None for an empty one."""
    with _named("--chat-template-args"):
        return json.dumps(template_arguments(arguments), sort_keys=True) if template_arguments(arguments) else None


def model_name(text: str) -> str:
    """The name or folder of a model, as an option gives it.

    Raises:
        ValueError: it is empty.
    """
    if not text.strip():
        raise ValueError("--model: expected a model's name or folder, got an empty one")
    return text


def update_settings(given: Given) -> dict[str, Any]:
    """Settings of the update, the same for every recipe and task."""
    with _named("--schedule, --warmup-steps, --schedule-steps"):
        schedule = Schedule(given.warmup_steps, cast("Shape", given.schedule), given.schedule_steps)
    with _named("--dual-clip"):
        clip = Clip(dual=given.dual_clip)
    return {
        **_optimizer(given),
        "optimizer_steps_per_batch": given.optimizer_steps,
        "schedule": schedule,
        "loss": Loss(clip=clip, aggregation=cast("Aggregation", given.aggregation), kl=given.kl),
        "tokens_per_forward": given.tokens_per_forward,
        "precision": given.precision,
        "sampling_dtype": given.sampling_dtype,
        "gradient_checkpointing": given.gradient_checkpointing,
        "engine": given.engine,
        "streaming": Streaming(overlap=given.overlap),
        "generator_limit_s": given.generator_limit,
    }


def _optimizer(given: Given) -> dict[str, Any]:
    """What is said of the optimizer; the settings have defaults for the rest."""
    said = _said(max_grad_norm=given.max_grad_norm, averaging=given.averaging)
    if given.adam_beta2 is not None:
        said["betas"] = (Config.betas[0], given.adam_beta2)
    if given.adaptive_clip is not None:
        said["adaptive_clip"] = given.adaptive_clip or None
    return said


@contextmanager
def _named(options: str) -> Iterator[None]:
    """Say which options a value is of, where what refuses it has other names for them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{options}: {error}") from None


def _or(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given


def _said(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
