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
from rollalloc.lab.bench.methods import default
from rollalloc.lab.bench.presets import (
    DEFAULT_OPTIMIZER,
    PRESETS,
    Tuned,
    planned_run,
    preset_of,
    tuned_of,
)
from rollalloc.models.lora import Lora
from rollalloc.named import RECIPES, standard
from rollalloc.train.description import Run, Source
from rollalloc.train.objective import Aggregation, Clip, Loss
from rollalloc.train.schedule import Schedule, Shape, check_budget
from rollalloc.train.settings import Settings

SETTINGS = ("defaults", "tuned")
# A model of the user's own begins with the same as the tasks. Nobody tuned it for that model.
USUAL: Mapping[str, dict[str, Any]] = {recipe: default(recipe) for recipe in RECIPES}
_USUAL_VISITS, _LEAST_ROLLOUTS = 16, 4096  # of a budget that nobody gave: rollouts per prompt, and all of them
_USUAL_RATE = 1e-6
_EVALUATIONS = 10  # over a run's budget, where nobody says otherwise, beside that of the initial model
_USUAL_TOKENS = 1024
# Options that a task decides itself; given beside one they would be ignored.
_OF_OWN_RUNS = (
    *("prompts", "heldout", "reward", "single_answer", "drop_overlong", "max_new_tokens", "temperature", "kv_tokens"),
    *("reward_workers", "reward_limit", "reward_cache", "overlong_buffer", "device", "features"),
    *("lora", "lora_alpha", "lora_target", "chat_template_args", "accept_overlap"),
)
_OF_STREAMING = ("ahead", "overlap", "generator_limit")  # options of the asynchronous engine
_OF_EVALUATION = (
    "target",
    "eval_every",
    "single_answer",
    "accept_overlap",
)  # options that do nothing without held-out prompts


def run_of(given: Given, recipe: str, parameters: Mapping[str, Any], seed: int) -> Run:
    """The run of a recipe under the options given; a task is not made yet, which `rollalloc.lab.bench.presets.made` does.

    Raises:
        ValueError: neither a task nor a model with prompts and a reward, or both; an option that would do nothing; a recipe
            that cannot be made.
    """
    if given.settings not in SETTINGS:
        raise ValueError(f"--settings must be one of {', '.join(SETTINGS)}, got {given.settings!r}")
    if (given.task is None) == (given.model is None):
        raise ValueError(f"give either --task ({', '.join(PRESETS)}, rg/NAME), or --model with --prompts and --reward")
    useless = [name for name in _OF_STREAMING if getattr(given, name) != getattr(Given, name)]
    if given.engine == "sync" and useless:
        options = _as_said(useless)
        raise ValueError(
            f"{options}: only the asynchronous engine knows it; give --engine async as well, or take it out"
        )
    made = _own_run if given.task is None else _task_run
    run = made(given, recipe, parameters, seed)
    run = replace(run, track=tuple(given.track or ()), staleness=given.staleness, ahead=given.ahead)
    if given.max_rows is not None:
        sampling = replace(run.settings.sampling, max_rows=given.max_rows)
        run = replace(run, settings=replace(run.settings, sampling=sampling))
    # What cannot be is said before a model is loaded.
    check_budget(run.settings.schedule, run.made_recipe().budget, run.settings.max_batches)
    return run


def _as_said(names: Sequence[str]) -> str:
    """Options as they were given, with another value than the default."""
    return ", ".join(f"--{'no-' if getattr(Given, name) is True else ''}{name.replace('_', '-')}" for name in names)


def _task_run(given: Given, recipe: str, parameters: Mapping[str, Any], seed: int) -> Run:
    task = str(given.task)
    said = [name for name in _OF_OWN_RUNS if getattr(given, name) != getattr(Given, name)]
    if said:
        options = _as_said(said)
        raise ValueError(f"{options}: a task has its own; take it out, or give --model with --prompts and --reward")
    _, preset = preset_of(task)
    if given.settings == "tuned":
        usual = tuned_of(preset.tuned_on).get(standard(recipe)) or Tuned({}, _USUAL_RATE)
    else:
        usual = Tuned(USUAL.get(standard(recipe), {}), preset.rate, DEFAULT_OPTIMIZER)
    rate = _or(given.learning_rate, usual.learning_rate)
    chosen = replace(usual, parameters={**usual.parameters, **parameters}, learning_rate=rate)
    changes = _said(target=given.target, eval_every=given.eval_every)
    run = planned_run(task, recipe, seed, tuned=chosen, **_update(given), **changes)
    run = replace(run, max_rollouts=_or(given.max_rollouts, run.max_rollouts))
    if given.eval_every is None and run.max_rollouts is not None:
        usual = min(run.settings.eval_every, usual_grid(run.max_rollouts))
        run = replace(run, settings=replace(run.settings, eval_every=usual))
    return run


def _own_run(given: Given, recipe: str, parameters: Mapping[str, Any], seed: int) -> Run:
    model = model_name(str(given.model))
    missing = [f"--{name}" for name in ("prompts", "reward") if not getattr(given, name)]
    if missing:
        raise ValueError(f"--model needs {' and '.join(missing)} as well")
    if given.settings != "defaults":
        raise ValueError("--settings tuned: nobody tuned anything for a model of your own; take it out")
    useless = [name for name in _OF_EVALUATION if getattr(given, name) != getattr(Given, name)]
    if given.heldout is None and useless:
        options = _as_said(useless)
        raise ValueError(f"{options}: without prompts to evaluate on it does nothing; give --heldout as well")
    source = Source(
        model=model,
        prompts=tuple(map(str, given.prompts or ())),
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
    )
    budget = usual_budget(source.prompts) if given.max_rollouts is None else given.max_rollouts
    settings = Settings(
        seed=seed,
        sampling=Sampling(
            _or(given.max_new_tokens, _USUAL_TOKENS), temperature=given.temperature, kv_tokens=given.kv_tokens
        ),
        learning_rate=_or(given.learning_rate, _USUAL_RATE),
        target=given.target,
        **_update(given),
        eval_every=_or(given.eval_every, usual_grid(budget)),
    )
    usual = dict(USUAL.get(standard(recipe), {}))
    if usual:  # no more prompts in a batch than there are
        usual["groups"] = max(1, min(usual["groups"], prompts_in(source.prompts)))
    parameters = {**usual, **parameters}
    return Run(source=source, recipe=recipe, parameters=parameters, settings=settings, max_rollouts=budget)


def usual_budget(files: tuple[str, ...]) -> int:
    """Rollouts that a run on these prompts pays at most, where nobody says: the same for every recipe."""
    return max(_USUAL_VISITS * prompts_in(files), _LEAST_ROLLOUTS)


def usual_grid(budget: int) -> int:
    """Rollouts between two evaluations, where nobody says: a tenth of the budget."""
    return max(1, budget // _EVALUATIONS)


@lru_cache
def prompts_in(files: tuple[str, ...]) -> int:
    """Prompts in files, those that repeat another left out."""
    rows = (row for file in files for _, row in read_rows(Path(file)) if isinstance(row, dict))
    return len({repr([row.get(name) for name in ("data_source", "prompt", "reward_model")]) for row in rows})


def budget_said(given: Given, rollouts: int | None) -> str:
    """What a run pays at most, and where nobody said so, why that."""
    if rollouts is None:
        return "rollouts without a limit"
    usual = given.max_rollouts is None and given.task is None
    why = (
        f" (the default: {_USUAL_VISITS} a prompt and at least {_LEAST_ROLLOUTS:,}; --max-rollouts changes it)"
        if usual
        else ""
    )
    return f"at most {rollouts:,} rollouts{why}"


def _lora(given: Given) -> Lora | None:
    if given.lora is not None:
        with _named("--lora, --lora-alpha, --lora-target"):
            return Lora(given.lora, given.lora_alpha, tuple(given.lora_target or ()))
    said = [name for name in ("lora_alpha", "lora_target") if getattr(given, name) != getattr(Given, name)]
    if said:
        options = _as_said(said)
        raise ValueError(f"{options}: of adapters, which --lora RANK asks for; give it as well, e.g. --lora 16")
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


def _update(given: Given) -> dict[str, Any]:
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
        said["betas"] = (Settings.betas[0], given.adam_beta2)
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
