"""Options that several commands share, and the functions that parse them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from rollalloc.models.settings import Clip, Lora, Loss, Sampling, Streaming
from rollalloc.train.config import LEAST_ROLLOUTS, MAX_NEW_TOKENS, ROLLOUTS_PER_PROMPT, Config, Schedule

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


in_no_panel, on_data, on_training, on_output = map(fields_in, (None, _WHAT, _HOW, _OUTPUT))


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
        from rollalloc.data._files import what_to_do_with

        kind = f"a folder{what_to_do_with(Path(text))}" if Path(text).is_dir() else "a pipe or a device"
        raise typer.BadParameter(f"expected a file, {text} is {kind}")
    return Path(text)


Parameters = Annotated[
    list[str] | None, typer.Option("--set", help="A parameter of the recipe, key=value; repeatable.")
]
LabelledParameters = Annotated[
    list[str] | None, typer.Option("--set", help="A parameter of one of the recipes, LABEL.key=value; repeatable.")
]


_OWNERS: Mapping[str, type] = {
    "": Config,
    "sampling": Sampling,
    "streaming": Streaming,
    "schedule": Schedule,
    "lora": Lora,
    "loss": Loss,
    "loss.clip": Clip,
}


def described(name: str, note: str = "") -> str:
    """The help of an option that is a field of `Config`: the field's description in the docstring of its class.

    Of a flag, only what it does is shown, and no reference to the code. "None: ..." is the option's default, unless the
    note says what the option has instead.

    Args:
        name: the field, with the fields that lead to it, such as "loss.kl".
        note: what the option has beside the field.
    """
    owner, _, field_name = name.rpartition(".")
    section = (inspect.getdoc(_OWNERS[owner]) or "").partition("Attributes:\n")[2]
    found = re.search(rf"^ {{4}}{field_name}: (.*(?:\n {{8}}.*)*)", section, re.MULTILINE)
    assert found is not None, f"{name} is not described"
    text = re.sub(r"\s+", " ", found[1])
    text = re.sub(r"(?: \(|; see )`rollalloc[^`]*`\)?", "", text).replace("`", "")
    text = re.sub(r"^True: (.*?)(?: False: .*)?$", r"\1", text)
    text = re.sub(r"\bNone: (.*?)\.(?= |$)", "" if note else r"Default: \1.", text).rstrip()
    return f"{text[0].upper()}{text[1:]} {note}".rstrip()


_OWN: Any = object()


def of_config(panel: str, name: str, note: str = "", *names: str, default: Any = _OWN, **others: Any) -> Any:
    """Like `fields_in(panel)`, for a field of `Config`: its default, if no other is given, and its description as help."""
    owner, _, field_name = name.rpartition(".")
    if default is _OWN:
        default = next(each.default for each in fields(_OWNERS[owner]) if each.name == field_name)
    return fields_in(panel)(default, described(name, note), *names, **others)


CheckpointMinutes = Annotated[float, output(described("checkpoint_minutes", "0: no checkpoints by time."))]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The options for a model, its prompts, and the sampling and scoring of rollouts."""

    task: str | None = on_data(None, "Built-in task: skills/POOL, walks/POOL, sort, or rg/NAME such as rg/gcd.")
    model: str | None = on_data(None, "Causal language model, by name or folder, instead of a built-in task.")
    prompts: list[Path] | None = of_config(_WHAT, "prompts", "Repeatable.", default=None, parser=file_path)
    reward: str | None = of_config(_WHAT, "reward", default=None)
    drop_overlong: bool = of_config(_WHAT, "drop_overlong", "", "--drop-overlong")
    chat_template_args: str | None = of_config(_WHAT, "chat_template_args")
    max_new_tokens: int | None = of_config(_HOW, "sampling.max_new_tokens", f"Default: {MAX_NEW_TOKENS}.", default=None)
    temperature: float = of_config(_HOW, "sampling.temperature")
    kv_tokens: int | None = of_config(_HOW, "sampling.kv_tokens")
    reward_workers: int = of_config(_HOW, "reward_workers")
    reward_limit: float = of_config(_HOW, "reward_limit_s")
    overlong_buffer: int | None = of_config(_HOW, "overlong_buffer")
    max_rows: int | None = of_config(_STREAM, "sampling.max_rows", f"Default: {Sampling.max_rows}.", default=None)
    device: str | None = of_config(_HOW, "device")
    tasks: Path = on_output(Path("runs/tasks"), "Folder in which built-in tasks are created and kept.", parser=folder)


@dataclass(frozen=True, kw_only=True)
class RunOptions(SamplingOptions):
    """The options of a run that every recipe shares. `rollalloc.cli.sources` turns them into a `Config`."""

    settings: str = on_data(
        "defaults",
        "Settings on a built-in task. defaults: the same shape, learning rate and optimizer for every recipe and task. "
        "tuned: found by a search for this recipe on this task.",
    )
    heldout: Path | None = of_config(_WHAT, "heldout", parser=file_path)
    single_answer: bool = of_config(_WHAT, "single_answer", "", "--single-answer")
    accept_overlap: bool = of_config(_WHAT, "accept_overlap", "", "--accept-overlap")
    learning_rate: float | None = of_config(
        _HOW,
        "learning_rate",
        f"Default: the task's, or {Config.learning_rate:g} for a model of your own.",
        default=None,
    )
    adam_beta2: float | None = on_training(None, f"AdamW's second beta, in [0, 1). Default: {Config.betas[1]}.")
    max_grad_norm: float | None = of_config(_HOW, "max_grad_norm", f"Default: {Config.max_grad_norm:g}.", default=None)
    averaging: int | None = of_config(_HOW, "averaging", f"Default: {Config.averaging}.", default=None)
    optimizer_steps: int = of_config(_HOW, "optimizer_steps_per_batch")
    warmup_steps: int = of_config(_HOW, "schedule.warmup")
    schedule: str = of_config(_HOW, "schedule.shape")
    schedule_steps: int | None = of_config(_HOW, "schedule.steps")
    aggregation: str = of_config(_HOW, "loss.aggregation")
    dual_clip: float | None = of_config(_HOW, "loss.clip.dual")
    kl: float = of_config(_HOW, "loss.kl")
    tokens_per_forward: int = of_config(_HOW, "tokens_per_forward")
    precision: str = of_config(_HOW, "precision")
    lora: int | None = of_config(_HOW, "lora.rank", "Default: train the model's own weights.", default=None)
    lora_alpha: float | None = of_config(_HOW, "lora.alpha")
    lora_target: list[str] | None = of_config(_HOW, "lora.targets", "Repeatable.", default=None)
    sampling_dtype: str = of_config(_HOW, "sampling_dtype")
    gradient_checkpointing: bool = of_config(_HOW, "gradient_checkpointing", "", "--gradient-checkpointing")
    max_rollouts: int | None = of_config(
        _HOW,
        "max_rollouts",
        f"Default: the task's, or {ROLLOUTS_PER_PROMPT} per prompt and at least {LEAST_ROLLOUTS:,}.",
    )
    target: float | None = of_config(
        _HOW,
        "target",
        "Default: a built-in task's own; otherwise the whole budget is used. With 1, a built-in task uses its whole budget "
        "too.",
    )
    eval_every: int | None = of_config(
        _HOW, "eval_every", "Default: a tenth of the budget, but at most the task's value.", default=None
    )
    engine: str = of_config(_STREAM, "engine")
    staleness: int | None = of_config(_STREAM, "staleness")
    ahead: int | None = of_config(_STREAM, "ahead", "Default: the recipe's, mostly 1.")
    overlap: bool = of_config(_STREAM, "streaming.overlap", "--no-overlap makes runs repeatable.")
    generator_limit: float = of_config(_STREAM, "generator_limit_s")
    features: str | None = of_config(_HOW, "features")
    track: list[str] | None = of_config(_OUTPUT, "track", "Repeatable.", default=None)


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


@contextmanager
def option_named(options: str) -> Iterator[None]:
    """A context that puts the names of options before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{options}: {error}") from None


_TRUTHS = ("true", "false", "yes", "no", "on", "off")  # what a user may write behind a flag


_APART = re.compile(r"\s{4,}|[-*] |\d+\. ")  # how an equation or a point of a list begins


def reflowed(docstring: str) -> str:
    """A docstring with one line for each paragraph and point of a list, which the terminal then wraps to its width."""
    lines = [""]
    for line in inspect.cleandoc(docstring).splitlines():
        if not line or not lines[-1] or _APART.match(line) or re.match(r"\s{4,}", lines[-1]):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(lines[1:])


def _is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def _untyped(parameters: list[Any]) -> list[Any]:
    """Leave out the type that newer releases of typer show beside a flag, which takes no value."""
    for each in filter(_is_flag, parameters):
        each.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command of `rollalloc`. A flag with a value, such as `--resume true`, is refused in the flag's name."""

    def __init__(self, *given: Any, help: str | None = None, **others: Any) -> None:
        super().__init__(*given, help=reflowed(help or ""), **others)

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name for each in filter(_is_flag, self.params) for name in each.opts}
        for name, value in pairwise(args):
            if name in flags and value.lower() in _TRUTHS:
                raise typer.BadParameter(f"it takes no value; leave {value!r} out", ctx=ctx, param_hint=f"'{name}'")
        return super().parse_args(ctx, args)


class CommandGroup(TyperGroup):
    """`rollalloc` itself, or a command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))
