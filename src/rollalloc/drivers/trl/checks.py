"""Checks TRL's settings, data and model before training. Errors say what was expected, what was found and what to do."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import version
from reprlib import repr as short
from typing import Any

from packaging.version import Version
from transformers import PreTrainedModel
from trl import is_conversational
from trl.trainer import utils as trl_utils

from rollalloc.core.recipe import Recipe
from rollalloc.core.rule import called
from rollalloc.data.prompts import warn_of_copies, warn_of_shared
from rollalloc.drivers.trl.dataset import check_conversations, values_of
from rollalloc.drivers.trl.distributed import is_sharded
from rollalloc.drivers.trl.generation import steps_per_batch
from rollalloc.drivers.trl.rewards import RewardFunctions, check_columns, how_to_name_a_metric
from rollalloc.drivers.trl.unsloth import is_unsloths
from rollalloc.models.settings import Clip
from rollalloc.named import in_shape
from rollalloc.rewards.overlong import doubts_of_penalty
from rollalloc.rules import rows
from rollalloc.rules.prompts import InOrder, Shuffled

log = logging.getLogger(__name__)

TESTED = Version("1.16")
_NEEDS_GPU = (1, 15)


def warn_if_newer() -> None:
    """Warn if TRL is newer than the newest tested release, `TESTED`."""
    installed = version("trl")
    if Version(installed).release[:2] > TESTED.release[:2]:
        log.warning(
            "TRL %s is newer than %s, the newest release that rollalloc's trainer was tested with. The trainer overrides "
            "private methods of TRL, and may ignore new settings. If training fails or behaves differently, pip install "
            "'trl==%s.*'",
            installed,
            TESTED,
            TESTED,
        )


def check_kernel(trainer: Any) -> None:
    """Check that TRL can compute log-probabilities on this device.

    TRL 1.15 computes them by a kernel of Triton, also on a CPU. Unsloth replaces the kernel, or the trainer's class.

    Raises:
        ValueError: it cannot.
    """
    if Version(version("trl")).release[:2] != _NEEDS_GPU or trainer.accelerator.device.type != "cpu":
        return
    kernel = getattr(trl_utils, "_ChunkedLogProbFunction", None)
    if not is_unsloths(trainer) and (kernel is None or kernel.__module__.startswith("trl.")):
        raise ValueError(
            "TRL 1.15 cannot train on a CPU: it computes log-probabilities by a kernel that needs a GPU; pip install "
            "'trl==1.16.*' or, for Unsloth, which needs TRL 1.15, import unsloth in the first line of the script"
        )


def rows_per_group(recipe: Recipe) -> int | None:
    """The largest number of rows of a group in a batch; None if the recipe's rules do not fix this number."""
    if recipe.group_rows is not None or recipe.rows != rows.Everything():
        return recipe.group_rows
    sizes = [getattr(stage.size, "n", None) for stage in recipe.stages]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def in_shape_of(args: Any, recipe: Recipe | str, parameters: Mapping[str, Any]) -> Recipe:
    """Make a recipe that is given by name, with sizes that fit TRL's generation batch. A recipe is returned unchanged.

        groups × rows per group = per_device_train_batch_size × processes × steps_per_generation

    The number of rows per group is `num_generations`, unless the parameters determine this number.

    Raises:
        ValueError: the name or a parameter is not allowed; or there are parameters, but the recipe is not given by name.
    """
    if isinstance(recipe, Recipe):
        if parameters:
            raise ValueError(
                f"parameters={dict(parameters)} are for a recipe that is given by name; set them in the recipe"
            )
        return recipe
    rows, n = args.generation_batch_size, args.num_generations
    made = in_shape(recipe, parameters, rows, n)
    own = rows_per_group(made)
    if own == 1 and "n" not in parameters and n != _least_divisor(rows):
        _warn_of_groups(recipe, rows, n)
        made = in_shape(recipe, {"n": n, "groups": max(1, rows // n), **parameters}, rows, n)
    elif own is not None and "groups" not in parameters and made.groups * own != rows and rows % own == 0:
        made = in_shape(recipe, {"groups": rows // own, **parameters}, rows, n)
    sizes = ", ".join(f"{stage.name}: {stage.size!r}" for stage in made.stages)
    log.info("the recipe has TRL's sizes: %d groups in a batch, %s, rows %r", made.groups, sizes, made.rows)
    _warn_of_more(made, n)
    return made


def _warn_of_groups(recipe: str, rows: int, n: int) -> None:
    log.warning(
        "%s is meant for one rollout of each of many prompts, but num_generations=%d gives it %d rollouts of each of %d "
        "prompts in a batch. For one rollout of each, set num_generations=%d, the smallest value that TRL accepts",
        *(recipe, n, n, max(1, rows // n), _least_divisor(rows)),
    )


def _warn_of_more(made: Recipe, n: int) -> None:
    """Warn if a recipe that got its sizes from `num_generations` may generate more rollouts of a prompt than that."""
    sizes = [getattr(stage.size, "n", None) for stage in made.stages]
    generated = sum(size for size in sizes if size is not None)
    if None not in sizes and generated > n:
        log.warning(
            "the recipe generates up to %d rollouts of each prompt, of which num_generations=%d are trained on: each is "
            "paid for. For other numbers, set the sizes in `parameters`, or give the recipe with its sizes, as in "
            "recipes.pods(groups, n, m)",
            generated,
            n,
        )


def check_sizes(args: Any, recipe: Recipe) -> None:
    """Raise a ValueError if TRL's batch size or `num_generations` differs from the recipe's."""
    steps_per_batch(args)
    each = rows_per_group(recipe)
    if each is None:
        return
    if each == 1:
        _check_counted(args, recipe)
    elif args.num_generations != each:
        stages = ", ".join(f"{stage.name}: {stage.size!r}" for stage in recipe.stages)
        raise ValueError(
            f"num_generations={args.num_generations} does not fit the recipe, which trains on {each} rows per group "
            f"(stages: {stages}; rows {called(recipe.rows)}); set num_generations={each}, or change the recipe; "
            "one that is given by its name, as in recipe='pilot_commit', gets TRL's sizes"
        )
    if args.generation_batch_size != recipe.groups * each:
        raise ValueError(
            f"the recipe trains on {recipe.groups} groups of {each} rows per batch, but TRL's generation batch has "
            f"{args.generation_batch_size} rows (per_device_train_batch_size × processes × steps_per_generation); make it "
            f"{recipe.groups * each}, or let the recipe have groups={args.generation_batch_size / each:g}"
        )


def _check_counted(args: Any, recipe: Recipe) -> None:
    """Check `num_generations` for a recipe that trains on one row per prompt.

    The right value would be 1, but TRL accepts only 2 or more. So `num_generations` must be the smallest
    divisor of the batch size, apart from 1. Other values raise an error, because users could take them for the
    number of rollouts per prompt.
    """
    if recipe.groups < 2:
        raise ValueError("the recipe trains on one row per batch, but TRL needs at least 2; give it more groups")
    least = _least_divisor(recipe.groups)
    if args.num_generations != least:
        raise ValueError(
            f"num_generations={args.num_generations}, but the recipe trains on one row per prompt. TRL does not accept "
            f"1: set num_generations={least}, the smallest divisor above 1 of a batch of {recipe.groups} rows. Under this "
            "recipe, num_generations only decides how TRL counts epochs, and how many completions of a prompt an "
            "evaluation generates (num_generations_eval)"
        )


def _least_divisor(rows: int) -> int:
    """The smallest divisor above 1, which for one row per prompt stands for the `num_generations` of 1 that TRL refuses."""
    return next((number for number in range(2, rows + 1) if rows % number == 0), 2)


def warn_of_passes(args: Any, recipe: Recipe, prompts: int) -> None:
    """Warn if training will pass over the data more often than `num_train_epochs` says.

    TRL's epoch ends after `num_generations` completions of each prompt, and `num_generations` is at least 2. A recipe that
    trains on one row per prompt therefore passes over the data `num_generations` times in one epoch of TRL.
    """
    if args.max_steps > 0 or rows_per_group(recipe) != 1:
        return
    times, epochs = args.num_generations, args.num_train_epochs
    steps = max(1, round(epochs * prompts / recipe.groups)) * steps_per_batch(args)
    log.warning(
        "num_train_epochs=%g: TRL's epoch ends after num_generations=%d completions of each prompt, but the recipe trains "
        "on one completion of each. So it passes over the data %d times in each epoch, %g times in all; for %g passes set "
        "max_steps=%d. rollalloc/epoch counts the passes",
        epochs,
        times,
        times,
        times * epochs,
        epochs,
        steps,
    )


def check_settings(args: Any, recipe: Recipe) -> None:
    """Raise a ValueError for settings of TRL that would be ignored without a message."""
    if args.scale_rewards not in ("group", True) or args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "the recipe computes the advantages, so scale_rewards and multi_objective_aggregation must not be set, got "
            f"{args.scale_rewards!r} and {args.multi_objective_aggregation!r}; leave both out. reinforce, raft and "
            "foresight do not divide by a standard deviation. For groups without this division, use recipes.dr_grpo or, "
            "with another recipe for groups, dataclasses.replace(recipe, advantage=OverGroup(dr_grpo)); both names are in "
            "rollalloc.rules.advantages"
        )
    if args.max_completion_length == 1:
        log.warning(
            "max_completion_length=1: each completion is a single token. If this is the end of sequence, the answer is "
            "empty; otherwise the answer is cut off. If answers are longer than one token, set a larger value"
        )
    if args.use_vllm:
        _check_vllm(args)
    if not recipe.trains_older_rows:
        return
    for name in ("loss_type", "off_policy_mask_threshold", "use_liger_kernel"):
        value = getattr(args, name, None)
        if value if name != "loss_type" else value in ("vespo", "luspo"):
            raise ValueError(
                f"{name}={value!r} does not support an importance weight for each token, but rows that were sampled from "
                f"older weights need it; give the recipe max_staleness=0 and no replay, or use another {name}"
            )


def _check_vllm(args: Any) -> None:
    """Raise an error if TRL's importance weights for vLLM were changed, because the driver computes its own weights."""
    usual = {field.name: field.default for field in fields(args)}
    for name in ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
                 "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"):  # fmt: skip
        if getattr(args, name, None) != usual.get(name):
            raise ValueError(
                f"{name}={getattr(args, name)!r}: under a recipe, the driver computes an importance weight of at most "
                f"{Clip().stale:g} for each token of vLLM's rollouts; do not set it, or turn the weights off with "
                "vllm_importance_sampling_correction=False"
            )


def in_order(recipe: Recipe, args: Any) -> Recipe:
    """Return the recipe or, if `shuffle_dataset=False`, a copy that draws prompts in the data set's order.

    Raises:
        ValueError: `shuffle_dataset=False`, but the recipe has its own rule for drawing prompts.
    """
    if args.shuffle_dataset or isinstance(recipe.prompts, InOrder):
        return recipe
    if recipe.prompts != Shuffled():
        raise ValueError(
            f"shuffle_dataset=False, but the recipe draws the prompts by {called(recipe.prompts)}; do not set "
            "shuffle_dataset, or give the recipe prompts=InOrder() of rollalloc.rules.prompts"
        )
    return replace(recipe, prompts=InOrder())


def check_metric(recipe: Recipe, rewards: RewardFunctions) -> None:
    """Raise a ValueError if the recipe reads the metric as a success rate, but the metric is a weighted sum of rewards."""
    if recipe.rate_readers and rewards.is_weighted_sum:
        parts = " + ".join(f"{weight:g} · {name}" for weight, name in zip(rewards.weights, rewards.names, strict=True))
        raise ValueError(
            f"{recipe.rate_readers[0]} reads the metric as a success rate, but the metric is the whole reward, {parts}; "
            f"{how_to_name_a_metric(rewards.names)}"
        )


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise an error for arguments of TRL's trainer that the driver does not support."""
    if given.get("rollout_func") is not None:
        raise ValueError(
            "rollout_func is not supported under a recipe: the driver generates the rollouts that the recipe orders; "
            "leave rollout_func out"
        )


def check_model(model: Any, args: Any, peft_config: Any) -> None:
    """Raise an error if `beta` needs a reference model, but TRL cannot load it because the model was never saved."""
    adapter = peft_config is not None or hasattr(model, "peft_config")
    if args.beta and isinstance(model, PreTrainedModel) and not adapter and not model.config._name_or_path:
        raise ValueError(
            f"beta={args.beta} needs a reference model, which TRL loads by the model's name or folder, but this model was "
            "never saved; call model.save_pretrained(folder) and pass the folder as the model"
        )


def check_trainable(model: Any) -> None:
    """Raise an error if no weight of the model is trained. TRL would run to the end and change nothing."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "no weight of the model requires a gradient, so training would change nothing; load a saved adapter with "
            "PeftModel.from_pretrained(..., is_trainable=True), or call model.requires_grad_(True)"
        )


def check_indexed(dataset: Any) -> None:
    """Raise a TypeError if the data set has no length or cannot be indexed by row number."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            "the recipe draws the prompts, so train_dataset must be map-style (with a length, indexed by number), got "
            f"{type(dataset).__name__}; load it without streaming"
        )


_BY_ORDER = (
    "A resumed run tells these rows apart by their order: before you reorder the data set, name a column of unique keys "
    "(key=...), if there is one"
)


def check_data(dataset: Any, tokenizer: Any, turns: Collection[str] = (), key: str | None = None) -> None:
    """Raise an error for training data that the driver does not support.

    The form of the prompts is checked in all rows; whether the columns can be used, in the first row.

    Args:
        dataset: one prompt per row. The column `prompt` may be missing if environments supply the prompts.
        tokenizer: the model's tokenizer.
        turns: which of the arguments "tools" and "environment_factory" were given.
        key: name of the column by which a resumed run finds its prompts. None: by their content.

    Raises:
        ValueError: the data set is empty, has images or no prompts, has a column with a reserved name, or a prompt is
            text although conversations are needed.
    """
    if not len(dataset):
        raise ValueError("the training data set is empty; give a data set with one prompt per row")
    first = dataset[0]
    check_columns(first, "the training data set")
    if "image" in first or "images" in first:
        raise ValueError("prompts with images are not supported under a recipe; use TRL's GRPOTrainer for them")
    if "prompt" not in first:
        if "environment_factory" in turns:
            return
        raise ValueError(
            f"a row of the training data needs a column `prompt`, got {', '.join(first)}; rename the column with the "
            f"prompts, dataset.rename_column({next(iter(first), '...')!r}, 'prompt')"
        )
    if turns:
        check_conversations(dataset, "train_dataset", turns)
    check_prompt_forms(dataset, "train_dataset")
    warn_of_copies(values_of(dataset, "prompt"), "train_dataset", _BY_ORDER if key is None else "")
    talk = is_conversational({"prompt": first["prompt"]})
    if talk and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the prompts are conversations, but the tokenizer has no chat template; set tokenizer.chat_template, or give "
            "the prompts as text"
        )


def check_prompt_forms(dataset: Any, where: str) -> None:
    """Raise an error for a prompt that is neither text nor a list of messages.

    Warn about prompts that end with an assistant's message. In data for supervised training, this is the answer.

    Args:
        dataset: any data set. It is not checked if it cannot be indexed or has no column `prompt`.
        where: name of the data set, for the error.

    Raises:
        ValueError: there is such a prompt. The message names its row.
    """
    if "prompt" not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "__len__"):
        return
    continued: list[int] = []
    for row, prompt in enumerate(dataset["prompt"]):
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, Sequence) or not prompt or not all(isinstance(part, Mapping) for part in prompt):
            raise ValueError(
                f"row {row} of {where} has the prompt {short(prompt)}; expected text or messages [{{role, content}}], at "
                f"least one. Fix the row, or remove it with {where}.filter(...)"
            )
        if prompt[-1].get("role") == "assistant":
            continued.append(row)
    if continued:
        log.warning(
            "%d of %d prompts of %s end with an assistant's message, the first in row %d. The model continues this message. "
            "If it is the answer, remove it from the prompts",
            len(continued), len(dataset), where, continued[0],
        )  # fmt: skip


def check_evaluated(dataset: Any, train: Any = None) -> None:
    """Check the column names of held-out data. Warn about held-out prompts that are also in the training set.

    Args:
        dataset: TRL's `eval_dataset`: one data set, several by name, or None.
        train: TRL's `train_dataset`.

    Raises:
        ValueError: a column has the name of an argument that TRL passes to reward functions.
    """
    if dataset is None:
        return
    for name, each in (dataset if isinstance(dataset, dict) else {"": dataset}).items():
        check_columns(getattr(each, "column_names", None) or (), f"eval_dataset{name and f'[{name!r}]'}")
        check_prompt_forms(each, f"eval_dataset{name and f'[{name!r}]'}")
        warn_of_shared(train, each, f"eval_dataset{name and f'[{name!r}]'}")


def check_turns(trainer: Any) -> None:
    """Raise an error if rollouts of several turns would make processes wait for each other forever.

    A sharded model needs all processes for each forward pass, but rollouts take different numbers of turns. Processes
    that share vLLM must call vLLM equally often. The driver ensures this in training, but cannot in TRL's own evaluation.
    """
    processes = trainer.accelerator.num_processes
    if processes > 1 and is_sharded(trainer):
        raise ValueError(
            f"tools and environments with a sharded model on {processes} processes are not supported under a recipe: "
            "rollouts take unequal numbers of turns, and the processes would wait for each other; use one process, or do "
            "not shard the model"
        )
    shared = trainer.use_vllm and (trainer.vllm_mode == "server" or trainer.vllm_tensor_parallel_size > 1)
    if processes > 1 and shared and trainer.args.eval_strategy != "no":
        raise ValueError(
            f"eval_strategy={str(trainer.args.eval_strategy)!r}: TRL's evaluation would wait forever, because {processes} "
            "processes share vLLM, and rollouts with tools or environments take unequal numbers of turns; set "
            "eval_strategy='no', use one process, or vllm_mode='colocate' with vllm_tensor_parallel_size=1"
        )


def check_processes(args: Any) -> None:
    """Warn if `accelerate launch` was used without a GPU. Then there is only one process, whatever `--num_processes` is."""
    launched = "ACCELERATE_USE_CPU" in os.environ  # set by `accelerate launch` when it starts a single process
    if launched and args.world_size == 1 and args.device.type == "cpu":
        log.warning(
            "this is the only process: without GPUs `accelerate launch` starts a single process, whatever --num_processes "
            "is; for N processes use `torchrun --nproc_per_node N`"
        )


def check_stops(recipe: Recipe, args: Any, can_stop: bool) -> None:
    """Check a recipe with a stop rule. Warn if the generator cannot stop rollouts.

    Raises:
        ValueError: vLLM generates, which TRL gives no way to stop a rollout.
    """
    if not recipe.stopping:
        return
    if args.use_vllm:
        raise ValueError(
            f"the recipe stops rollouts of its stage {recipe.stages[recipe.stopping[0]].name!r}, which is not possible with "
            "use_vllm=True: all would be generated to their end; set use_vllm=False, or choose a recipe that does not stop "
            "rollouts, such as darts with tail='exact'"
        )
    if not can_stop:
        log.warning(
            "the recipe stops rollouts, but here every rollout is generated to its end: only rollalloc's sampler in a "
            "single process can stop rollouts"
        )


_PENALTY = "soft_overlong_punishment_reward"  # name of TRL's own reward function for DAPO's overlong penalty


def check_limit(recipe: Recipe, args: Any, several_turns: bool, rewards: Sequence[str] = ()) -> None:
    """Check a recipe that stops rollouts at a length. `rewards` are the names of the reward functions.

    Raises:
        ValueError: a rollout has several turns, so that a limit on its length would also count the tools' answers; or
            `generation_kwargs` gives vLLM a maximum that replaces the limit.
    """
    if recipe.limit is None:
        return
    if several_turns:
        raise ValueError(
            "the recipe stops rollouts at a length (limit_at), which is not supported with tools and environments; leave "
            "limit_at out"
        )
    if args.use_vllm and "max_tokens" in (args.generation_kwargs or {}):
        raise ValueError(
            "generation_kwargs['max_tokens'] replaces the length at which the recipe stops rollouts (limit_at); set "
            "max_completion_length instead, or leave limit_at out"
        )
    if args.mask_truncated_completions:
        log.warning(
            "mask_truncated_completions leaves the rollouts out of the loss that the recipe stops (limit_at), so that the "
            "model does not learn to avoid them"
        )
    for doubt in doubts_of_penalty(recipe) if _PENALTY in rewards else ():
        log.warning(doubt)


def check_saving(args: Any, state: Any) -> None:
    """Raise an error if a checkpoint would be saved between the optimizer steps of one batch.

    Such a checkpoint could not be resumed exactly.

    Raises:
        ValueError: `save_steps`, `eval_steps` or `max_steps` is not a multiple of the steps per batch.
    """
    each = steps_per_batch(args)
    saves = {"steps": ("save_steps", state.save_steps), "best": ("eval_steps", state.eval_steps)}
    name, every = saves.get(str(getattr(args.save_strategy, "value", args.save_strategy)), ("", 0))
    wrong = {name: every} if name and every % each else {}
    if name == "save_steps" and state.max_steps % each:
        wrong["max_steps"] = state.max_steps
    for setting, value in wrong.items():
        raise ValueError(
            f"a run can be saved only between two batches, and a batch takes {each} optimizer steps, but {setting}={value}; "
            f"make it a multiple of {each}"
        )
