"""Options that several commands share, and the functions that parse them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

# Limits of numbers: a smaller one becomes 0 as a float32, a larger one does not fit into an int64.
_LEAST, _MOST = 1e-30, 2**63
_WHAT, _HOW, _STREAM, _OUTPUT = "What to train on", "Training", "Streaming", "Output"


def titled(help: str, panel: str, *names: str, **others: Any) -> Any:
    """An option in a panel of the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **others)


def output(help: str, *names: str, **others: Any) -> Any:
    """An option in the panel on output."""
    return titled(help, _OUTPUT, *names, **others)


def place(text: str | Path) -> Path:
    """A folder by its name. An empty name is refused, so that an unset shell variable does not mean the current folder.

    Raises:
        typer.BadParameter: it is empty.
    """
    if not str(text).strip():
        raise typer.BadParameter("expected the name of a folder, got an empty one; give . for the current folder")
    return Path(text)


def folder_of_runs(text: str | Path) -> Path:
    """A folder to read, which need not exist yet.

    Raises:
        typer.BadParameter: its name is empty, or it is something other than a folder.
    """
    at = place(text)
    if at.is_symlink() and not at.exists():
        raise typer.BadParameter(f"{at} is a link that leads nowhere; give a folder, or remove it")
    if at.exists() and not at.is_dir():
        kind = "a file" if at.is_file() else "a pipe or a device"
        raise typer.BadParameter(f"{at} is {kind}; give a folder")
    return at


def folder(text: str | Path) -> Path:
    """A folder to write into.

    Raises:
        typer.BadParameter: it is empty, a file, or a link that leads nowhere.
    """
    at = place(text)
    if at.is_symlink() and not at.exists():
        raise typer.BadParameter(f"{at} is a link that leads nowhere; give a folder, or remove it")
    there = next(above for above in (at, *at.parents) if above.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is a file; give a folder")
    return at


def source(text: str | Path) -> Path:
    """A file to read. It may be missing; the function that reads it reports that.

    Raises:
        typer.BadParameter: its name is empty, or it is a folder, a pipe or a device.
    """
    if not str(text).strip():
        raise typer.BadParameter("expected the name of a file, got an empty one")
    if Path(text).exists() and not Path(text).is_file():
        kind = "a folder" if Path(text).is_dir() else "a pipe or a device"
        raise typer.BadParameter(f"expected a file, {text} is {kind}")
    return Path(text)


CheckpointMinutes = Annotated[
    float,
    output(
        "Minutes between two checkpoints of a run (0: not by time). One is always written at the end and on a stop."
    ),
]
Parameters = Annotated[
    list[str] | None, typer.Option("--set", help="A parameter of the recipe, key=value; repeatable.")
]
LabelledParameters = Annotated[
    list[str] | None, typer.Option("--set", help="A parameter of one of the recipes, LABEL.key=value; repeatable.")
]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The options on a model, its prompts, and how rollouts are sampled and scored."""

    task: Annotated[
        str | None,
        titled("Built-in task: skills/POOL, walks/POOL, sort, or rg/NAME such as rg/gcd.", _WHAT),
    ] = None
    model: Annotated[
        str | None, titled("Causal language model, by name or folder, instead of a built-in task.", _WHAT)
    ] = None
    prompts: Annotated[
        list[Path] | None,
        titled("Training prompts, Parquet or JSONL in verl's schema; repeatable.", _WHAT, parser=source),
    ] = None
    reward: Annotated[
        str | None,
        titled("Reward function, package.module:function or file.py:function, called as verl's compute_score.", _WHAT),
    ] = None
    drop_overlong: Annotated[
        bool, titled("Leave out prompts that do not fit the model's context.", _WHAT, "--drop-overlong")
    ] = False
    chat_template_args: Annotated[
        str | None,
        titled("Arguments of the chat template as a JSON object, e.g. '{\"enable_thinking\": false}'.", _WHAT),
    ] = None
    max_new_tokens: Annotated[int | None, titled("Maximum tokens per rollout (default: 1024).", _HOW)] = None
    temperature: Annotated[float, titled("Sampling temperature.", _HOW)] = 1.0
    kv_tokens: Annotated[
        int | None, titled("Maximum tokens in the key-value cache; rollouts that do not fit wait.", _HOW)
    ] = None
    reward_workers: Annotated[
        int, titled("Processes that score rollouts (0: this process, for a function you trust).", _HOW)
    ] = 1
    reward_limit: Annotated[float, titled("Time limit for scoring one rollout, in seconds.", _HOW)] = 10.0
    overlong_buffer: Annotated[
        int | None, titled("Last tokens of a rollout over which DAPO's overlong penalty grows to -1.", _HOW)
    ] = None
    max_rows: Annotated[int | None, titled("Maximum rollouts decoded at once.", _STREAM)] = None
    device: Annotated[str | None, titled("Device: cpu, cuda, ... (default: a GPU if there is one).", _HOW)] = None
    tasks: Annotated[Path, output("Folder in which built-in tasks are created and kept.", parser=folder)] = Path(
        "runs/tasks"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(SamplingOptions):
    """The options on a run, whatever its recipe. `rollalloc.cli.sources` turns them into a `Config`."""

    settings: Annotated[
        str,
        titled(
            "Settings on a built-in task. defaults: the same shape, learning rate and optimizer for every recipe and task. "
            "tuned: found by a search for this recipe on this task.",
            _WHAT,
        ),
    ] = "defaults"
    heldout: Annotated[
        Path | None, titled("Held-out prompts to evaluate on, in the same schema.", _WHAT, parser=source)
    ] = None
    single_answer: Annotated[
        bool,
        titled(
            "Each held-out prompt has one right answer, its ground truth: evaluate without sampling.",
            _WHAT,
            "--single-answer",
        ),
    ] = False
    accept_overlap: Annotated[
        bool,
        titled(
            "Train although more than 5% of the held-out prompts are in the training set.", _WHAT, "--accept-overlap"
        ),
    ] = False
    learning_rate: Annotated[
        float | None, titled("AdamW learning rate (default: the task's, or 1e-6 for a model of your own).", _HOW)
    ] = None
    adam_beta2: Annotated[float | None, titled("AdamW beta2 (default: 0.95).", _HOW)] = None
    max_grad_norm: Annotated[float | None, titled("Maximum gradient norm (default: 1).", _HOW)] = None
    averaging: Annotated[
        int | None,
        titled(
            "Sample, evaluate and save an average of the weights over about this many last rows (default: 640; 0: off).",
            _HOW,
        ),
    ] = None
    optimizer_steps: Annotated[int, titled("Optimizer steps per batch, the same for every recipe.", _HOW)] = 1
    warmup_steps: Annotated[int, titled("Optimizer steps of learning-rate warm-up.", _HOW)] = 0
    schedule: Annotated[str, titled("Learning-rate schedule after warm-up: constant, linear or cosine.", _HOW)] = (
        "constant"
    )
    schedule_steps: Annotated[
        int | None,
        titled(
            "Optimizer steps until a linear or cosine rate has fallen to a tenth (default: it falls over --max-rollouts).",
            _HOW,
        ),
    ] = None
    aggregation: Annotated[str, titled("Loss aggregation over tokens: token_mean, sequence_mean or dr_grpo.", _HOW)] = (
        "token_mean"
    )
    dual_clip: Annotated[
        float | None, titled("Dual clip: maximum loss of a bad token, as a multiple of its advantage, e.g. 10.", _HOW)
    ] = None
    kl: Annotated[float, titled("Coefficient of the KL divergence to the initial model.", _HOW)] = 0.0
    tokens_per_forward: Annotated[
        int, titled("Tokens per forward and backward pass; fewer need less memory.", _HOW)
    ] = 8192
    precision: Annotated[str, titled("Precision of the update: fp32, bf16, or auto, which is bf16 on a GPU.", _HOW)] = (
        "auto"
    )
    lora: Annotated[int | None, titled("LoRA rank: train adapters instead of the model's own weights.", _HOW)] = None
    lora_alpha: Annotated[float | None, titled("LoRA alpha (default: 2 × rank).", _HOW)] = None
    lora_target: Annotated[
        list[str] | None, titled("LoRA target layer, e.g. q_proj; repeatable (default: all linear layers).", _HOW)
    ] = None
    sampling_dtype: Annotated[
        str, titled("Data type of the weights that sample: float32, or a copy in bfloat16 or float16.", _HOW)
    ] = "float32"
    gradient_checkpointing: Annotated[
        bool, titled("Recompute activations in the backward pass; needs less memory.", _HOW, "--gradient-checkpointing")
    ] = False
    max_rollouts: Annotated[
        int | None, titled("Rollout budget (default: the task's, or 16 per prompt and at least 4096).", _HOW)
    ] = None
    target: Annotated[float | None, titled("Held-out accuracy at which the run stops.", _HOW)] = None
    eval_every: Annotated[
        int | None,
        titled(
            "Rollouts between two evaluations (default: a tenth of the budget, or the task's if that is less).", _HOW
        ),
    ] = None
    engine: Annotated[str, titled("sync: generate, then train; async: rollouts stream.", _STREAM)] = "sync"
    staleness: Annotated[
        int | None,
        titled("Maximum staleness in updates, instead of the recipe's own; async needs 1 to overlap.", _STREAM),
    ] = None
    ahead: Annotated[
        int | None,
        titled(
            "async: minimum batches generated while one trains (default: the recipe's, mostly 1); raises --staleness.",
            _STREAM,
        ),
    ] = None
    overlap: Annotated[
        bool, titled("async: generate in a separate process; without it, runs are repeatable.", _STREAM)
    ] = True
    generator_limit: Annotated[
        float,
        titled(
            "async: save and end the run after this many seconds without a sign of life from the generator.", _STREAM
        ),
    ] = 600.0
    features: Annotated[
        str | None,
        titled(
            "For a recipe that predicts: a file from `rollalloc features`, or none (default: computed at the start).",
            _HOW,
        ),
    ] = None
    track: Annotated[list[str] | None, output("Tracker: tensorboard or wandb; repeatable.")] = None


def with_fields(kind: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameter is a dataclass such as `RunOptions`, an option for each of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    shared = [option(field.name, field.default, hints[field.name]) for field in fields(kind)]
    return lambda command: with_options(command, shared, lambda values: kind(**values))


def option(name: str, default: Any, hint: Any) -> inspect.Parameter:
    """A keyword-only parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def with_options(
    command: Callable[..., None], shared: Sequence[inspect.Parameter], make_argument: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """Add options to a command. Its first argument is made from them.

    An option that the command itself declares under the same name takes precedence.

    Args:
        command: the command.
        shared: the options, from `option`.
        make_argument: makes the command's first argument from the values of the options, by name.
    """
    own = list(inspect.signature(command).parameters.values())[1:]
    own_names = {parameter.name for parameter in own}
    shared = [parameter for parameter in shared if parameter.name not in own_names]
    hints = get_type_hints(command, include_extras=True)
    keyword = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]) for parameter in own
    ]

    @wraps(command)
    def called(**options: Any) -> None:
        command(make_argument({parameter.name: options.pop(parameter.name) for parameter in shared}), **options)

    called.__signature__ = inspect.Signature([*keyword, *shared])  # pyright: ignore[reportAttributeAccessIssue]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*keyword, *shared)}
    return called


def with_numbers_checked(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command first refuse numbers that PyTorch and NumPy cannot represent, in any option.

    NaN and infinity are left to the check of the option's own range.
    """

    @wraps(command)
    def called(**options: Any) -> None:
        for name, value in options.items():
            if isinstance(value, (int, float)) and isfinite(value) and value and not _LEAST <= abs(value) < _MOST:
                raise typer.BadParameter(
                    f"expected 0, or a number from {_LEAST:g} to {_MOST:.3g} or its negative, got {value!r:.40}",
                    param_hint=f"'--{name.replace('_', '-')}'",
                )
        command(**options)

    return called


def parameters_of(pairs: list[str] | None) -> dict[str, Any]:
    """`key=value` pairs as a dictionary; a value that is not JSON or a number is text.

    If a key is repeated, its last value counts, so that a command line can be extended.

    Raises:
        ValueError: a pair without "=".
    """
    parameters: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"expected key=value, got {pair!r}; e.g. groups=16")
        parameters[key] = _value(value)
    return parameters


def _value(text: str) -> Any:
    for read in (json.loads, float):  # JSON has no ".5"
        try:
            return read(text)
        except ValueError:
            continue
    return text


def listed(option: str, text: str, kind: type = int, example: str = "0,1,2") -> list[Any]:
    """Numbers between commas.

    Raises:
        ValueError: something else.
    """
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        wanted = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option}: expected {wanted} separated by commas, got {text!r}; e.g. {example}") from None


def named_recipes(recipes: Sequence[str]) -> dict[str, str]:
    """`LABEL=NAME` or `NAME`, as label → name.

    Raises:
        ValueError: a label occurs twice, or cannot be the name of a folder.
    """
    named: dict[str, str] = {}
    for recipe in recipes:
        label, equals, name = recipe.strip().partition("=")
        if not equals:
            label, name = label.replace(":", "."), label
        if not label:
            raise ValueError(
                f"--recipes: expected NAME or LABEL=NAME between commas, got {recipe!r} in {','.join(recipes)!r}"
            )
        if "/" in label:
            raise ValueError(f"--recipes: {label!r} names a folder, which cannot hold a '/'; give another LABEL={name}")
        if label in named:
            raise ValueError(f"--recipes names {label!r} twice; give one of them a label of its own, LABEL={name}")
        named[label] = name
    return named


def parameters_by_label(
    pairs: list[str] | None, matched: str | None, named: Mapping[str, str], *, lenient: bool = False
) -> dict[str, dict[str, Any]]:
    """The parameters of each recipe by label: its shape for `groups=G,n=N`, if it has one, updated by `label.key=value`.

    Raises:
        ValueError: a value has another form, a label is unknown, or, unless `lenient`, a recipe does not have that shape.
    """
    from rollalloc.named import RECIPES

    shaped = {label: name for label, name in named.items() if not lenient or name in RECIPES}
    parameters = {label: _matched_shape(matched, shaped[label]) if label in shaped else {} for label in named}
    for path, value in parameters_of(pairs).items():
        label, _, key = path.rpartition(".")
        if label not in parameters:
            raise ValueError(
                f"--set {path}: expected LABEL.key with one of {', '.join(named)}; e.g. {next(iter(named))}.groups=8"
            )
        parameters[label][key] = value
    return parameters


def _matched_shape(text: str | None, recipe: str) -> dict[str, Any]:
    from rollalloc.train.defaults import matched

    if text is None:
        return {}
    shape = parameters_of(text.split(","))
    if set(shape) != {"groups", "n"} or not all(type(value) is int for value in shape.values()):
        raise ValueError(f"--matched expects groups=G,n=N, got {text!r}; e.g. groups=16,n=8")
    return matched(recipe, **shape)
