"""What must hold before training; each error says what was expected, what came and what to do."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from trl import is_conversational

from rollalloc.core.recipe import Recipe
from rollalloc.data.overlap import warn_of_shared
from rollalloc.drivers.trl.rewards import RewardFunctions, check_columns, how_to_name_a_metric
from rollalloc.named import in_shape
from rollalloc.rules import rows
from rollalloc.rules.prompts import InOrder, Shuffled
from rollalloc.train.objective import Clip

log = logging.getLogger(__name__)


def steps_per_batch(args: Any) -> int:
    """Optimizer steps on each batch of the recipe, the same for every recipe.

        steps_per_generation · num_iterations / gradient_accumulation_steps

    Raises:
        ValueError: it is not a whole number.
    """
    passes, accumulated = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if passes % accumulated:
        raise ValueError(
            "a batch of the recipe must be trained in whole optimizer steps, but steps_per_generation × num_iterations = "
            f"{args.steps_per_generation} × {args.num_iterations} micro-batches are not a multiple of "
            f"gradient_accumulation_steps={accumulated}; leave steps_per_generation unset, or make it a multiple"
        )
    return passes // accumulated


def checkpoint_of(args: Any, state: Any) -> Path:
    """Where the trainer saves its step of now."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def rows_per_group(recipe: Recipe) -> int | None:
    """The most rows that a group of the recipe can have in a batch; None where its rules do not say."""
    if recipe.group_rows is not None or recipe.rows != rows.Everything():
        return recipe.group_rows
    sizes = [getattr(stage.size, "n", None) for stage in recipe.stages]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def in_shape_of(args: Any, recipe: Recipe | str) -> Recipe:
    """The recipe with TRL's generation batch for a batch, as far as it was made without sizes; another stays as it is.

        groups × rows of each = per_device_train_batch_size × processes × steps_per_generation

    Rows of each are `num_generations`, or as many as the recipe's own sizes make, where it was given some.
    """
    rows, n = args.generation_batch_size, args.num_generations
    made = in_shape(recipe, {}, max(1, rows // n), n)
    own = rows_per_group(made)
    if own is not None and own != n and rows % own == 0:
        made = in_shape(recipe, {}, rows // own, n)
    if made is not recipe:
        sizes = ", ".join(f"{stage.name}: {stage.size!r}" for stage in made.stages)
        log.info("the recipe has TRL's sizes: %d groups in a batch, %s, rows %r", made.groups, sizes, made.rows)
    return made


def check_sizes(args: Any, recipe: Recipe) -> None:
    """Refuse settings of TRL's batch that are not the recipe's."""
    steps_per_batch(args)
    each = rows_per_group(recipe)
    if each is None:
        return
    if each == 1:
        _check_counted(args, recipe)
    elif args.num_generations != each:
        stages = ", ".join(f"{stage.name}: {stage.size!r}" for stage in recipe.stages)
        raise ValueError(
            f"num_generations={args.num_generations} cannot be made of the recipe's stages, {stages}, rows "
            f"{recipe.rows!r}: a group has {each} rows; set num_generations={each}, or change the recipe"
        )
    if args.generation_batch_size != recipe.groups * each:
        raise ValueError(
            f"the recipe trains on {recipe.groups} groups of {each} rows per batch, but TRL's generation batch has "
            f"{args.generation_batch_size} rows (per_device_train_batch_size × processes × steps_per_generation); make it "
            f"{recipe.groups * each}, or let the recipe have groups={args.generation_batch_size / each:g}"
        )


def _check_counted(args: Any, recipe: Recipe) -> None:
    """Refuse a `num_generations` that would pass for the rollouts of a prompt where the recipe trains on one of each.

    TRL takes no 1, so the least number that it does take stands for it.
    """
    if recipe.groups < 2:
        raise ValueError(
            "the recipe trains on one row per batch, and TRL takes no fewer than 2; let it have more groups"
        )
    least = next(number for number in range(2, recipe.groups + 1) if recipe.groups % number == 0)
    if args.num_generations != least:
        raise ValueError(
            f"num_generations={args.num_generations}, but the recipe trains on one row per prompt. TRL takes no 1: set "
            f"num_generations={least}, the least that divides a batch of {recipe.groups} rows; under this recipe it says "
            "only how TRL counts its epochs, and how many completions it makes of a prompt when it evaluates "
            "(num_generations_eval)"
        )


def warn_of_passes(args: Any, recipe: Recipe, prompts: int) -> None:
    """Warn where `num_train_epochs` stands for more passes over the data than it says.

    TRL counts an epoch by `num_generations` completions of each prompt, and takes no fewer than 2; a recipe with one row per
    prompt passes over the data so many times in that epoch.
    """
    if args.max_steps > 0 or rows_per_group(recipe) != 1:
        return
    times, epochs = args.num_generations, args.num_train_epochs
    steps = max(1, round(epochs * prompts / recipe.groups)) * steps_per_batch(args)
    log.warning(
        "num_train_epochs=%g: TRL counts an epoch by num_generations=%d completions of each prompt, but the recipe trains "
        "on one, so that it passes over the data %d times in each epoch, %g times in all; for %g passes set max_steps=%d. "
        "rollalloc/epoch counts the passes",
        epochs,
        times,
        times,
        times * epochs,
        epochs,
        steps,
    )


def check_settings(args: Any, recipe: Recipe) -> None:
    """Refuse settings of TRL that the recipe, or the driver, would silently overrule."""
    if args.scale_rewards not in ("group", True) or args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "advantages are the recipe's, so scale_rewards and multi_objective_aggregation must be left alone, got "
            f"{args.scale_rewards!r} and {args.multi_objective_aggregation!r}; use dataclasses.replace(recipe, "
            "advantage=...) with a rule of rollalloc.rules.advantages, e.g. OverGroup(dr_grpo)"
        )
    if args.use_vllm:
        _check_vllm(args)
    if not recipe.trains_older_rows:
        return
    for name in ("loss_type", "off_policy_mask_threshold", "use_liger_kernel"):
        value = getattr(args, name, None)
        if value if name != "loss_type" else value in ("vespo", "luspo"):
            raise ValueError(
                f"{name}={value!r} cannot take the importance weight of each token that rows sampled from older weights "
                f"need; give the recipe max_staleness=0 and no replay, or use another {name}"
            )


def _check_vllm(args: Any) -> None:
    """Refuse another importance weight between vLLM and the trainer than the driver's, a token's, truncated."""
    usual = {field.name: field.default for field in fields(args)}
    for name in ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
                 "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"):  # fmt: skip
        if getattr(args, name, None) != usual.get(name):
            raise ValueError(
                f"{name}={getattr(args, name)!r}: under a recipe vLLM's rollouts get importance weights a token, at most "
                f"{Clip().stale:g}, together with those for older weights; leave it alone, or turn both off with "
                "vllm_importance_sampling_correction=False"
            )


def in_order(recipe: Recipe, args: Any) -> Recipe:
    """The recipe, drawing the prompts in the data set's order where TRL's settings ask for that.

    Raises:
        ValueError: they do, but the recipe has an order of its own.
    """
    if args.shuffle_dataset or isinstance(recipe.prompts, InOrder):
        return recipe
    if recipe.prompts != Shuffled():
        raise ValueError(
            f"shuffle_dataset=False, but the recipe draws the prompts by {recipe.prompts!r}; leave shuffle_dataset alone, "
            "or give the recipe prompts=InOrder() of rollalloc.rules.prompts"
        )
    return replace(recipe, prompts=InOrder())


def check_metric(recipe: Recipe, rewards: RewardFunctions) -> None:
    """Refuse a weighted sum of rewards where the recipe takes the metric for a success rate: it would select wrongly."""
    own = sorted(weight for weight in rewards.weights if weight) == [1.0]
    if recipe.rate_readers and rewards.metric is None and not own:
        parts = " + ".join(f"{weight:g} · {name}" for weight, name in zip(rewards.weights, rewards.names, strict=True))
        raise ValueError(
            f"{recipe.rate_readers[0]} takes the metric for a success rate, but the metric is the whole reward, {parts}; "
            f"{how_to_name_a_metric(rewards.names)}"
        )


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what TRL's trainer takes but the driver does not serve."""
    if given.get("rollout_func") is not None:
        raise ValueError(
            "rollout_func is not supported under a recipe: the driver generates what the recipe orders; leave it out"
        )


def check_model(model: Any, args: Any, peft_config: Any) -> None:
    """Refuse beta above 0 with a model that TRL could not load a second time."""
    adapter = peft_config is not None or hasattr(model, "peft_config")
    if args.beta and isinstance(model, PreTrainedModel) and not adapter and not model.config._name_or_path:
        raise ValueError(
            f"beta={args.beta} needs a reference model, which TRL loads from where the model came from, but this one was "
            "never saved; call model.save_pretrained(folder) and pass the folder as the model"
        )


def check_indexed(dataset: Any) -> None:
    """Refuse a data set of which no row can be asked for."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            "the recipe draws the prompts, so train_dataset must be map-style (with a length, indexed by number), got "
            f"{type(dataset).__name__}; load it without streaming"
        )


def check_data(dataset: Any, tokenizer: Any, turns: Collection[str] = ()) -> None:
    """Refuse prompts that the driver cannot take.

    Args:
        dataset: of a prompt per row; an environment may say the prompt instead.
        tokenizer: the model's.
        turns: what makes rollouts of several turns, "tools" or "environment_factory".
    """
    if not len(dataset):
        raise ValueError("the training data set is empty; give one with a prompt per row")
    first = dataset[0]
    check_columns(first, "the training data set")
    if "image" in first or "images" in first:
        raise ValueError("prompts with images are not supported under a recipe; use TRL's GRPOTrainer for them")
    if "prompt" not in first:
        if "environment_factory" in turns:
            return
        raise ValueError(f"a row of the training data needs a column `prompt`, got {', '.join(first)}")
    talk = is_conversational({"prompt": first["prompt"]})
    if turns and not talk:
        raise ValueError(
            f"{' and '.join(sorted(turns))} need conversations, but the prompts are text; give each as a list of messages"
        )
    if talk and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the prompts are conversations, but the tokenizer has no chat template; set tokenizer.chat_template, or give "
            "the prompts as text"
        )


def check_evaluated(dataset: Any, train: Any = None) -> None:
    """Refuse held-out data whose columns reward functions could not see; say how much of it is in the training set.

    Args:
        dataset: TRL's `eval_dataset`: one data set, several by name, or None.
        train: TRL's `train_dataset`.
    """
    for name, each in (dataset if isinstance(dataset, dict) else {"": dataset}).items():
        check_columns(getattr(each, "column_names", None) or (), f"eval_dataset{name and f'[{name!r}]'}")
        warn_of_shared(train, each, f"eval_dataset{name and f'[{name!r}]'}")


def check_turns(trainer: Any) -> None:
    """Refuse several turns where processes generate together: they take unequal numbers of them, and would wait for ever."""
    together = {
        "use_vllm": trainer.use_vllm,
        "a sharded model": trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
    }
    if trainer.accelerator.num_processes > 1 and any(together.values()):
        raise ValueError(
            f"tools and environments with {next(name for name, there in together.items() if there)} on "
            f"{trainer.accelerator.num_processes} processes are not supported under a recipe: rollouts take unequal "
            "numbers of turns, and the processes would wait for each other; use one process, or transformers' generation"
        )


def check_processes(args: Any) -> None:
    """Say it where `accelerate launch --cpu` started a single process, as it does whatever number it is told."""
    if os.environ.get("ACCELERATE_USE_CPU") == "True" and args.world_size == 1:
        log.warning(
            "this is the only process: `accelerate launch --cpu` starts one, whatever --num_processes says; for N of them "
            "use `torchrun --nproc_per_node N`"
        )


def check_stops(recipe: Recipe, can_stop: bool) -> None:
    """Say it where a recipe would stop rollouts and none can be."""
    if not can_stop and recipe.stopping:
        log.warning(
            "the recipe stops rollouts, but here each is generated to its end and paid for: only rollalloc's sampler in a "
            "single process can stop them"
        )


def check_saving(args: Any, state: Any) -> None:
    """Refuse to save between the optimizer steps of one batch, from where no run could be resumed exactly."""
    each = steps_per_batch(args)
    saves = {"steps": ("save_steps", state.save_steps), "best": ("eval_steps", state.eval_steps)}
    name, every = saves.get(str(getattr(args.save_strategy, "value", args.save_strategy)), ("", 0))
    wrong = {name: every} if name and every % each else {}
    if name == "save_steps" and state.max_steps % each:
        wrong["max_steps"] = state.max_steps
    for setting, value in wrong.items():
        raise ValueError(
            f"a batch takes {each} optimizer steps, and only between two batches can a run be saved, but {setting}={value}; "
            f"make it a multiple of {each}"
        )
