"""What must hold before training; each error says what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollalloc.core.recipe import Recipe, refuse_unmeasured
from rollalloc.drivers.trl.checks import check_indexed, rows_per_group

_NOT_SERVED = ("tools", "environment_factory", "rollout_worker", "weight_transfer")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what TRL's trainer takes but the driver does not serve, and what it cannot do without."""
    for name in _NOT_SERVED:
        if given.get(name) is not None:
            raise ValueError(
                f"{name} is not supported under a recipe: the driver brings a worker of its own, which plays one turn a "
                "rollout and takes the trainer's weights itself; leave it out, or use rollalloc.drivers.trl for several "
                "turns"
            )
    for name in ("args", "train_dataset", "reward_funcs"):
        if given.get(name) is None:
            raise ValueError(f"{name} is needed under a recipe, got None; AllocatedAsyncGRPOTrainer(..., {name}=...)")
    if not isinstance(model := given.get("model"), str):
        raise TypeError(f"TRL loads the model itself: give its name or folder as text, got {type(model).__name__}")
    check_indexed(given["train_dataset"])


def check_recipe(recipe: Recipe) -> int:
    """Refuse a recipe whose batches are not one size, or that wants to be told what is not measured here.

    Returns:
        Rows of a group.
    """
    refuse_unmeasured(recipe, "TRL's asynchronous trainer")
    each = rows_per_group(recipe)
    why = None
    if each is None:
        why = "its stages do not say how many rows a group has"
    elif recipe.replay is not None:
        why = f"{recipe.replay!r} adds rows to a batch now and then"
    elif recipe.reads_kl:
        why = f"{recipe.prompts!r} wants to know how far each update moved the weights, which is not measured here"
    if each is None or why is not None:
        raise ValueError(
            f"this recipe cannot go through AsyncGRPOTrainer, whose optimizer steps all have as many rows: {why}; use "
            "rollalloc.drivers.trl.AllocatedGRPOTrainer, which can"
        )
    return each


def check_sizes(args: Any, recipe: Recipe) -> tuple[int, int]:
    """Refuse settings of TRL's optimizer step that are not the recipe's batch.

    Returns:
        Micro-batches of an optimizer step, and rows of each.
    """
    each = check_recipe(recipe)
    if args.world_size != 1:
        raise ValueError(
            f"expected one process, got {args.world_size}: accelerate reads one micro-batch ahead for several of them, and "
            "the next batch is made once the one before it is trained; start one, or use rollalloc.drivers.trl"
        )
    if args.num_generations != each:
        raise ValueError(
            f"num_generations={args.num_generations}, but a group of the recipe has {each} rows; set {each}"
        )
    count, size = args.gradient_accumulation_steps, args.per_device_train_batch_size
    if count * size != recipe.groups * each:
        raise ValueError(
            f"the recipe trains on {recipe.groups} groups of {each} rows per batch, but an optimizer step has "
            f"{count * size} rows (per_device_train_batch_size={size} × gradient_accumulation_steps={count}); make it "
            f"{recipe.groups * each}, or let the recipe have groups={count * size / each:g}"
        )
    if args.token_budget is not None and args.token_budget > 0:
        raise ValueError(
            f"token_budget={args.token_budget} makes optimizer steps of as many rows as fit, not of a batch of the recipe, "
            "and drops rows that are longer; leave it unset (here it is then 0) and bound memory by "
            "per_device_train_batch_size"
        )
    return count, size


def check_settings(args: Any, recipe: Recipe) -> None:
    """Refuse settings of TRL that the recipe, or the driver, would silently overrule."""
    if args.max_staleness < recipe.max_staleness:
        raise ValueError(
            f"max_staleness={args.max_staleness}: TRL would drop rows unseen that the recipe, with "
            f"max_staleness={recipe.max_staleness}, counts as trained; set {recipe.max_staleness} or more, or give the "
            f"recipe less by dataclasses.replace(recipe, max_staleness={args.max_staleness})"
        )
    if args.weight_sync_steps != 1:
        raise ValueError(
            f"weight_sync_steps={args.weight_sync_steps}: a batch of the recipe is one optimizer step, after which the "
            "weights have a new version; leave it at 1"
        )
    if args.max_steps <= 0:
        raise ValueError(
            "max_steps must be given, in batches of the recipe: TRL would end a run after as many groups as there are "
            "prompts, whichever they are; a recipe that ends by itself, by its budget, ends the run before"
        )
    usual = {"top_p": (1.0,), "top_k": (0, None), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}
    for name, allowed in usual.items():
        if getattr(args, name) not in allowed:
            raise ValueError(
                f"{name}={getattr(args, name)}: the log-probabilities of what was sampled would not be the policy's, which "
                "TRL's loss compares them with; leave it alone"
            )
    for name in ("log_completions", "model_init_kwargs", "trust_remote_code"):
        if getattr(args, name):
            raise ValueError(
                f"{name}={getattr(args, name)!r} is not supported under a recipe, whose worker loads and logs by itself; "
                "leave it alone, and give a model that loads without it"
            )
