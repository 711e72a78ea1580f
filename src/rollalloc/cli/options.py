"""Options that several commands share, declared once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

_LEAST, _MOST = 1e-30, 2**63  # of numbers: less is 0 to a float32 that divides by it, more is none to an int64
_WHAT, _HOW, _STREAM, _WHERE = "What to train on", "Training", "Streaming", "Output"


def _option(help: str, panel: str, *names: str, **others: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **others)


def place(text: str | Path) -> Path:
    """A folder by its name, whatever is there; a variable of the shell that is not set must not mean the current one.

    Raises:
        typer.BadParameter: it is empty.
    """
    if not str(text).strip():
        raise typer.BadParameter("expected the name of a folder, got an empty one; give . for the current folder")
    return Path(text)


def folder(text: str | Path) -> Path:
    """A folder to write into, as an option gives it.

    Raises:
        typer.BadParameter: it is empty, a file, or a link that leads nowhere.
    """
    place(text)
    if Path(text).is_symlink() and not Path(text).exists():
        raise typer.BadParameter(f"{text} is a link that leads nowhere; give a folder, or remove it")
    there = next(above for above in (Path(text), *Path(text).parents) if above.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is a file; give a folder")
    return Path(text)


def source(text: str | Path) -> Path:
    """A file to read, as an option gives it; whether it is there its reader says.

    Raises:
        typer.BadParameter: its name is empty, or it is a folder, a pipe or a device.
    """
    if not str(text).strip():
        raise typer.BadParameter("expected the name of a file, got an empty one")
    if Path(text).exists() and not Path(text).is_file():
        kind = "a folder" if Path(text).is_dir() else "a pipe or a device"
        raise typer.BadParameter(f"expected a file, {text} is {kind}")
    return Path(text)


def seconds(text: str | float) -> float:
    """A time to wait, as an option gives it.

    Raises:
        typer.BadParameter: it is none, or not from a tenth of a second to a day.
    """
    try:
        given = float(text)
    except ValueError:
        given = nan
    if not 0.1 <= given <= 86_400:  # not a number is neither
        raise typer.BadParameter(f"expected seconds from 0.1 to 86400, which is a day, got {text!r}; e.g. 2")
    return given


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line said of a run, whatever the recipe."""

    task: Annotated[
        str | None, _option("A built-in task: skills, walks, sort, or rg/NAME of reasoning-gym.", _WHAT)
    ] = None
    pool: Annotated[
        str, _option("Prompts of skills (balanced, mixed or late) or walks (mixed, late or long).", _WHAT)
    ] = "late"
    settings: Annotated[
        str,
        _option(
            "Of a task: defaults, the same shape, rate and optimizer for every recipe and task, or tuned, what a search "
            "found for this recipe on this task.",
            _WHAT,
        ),
    ] = "defaults"
    model: Annotated[str | None, _option("Or a causal language model, by name or folder.", _WHAT)] = None
    prompts: Annotated[
        list[Path] | None, _option("Parquet or JSONL in verl's schema; repeatable.", _WHAT, parser=source)
    ] = None
    heldout: Annotated[Path | None, _option("Such a file to evaluate on.", _WHAT, parser=source)] = None
    reward: Annotated[
        str | None, _option("package.module:function or file.py:function, called as verl's compute_score.", _WHAT)
    ] = None
    single_answer: Annotated[
        bool,
        _option(
            "Each held-out prompt has one right answer, its ground truth: evaluate without sampling.",
            _WHAT,
            "--single-answer",
        ),
    ] = False
    drop_overlong: Annotated[
        bool, _option("Leave out prompts that do not fit the model.", _WHAT, "--drop-overlong")
    ] = False
    max_new_tokens: Annotated[int | None, _option("Tokens of a rollout at most; 1024 by default.", _HOW)] = None
    temperature: Annotated[float, _option("Of sampling.", _HOW)] = 1.0
    kv_tokens: Annotated[
        int | None, _option("Tokens in the key-value cache at most; what does not fit waits its turn.", _HOW)
    ] = None
    learning_rate: Annotated[float | None, _option("AdamW's; by default the task's, or 1e-6.", _HOW)] = None
    adam_beta2: Annotated[
        float | None, _option("What AdamW's mean of the squared gradient keeps a step; 0.95 by default.", _HOW)
    ] = None
    max_grad_norm: Annotated[float | None, _option("Gradients are clipped to this norm; 1 by default.", _HOW)] = None
    adaptive_clip: Annotated[
        float | None,
        _option("And to so many times the running mean of their norms, 1.5 by default; 0: not.", _HOW),
    ] = None
    optimizer_steps: Annotated[int, _option("Optimizer steps per batch, the same for every recipe.", _HOW)] = 1
    warmup_steps: Annotated[int, _option("Optimizer steps over which the learning rate rises.", _HOW)] = 0
    schedule: Annotated[str, _option("Of the learning rate after that: constant, linear or cosine.", _HOW)] = "constant"
    schedule_steps: Annotated[
        int | None,
        _option(
            "Optimizer steps after which a linear or cosine rate is at its floor; by default it falls over --max-rollouts.",
            _HOW,
        ),
    ] = None
    schedule_floor: Annotated[float, _option("Share of the learning rate that is left then.", _HOW)] = 0.1
    aggregation: Annotated[str, _option("Of the loss over tokens: token_mean, sequence_mean or dr_grpo.", _HOW)] = (
        "token_mean"
    )
    dual_clip: Annotated[
        float | None, _option("A bad token loses at most this many times its advantage, e.g. 10.", _HOW)
    ] = None
    kl: Annotated[float, _option("Weight of the KL divergence to the initial model.", _HOW)] = 0.0
    tokens_per_forward: Annotated[
        int, _option("Tokens of one forward and backward pass; less needs less memory.", _HOW)
    ] = 8192
    precision: Annotated[str, _option("Of the update: fp32, bf16, or auto, bf16 on a GPU.", _HOW)] = "auto"
    lora: Annotated[
        int | None, _option("Train low-rank adapters of this rank instead of the model's own weights.", _HOW)
    ] = None
    lora_alpha: Annotated[float | None, _option("Their scale; twice the rank by default.", _HOW)] = None
    lora_target: Annotated[
        list[str] | None, _option("Layers that get one, e.g. q_proj; repeatable; by default all linear ones.", _HOW)
    ] = None
    sampling_dtype: Annotated[
        str, _option("Of the weights that sample: float32, or a copy of the model in bfloat16 or float16.", _HOW)
    ] = "float32"
    gradient_checkpointing: Annotated[
        bool, _option("Compute layers again in the backward pass; needs less memory.", _HOW, "--gradient-checkpointing")
    ] = False
    max_rollouts: Annotated[
        int | None, _option("Rollouts to pay at most; by default the task's, or 16 a prompt and at least 4096.", _HOW)
    ] = None
    target: Annotated[float | None, _option("Held-out accuracy at which to stop.", _HOW)] = None
    eval_every: Annotated[int | None, _option("Rollouts between two evaluations.", _HOW)] = None
    reward_workers: Annotated[int, _option("Processes that score; 0: in this one, if trusted.", _HOW)] = 1
    reward_limit: Annotated[float, _option("Seconds in which a sample must be scored.", _HOW)] = 10.0
    reward_cache: Annotated[int, _option("Scores to remember; 0 for a reward that is not deterministic.", _HOW)] = (
        10_000
    )
    overlong_buffer: Annotated[
        int | None, _option("Last tokens of a rollout over which DAPO's overlong penalty grows to -1.", _HOW)
    ] = None
    engine: Annotated[str, _option("sync: generate, then train; async: rollouts stream.", _STREAM)] = "sync"
    staleness: Annotated[
        int | None,
        _option("Updates that a rollout may be old, instead of the recipe's own; async trains beside it.", _STREAM),
    ] = None
    max_rows: Annotated[int | None, _option("Rollouts that are decoded at once at most.", _STREAM)] = None
    on_weight_update: Annotated[
        str, _option("async: rollouts that an update finds running: continue, restart or stop.", _STREAM)
    ] = "continue"
    keep_stopped: Annotated[
        bool,
        _option("async: go on from what a stopped rollout had, when its prompt comes soon.", _STREAM, "--keep-stopped"),
    ] = False
    overlap: Annotated[
        bool, _option("async: generation in a process of its own; without, runs are repeatable.", _STREAM)
    ] = True
    backend: Annotated[str, _option("async: what generates, own or vllm, where that is installed.", _STREAM)] = "own"
    generator_limit: Annotated[
        float,
        _option(
            "async: seconds without a sign of life after which a generator is given up, and the run saved.", _STREAM
        ),
    ] = 600.0
    device: Annotated[str | None, _option("cpu, cuda, ...; by default a GPU where there is one.", _HOW)] = None
    features: Annotated[
        str | None,
        _option(
            "For a recipe that predicts: a file that `rollalloc features` made, or none; by default made at the start.",
            _HOW,
        ),
    ] = None
    track: Annotated[list[str] | None, _option("tensorboard or wandb; repeatable.", _WHERE)] = None
    tasks: Annotated[Path, _option("Where built-in tasks are made and kept.", _WHERE, parser=folder)] = Path(
        "runs/tasks"
    )


def with_fields(kind: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make of a command whose first parameter is a dataclass, as `Given`, one that has each field of it as an option."""
    hints = get_type_hints(kind, include_extras=True)
    shared = [option(each.name, each.default, hints[each.name]) for each in fields(kind)]
    return lambda command: with_options(command, shared, lambda said: kind(**said))


def option(name: str, default: Any, hint: Any) -> inspect.Parameter:
    """A parameter that a command may be called with by its name only."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def with_options(
    command: Callable[..., None], shared: Sequence[inspect.Parameter], made_of: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """A command whose first parameter is made of what these options say, as one that has them beside its own.

    Where the command declares an option of the same name itself, that one holds.

    Args:
        command: the command.
        shared: the options, from `option`.
        made_of: the command's first argument, from what they say by name.
    """
    own = list(inspect.signature(command).parameters.values())[1:]
    shared = [each for each in shared if each.name not in {parameter.name for parameter in own}]
    hints = get_type_hints(command, include_extras=True)
    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]) for each in own]

    @wraps(command)
    def called(**options: Any) -> None:
        command(made_of({each.name: options.pop(each.name) for each in shared}), **options)

    called.__signature__ = inspect.Signature([*keyword, *shared])  # pyright: ignore[reportAttributeAccessIssue]
    called.__annotations__ = {each.name: each.annotation for each in (*keyword, *shared)}
    return called


def with_numbers_checked(command: Callable[..., None]) -> Callable[..., None]:
    """A command that refuses, before anything else, numbers beyond what PyTorch and NumPy can hold, whichever option's.

    What is no number or infinite is left to the option's own range, which says what it should be.
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
    """`key=value` pairs as a dictionary; a value that is JSON or a number is read as such, another one is text.

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
