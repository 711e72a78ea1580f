"""Turn the options of a command into fields of `Config`. Fields that no option sets keep their defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

from rollalloc.cli.options import RunOptions, changed_options
from rollalloc.data.encoding import template_arguments
from rollalloc.generate.sampling import Sampling, Streaming
from rollalloc.models.lora import Lora
from rollalloc.models.objective import Aggregation, Clip, Loss
from rollalloc.train.config import MAX_NEW_TOKENS, Config, Schedule, Shape

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
        return json.dumps(template_arguments(arguments), sort_keys=True) if template_arguments(arguments) else None


def model_name(text: str) -> str:
    """The name or folder of a model.

    Raises:
        ValueError: the text is empty.
    """
    if not text.strip():
        raise ValueError("--model: expected a model's name or folder, got an empty one")
    return text


@contextmanager
def option_named(options: str) -> Iterator[None]:
    """A context that puts the names of options before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{options}: {error}") from None
