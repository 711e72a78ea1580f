"""Options that several commands share, and the functions that parse them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

# Limits for the absolute value of an option. A smaller number would become 0 in float32, and a larger one does not fit
# into int64.
_LEAST, _MOST = 1e-30, 2**63
_WHAT, _HOW, _STREAM, _OUTPUT = "What to train on", "Training", "Streaming", "Output"


def titled(help: str, panel: str | None, *names: str, **others: Any) -> Any:
    """An option in a panel of the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **others)


def output(help: str, *names: str, **others: Any) -> Any:
    """An option in the help's panel for output."""
    return titled(help, _OUTPUT, *names, **others)


def fields_in(panel: str | None) -> Callable[..., Any]:
    """Return a function that makes a field of a dataclass of options (see `with_fields`).

    The help shows the option in this panel. The returned function takes the field's default, the help text, the option's
    names (only if they differ from the field's name), and further arguments of `typer.Option`.
    """

    def made(default: Any, help: str, *names: str, **others: Any) -> Any:
        return field(default=default, metadata={"option": titled(help, panel, *names, **others)})

    return made


in_no_panel, on_data, on_training, on_streaming, on_output = map(fields_in, (None, _WHAT, _HOW, _STREAM, _OUTPUT))


def place(text: str | Path) -> Path:
    """The path of a folder. An empty name is an error, because an unset shell variable would mean the current folder.

    Raises:
        typer.BadParameter: the name is empty.
    """
    if not str(text).strip():
        raise typer.BadParameter("expected the name of a folder, got an empty one; give . for the current folder")
    return Path(text)


def folder(text: str | Path) -> Path:
    """The path of a folder, which may not exist yet.

    Raises:
        typer.BadParameter: the name is empty, or the path is a file or a broken link.
    """
    at = place(text)
    if at.is_symlink() and not at.exists():
        raise typer.BadParameter(f"{at} is a link to something that does not exist; give a folder, or remove the link")
    there = next(above for above in (at, *at.parents) if above.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is a file; give a folder")
    return at


def file_path(text: str | Path) -> Path:
    """The path of a file to read or to write, which may not exist yet.

    Raises:
        typer.BadParameter: the name is empty, or the path is a folder, a pipe or a device.
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
        "Minutes between two checkpoints of a run (0: not by time). A run that ends or is stopped always writes one."
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
    """The options for a model, its prompts, and the sampling and scoring of rollouts."""

    task: str | None = on_data(None, "Built-in task: skills/POOL, walks/POOL, sort, or rg/NAME such as rg/gcd.")
    model: str | None = on_data(None, "Causal language model, by name or folder, instead of a built-in task.")
    prompts: list[Path] | None = on_data(
        None, "Training prompts, Parquet or JSONL in verl's schema; repeatable.", parser=file_path
    )
    reward: str | None = on_data(
        None, "Reward function, package.module:function or file.py:function, called as verl's compute_score."
    )
    drop_overlong: bool = on_data(False, "Leave out prompts that do not fit the model's context.", "--drop-overlong")
    chat_template_args: str | None = on_data(
        None, "Arguments of the chat template as a JSON object, e.g. '{\"enable_thinking\": false}'."
    )
    max_new_tokens: int | None = on_training(None, "Maximum tokens per rollout (default: 1024).")
    temperature: float = on_training(1.0, "Sampling temperature.")
    kv_tokens: int | None = on_training(
        None, "Maximum tokens in the key-value cache; rollouts that do not fit wait (default: no limit)."
    )
    reward_workers: int = on_training(1, "Processes that score rollouts (0: this process, for a function you trust).")
    reward_limit: float = on_training(10.0, "Time limit for scoring one rollout, in seconds.")
    overlong_buffer: int | None = on_training(
        None,
        "DAPO's overlong penalty grows from 0 to -1 over this many tokens before the limit (default: no penalty).",
    )
    max_rows: int | None = on_streaming(None, "Maximum rollouts decoded at once (default: 1024).")
    device: str | None = on_training(None, "Device: cpu, cuda, ... (default: a GPU if there is one).")
    tasks: Path = on_output(Path("runs/tasks"), "Folder in which built-in tasks are created and kept.", parser=folder)


@dataclass(frozen=True, kw_only=True)
class RunOptions(SamplingOptions):
    """The options of a run that every recipe shares. `rollalloc.cli.sources` turns them into a `Config`."""

    settings: str = on_data(
        "defaults",
        "Settings on a built-in task. defaults: the same shape, learning rate and optimizer for every recipe and task. "
        "tuned: found by a search for this recipe on this task.",
    )
    heldout: Path | None = on_data(None, "Held-out prompts to evaluate on, in the same schema.", parser=file_path)
    single_answer: bool = on_data(
        False,
        "Each held-out prompt has one right answer, its ground truth: compute the accuracy exactly, without sampling.",
        "--single-answer",
    )
    accept_overlap: bool = on_data(
        False, "Train although more than 5% of the held-out prompts are in the training set.", "--accept-overlap"
    )
    learning_rate: float | None = on_training(
        None, "AdamW learning rate (default: the task's, or 1e-6 for a model of your own)."
    )
    adam_beta2: float | None = on_training(None, "AdamW beta2 (default: 0.95).")
    max_grad_norm: float | None = on_training(None, "Maximum gradient norm (default: 1).")
    averaging: int | None = on_training(
        None,
        "Sample, evaluate and save weights averaged over about this many trained rollouts (default: 640; 0: off).",
    )
    optimizer_steps: int = on_training(1, "Optimizer steps per batch, the same for every recipe.")
    warmup_steps: int = on_training(0, "Optimizer steps of learning-rate warm-up.")
    schedule: str = on_training("constant", "Learning-rate schedule after warm-up: constant, linear or cosine.")
    schedule_steps: int | None = on_training(
        None,
        "Optimizer steps until a linear or cosine rate is a tenth of its maximum (default: it falls over --max-rollouts).",
    )
    aggregation: str = on_training("token_mean", "Loss aggregation over tokens: token_mean, sequence_mean or dr_grpo.")
    dual_clip: float | None = on_training(
        None,
        "Dual clip: the loss of a token with advantage A < 0 is at most this number times |A|, e.g. 10 (default: off).",
    )
    kl: float = on_training(0.0, "Coefficient of the KL divergence to the initial model.")
    tokens_per_forward: int = on_training(8192, "Tokens per forward and backward pass; fewer need less memory.")
    precision: str = on_training("auto", "Precision of the update: fp32, bf16, or auto (bf16 on GPUs that support it).")
    lora: int | None = on_training(
        None, "LoRA rank: train adapters of this rank (default: train the model's own weights)."
    )
    lora_alpha: float | None = on_training(None, "LoRA alpha (default: 2 × rank).")
    lora_target: list[str] | None = on_training(
        None, "LoRA target layer, e.g. q_proj; repeatable (default: all linear layers)."
    )
    sampling_dtype: str = on_training(
        "float32", "Data type of the weights that sample: float32, or a copy in bfloat16 or float16."
    )
    gradient_checkpointing: bool = on_training(
        False, "Recompute activations in the backward pass; needs less memory.", "--gradient-checkpointing"
    )
    max_rollouts: int | None = on_training(
        None, "Rollout budget (default: the task's, or 16 per prompt and at least 4096)."
    )
    target: float | None = on_training(
        None,
        "Stop at this held-out accuracy, in (0, 1] (default: a built-in task's own target; otherwise use the whole budget). "
        "With 1, a built-in task uses its whole budget too.",
    )
    eval_every: int | None = on_training(
        None, "Rollouts between two evaluations (default: a tenth of the budget, but at most the task's value)."
    )
    engine: str = on_streaming(
        "sync", "sync: generate a batch, then train on it; async: start and score each rollout as a slot becomes free."
    )
    staleness: int | None = on_streaming(
        None,
        "Maximum staleness in updates; with async, 0 means no overlap (default: the recipe's, or more if --ahead needs it).",
    )
    ahead: int | None = on_streaming(
        None,
        "async: generate at least this many batches while a batch is trained (default: the recipe's, mostly 1).",
    )
    overlap: bool = on_streaming(True, "async: generate in a separate process. With --no-overlap, runs are repeatable.")
    generator_limit: float = on_streaming(
        600.0, "async: save and end the run after this many seconds without a sign of life from the generator."
    )
    features: str | None = on_training(
        None,
        "For recipes that predict: file from `rollalloc features`, or the word none (default: compute features first).",
    )
    track: list[str] | None = on_output(None, "Tracker: tensorboard, wandb or trackio; repeatable.")


def changed_options(options: Any, names: Sequence[str]) -> str:
    """The options that differ from their defaults, as a user would write them; "" if none differs.

    Args:
        options: an instance of a dataclass of options, such as `RunOptions`.
        names: names of the fields to compare.
    """
    default = {name: getattr(type(options), name) for name in names}
    changed = [name for name in names if getattr(options, name) != default[name]]
    return ", ".join(f"--{'no-' if default[name] is True else ''}{name.replace('_', '-')}" for name in changed)


def with_fields(kind: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose first parameter is a dataclass. Each field of the dataclass becomes an option."""
    hints = get_type_hints(kind)
    shared = [
        option(each.name, each.default, Annotated[hints[each.name], each.metadata["option"]]) for each in fields(kind)
    ]
    return lambda command: with_options(command, shared, lambda values: kind(**values))


def option(name: str, default: Any, hint: Any) -> inspect.Parameter:
    """A keyword-only parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def with_options(
    command: Callable[..., None], shared: Sequence[inspect.Parameter], make_argument: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """Add options to a command, and make its first argument from them.

    If the command itself declares an option of the same name, that option is used.

    Args:
        command: the command.
        shared: the options, from `option`.
        make_argument: gets the options' values by name, and makes the command's first argument from them.
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
    """Decorate a command so that its options refuse numbers that PyTorch and NumPy cannot represent.

    NaN and infinity are left to the range check of the option.
    """

    @wraps(command)
    def called(**options: Any) -> None:
        for name, value in options.items():
            if isinstance(value, (int, float)) and isfinite(value) and value and not _LEAST <= abs(value) < _MOST:
                raise typer.BadParameter(
                    f"expected 0, or a number whose absolute value is at least {_LEAST:g} and below {_MOST:.3g}, "
                    f"got {value!r:.40}",
                    param_hint=f"'--{name.replace('_', '-')}'",
                )
        command(**options)

    return called


def parameters_of(pairs: list[str] | None) -> dict[str, Any]:
    """Read `key=value` pairs into a dictionary. A value that is neither JSON nor a number is text.

    If a key is repeated, its last value counts, so that options can be added to the end of a command line.

    Raises:
        ValueError: a pair has no "=".
    """
    parameters: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"expected key=value, got {pair!r}; e.g. groups=16")
        parameters[key] = _value(value)
    return parameters


def _value(text: str) -> Any:
    for read in (json.loads, float):  # float, because ".5" is not valid JSON
        try:
            return read(text)
        except ValueError:
            continue
    return text


def listed(option: str, text: str, kind: type = int, example: str = "0,1,2") -> list[Any]:
    """Read numbers between commas.

    Raises:
        ValueError: an entry is not a number of this kind.
    """
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        wanted = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option}: expected {wanted} separated by commas, got {text!r}; e.g. {example}") from None


def named_recipes(recipes: Sequence[str]) -> dict[str, str]:
    """Parse entries `LABEL=NAME` or `NAME` into a dictionary from label to recipe name.

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
            raise ValueError(
                f"--recipes: the label {label!r} becomes the name of a folder, so it cannot contain '/'; give another "
                f"LABEL={name}"
            )
        if label in named:
            raise ValueError(f"--recipes names {label!r} twice; give one of them a label of its own, LABEL={name}")
        named[label] = name
    return named


def parameters_by_label(
    pairs: list[str] | None, matched: str | None, named: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The parameters of each recipe, by label: those set by pairs `label.key=value`, and the sizes for `matched`.

    Raises:
        ValueError: an entry is malformed, a label is unknown, or a method has no groups of this size.
    """
    given: dict[str, dict[str, Any]] = {label: {} for label in named}
    for path, value in parameters_of(pairs).items():
        label, _, key = path.rpartition(".")
        if label not in given:
            raise ValueError(
                f"--set {path}: expected LABEL.key with one of {', '.join(named)}; e.g. {next(iter(named))}.groups=8"
            )
        given[label][key] = value
    if matched is None:
        return given
    return {label: _matched_sizes(matched, named[label], each) | each for label, each in given.items()}


def _matched_sizes(text: str, recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    from rollalloc.named import sizes_of

    said = parameters_of(text.split(","))
    if set(said) != {"groups", "n"} or not all(type(value) is int and value > 0 for value in said.values()):
        raise ValueError(f"--matched expects groups=G,n=N, got {text!r}; e.g. groups=16,n=8")
    return sizes_of(recipe, given, rows=said["groups"] * said["n"], group_rows=said["n"])
