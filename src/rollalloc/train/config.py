"""The configuration of a training run, and `run.json`, which stores it with digests of the files that it names.

The command line fills a `Config`, and `train` reads it. Needs no PyTorch.

`Schedule` is the learning rate over a run. The default sizes of a recipe are in its module (`shape`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from errno import ENOENT
from functools import cache
from hashlib import file_digest
from importlib.machinery import PathFinder
from math import cos, inf, pi
from pathlib import Path
from reprlib import repr as short
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import rollalloc
from rollalloc.core.packing import describe, differences
from rollalloc.core.recipe import Budget, Recipe, at_least, refuse_unteachable
from rollalloc.data.encoding import template_arguments
from rollalloc.files.names import DESCRIPTION
from rollalloc.files.origin import origin
from rollalloc.files.regular import read_text, write_text
from rollalloc.files.text import visible
from rollalloc.models.settings import Lora, Loss, Precision, Sampling, SamplingDtype, Streaming
from rollalloc.named import make_recipe
from rollalloc.recipes.streaming import streamed

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate over a run: a linear warmup, and then a constant rate or a fall to a floor.

    The rate falls over a number of optimizer steps, or over the run's budget. In the second case, the rate of a batch
    depends on the share of the budget that was spent before the batch.

    Attributes:
        warmup: number of optimizer steps over which the learning rate rises, 0 or more.
        shape: how the learning rate continues after the warmup: "constant", "linear" or "cosine".
        steps: number of optimizer steps, including the warmup, until the floor is reached; more than `warmup`. None:
            the rate falls over the budget, or is constant.
        floor: the rate at the end, as a share of the full rate, in [0, 1].

    Raises:
        ValueError: a value is out of its range, or `steps` is set for a constant rate.
    """

    warmup: int = 0
    shape: Shape = "constant"
    steps: int | None = None
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup must be 0 or more optimizer steps, got {self.warmup}")
        if self.shape not in get_args(Shape):
            raise ValueError(f"the schedule's shape must be one of {', '.join(get_args(Shape))}, got {self.shape!r}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be a share of the learning rate in [0, 1], got {self.floor}")
        if self.steps is not None and self.shape == "constant":
            raise ValueError(f"a constant rate has no steps, got {self.steps}; give linear or cosine (--schedule)")
        if self.steps is not None and self.steps <= self.warmup:
            raise ValueError(f"steps must be more than the warm-up steps, {self.warmup}, got {self.steps}")

    @property
    def over_budget(self) -> bool:
        """Whether the rate falls over the run's budget."""
        return self.shape != "constant" and self.steps is None

    def share(self, step: int, spent: float | None = None) -> float:
        """The learning rate at an optimizer step, as a share of the full rate.

            warmup: step / warmup
            then, with x = min(1, (step - 1 - warmup) / (steps - warmup)), or x = spent:
            constant: 1,   linear: floor + (1 - floor) · (1 - x),   cosine: floor + (1 - floor) · (1 + cos πx) / 2

        As in PyTorch and transformers, the first step after the warmup has the full rate, and the first step after
        `steps` has the floor. The first step of the warmup is already above 0. A rate that falls over the budget begins to
        fall with the first rollout, so during the warmup the rising and the falling share are multiplied.

        Args:
            step: number of the step, from 1.
            spent: share of the budget that was spent before the batch, in [0, 1]. Needed if the rate falls over the budget.
        """
        if self.over_budget:
            assert spent is not None
            return min(1.0, step / max(1, self.warmup)) * self._fallen(spent)
        if step <= self.warmup:
            return step / self.warmup
        if self.steps is None:
            return 1.0
        return self._fallen(min(1.0, (step - 1 - self.warmup) / (self.steps - self.warmup)))

    def _fallen(self, done: float) -> float:
        left = 1 - done if self.shape == "linear" else (1 + cos(pi * done)) / 2
        return self.floor + (1 - self.floor) * left


def share_spent(budget: Budget, max_batches: int | None, batches: int, paid: Mapping[str, Any]) -> float | None:
    """Share of a run's budget that is spent, in [0, 1]. With several limits, the largest share. None: there is no limit.

    Args:
        budget: budget of the recipe.
        max_batches: another limit, in batches; None: no such limit.
        batches: number of batches trained.
        paid: contains `rollouts_paid` and `tokens_paid` at the newest update.
    """
    spent = (paid["rollouts_paid"], paid["tokens_paid"], batches)
    limits = (budget.run_rollouts, budget.run_tokens, max_batches)
    shares = [amount / limit for amount, limit in zip(spent, limits, strict=True) if limit is not None]
    return min(1.0, max(shares)) if shares else None


def check_budget(schedule: Schedule, budget: Budget, max_batches: int | None) -> None:
    """Raise a ValueError if the learning rate falls over the budget but the run has no budget."""
    limits = (budget.run_rollouts, budget.run_tokens, max_batches)
    if schedule.over_budget and not any(limits):
        do = "give --max-rollouts (Budget(run_rollouts=...)) or --schedule-steps (Schedule(steps=...))"
        raise ValueError(
            f"a {schedule.shape} schedule without steps falls over the run's budget, and there is none; {do}"
        )


ROLLOUTS_PER_PROMPT, LEAST_ROLLOUTS = 16, 4096  # the default budget
_EVALUATIONS = 10  # number of evaluations over the budget, not counting the initial model's


def default_budget(prompts: int) -> int:
    """Default budget in rollouts for this number of training prompts; the same for every recipe."""
    return max(ROLLOUTS_PER_PROMPT * prompts, LEAST_ROLLOUTS)


def default_grid(budget: int) -> int:
    """Rollouts between two evaluations: a tenth of the budget, at least 1."""
    return max(1, budget // _EVALUATIONS)


Engine = Literal["sync", "async"]
SCHEMA = 4  # schema number of run.json
MAX_NEW_TOKENS = 1024
_MOST_WORKERS = 1024  # maximum number of scoring processes; each runs its own Python

# Groups of fields. `Config.identity` says in which of these groups a resumed run may differ from its checkpoint.
SAVING = ("checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "log_rollouts", "notices", "track")
WAITING = ("generator_limit_s",)
ASYNC = ("engine", "streaming")  # `run.json` has these only with the asynchronous engine
OF_DATA_AND_REWARD = (
    *("model", "prompts", "heldout", "reward", "single_answer", "drop_overlong", "overlong_buffer", "features", "lora"),
    *("reward_workers", "reward_limit_s", "device", "chat_template_args", "accept_overlap"),
)
WHERE_IT_RUNS = ("reward_workers", "reward_limit_s", "device")
DATA = ("prompts", "heldout", "chat_template_args", "accept_overlap")  # a checkpoint has digests of the data instead
METHOD = ("recipe", "parameters", "max_rollouts", "staleness", "ahead")  # the allocator's state has the recipe instead
NAMES = ("label", "task")
_ENDING = ("max_batches", "stop_when_barren", "target")
_MEMORY = ("tokens_per_forward", "gradient_checkpointing")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run: a model, prompts, a reward, a recipe, and how to train.

    Attributes:
        model: name or folder of a causal language model. "": the caller has loaded a model, or the built-in task makes one.
        prompts: Parquet or JSONL files in verl's schema.
        heldout: a Parquet or JSONL file of prompts for evaluation. None: no evaluation.
        reward: reward function, `package.module:function` or `file.py:function`, with verl's `compute_score` signature.
        single_answer: True: the ground truth of every held-out prompt is its only right answer, so that the accuracy is
            computed exactly, without sampling.
        drop_overlong: True: leave out prompts that do not fit the model's context. False: such prompts raise an error.
        reward_workers: number of processes that score. 0: score in this process, which is safe only for trusted rewards.
        reward_limit_s: time limit for scoring one rollout in a worker process, in seconds.
        overlong_buffer: DAPO's overlong penalty grows over this many tokens before the length limit. None: no penalty.
        device: device, for example "cpu". None: a GPU, or the CPU if there is no GPU.
        features: file with features of the prompts, for a recipe that predicts. "none": predict without features. None:
            compute them with the initial model, if the recipe uses features.
        lora: adapters to train instead of the model's own weights. None: train the model's own weights.
        chat_template_args: further arguments of the chat template as a JSON object, for example
            '{"enable_thinking": false}'. None: no further arguments.
        accept_overlap: True: train even if the share of held-out prompts that are in the training set is above 5%
            (`rollalloc.data.prompts.MOST_SHARED`).
        recipe: name of a recipe, see `rollalloc.named.make_recipe`.
        parameters: arguments of the recipe, by name.
        max_rollouts: rollout budget. None: no limit.
        staleness: replaces the recipe's maximum staleness. None: the recipe's value, or the value that `ahead` needs.
        ahead: number of batches that the asynchronous engine generates while another batch is trained; see
            `rollalloc.recipes.streamed`.
        label: name of the run in tables and figures. "": the recipe's name.
        task: the built-in task to train on. "": the user's own model and prompts.
        track: trackers that also get the metrics: "tensorboard", "wandb" or "trackio".
        seed: seed of the draw of prompts, of sampling and of mini-batches, in [0, 2**63).
        sampling: how rollouts are sampled.
        learning_rate: AdamW's learning rate, above 0.
        weight_decay: AdamW's weight decay, 0 or more.
        betas: AdamW's betas, each in [0, 1).
        schedule: how the learning rate changes over optimizer steps or over the budget.
        optimizer_steps_per_batch: number of optimizer steps on each batch. Each has a mini-batch of its own.
        loss: clipping, aggregation over tokens, and KL term.
        max_grad_norm: gradients are clipped to this norm.
        averaging: window of an exponential moving average of the weights, as a number of rows. The average is used for
            sampling, evaluation and the saved model; see `rollalloc.models.weights`. It needs memory for one more copy of
            the trained weights. 0: no averaging.
        tokens_per_forward: maximum number of tokens in one forward and backward pass, including prompts and padding. A
            longer row gets a pass of its own. This limits memory and changes nothing else.
        precision: number format of the update and of an exact evaluation: "fp32", "bf16" or "auto" (bf16 on a GPU that
            supports it, otherwise fp32). Weights, gradients, optimizer and log-probabilities are always in fp32.
        sampling_dtype: number format of weights and key-value cache while sampling. If it is not float32, rollouts are
            sampled from a copy of the model, and importance ratios are relative to this copy. All rows then get the
            truncated importance weights of stale rows, except if weights are averaged.
        gradient_checkpointing: True: keep only the inputs of the model's layers, and compute the rest again in the
            backward pass. This saves memory; the gradient is the same up to rounding.
        eval_every: number of rollouts between two evaluations.
        eval_samples: number of samples per held-out prompt; not used if accuracy is exact.
        max_batches: number of batches after which the run ends. None: no limit.
        stop_when_barren: True: end the run when no row of the last max(256, number of prompts) groups had a nonzero
            advantage, because all rewards in each group were equal.
        target: held-out accuracy at which the run ends, once two evaluations in a row reach it. None: no target.
        checkpoint_every: number of batches between two checkpoints. None: no checkpoints by batches. A checkpoint is always
            written at the end of the run, and when the run is asked to stop.
        checkpoint_minutes: minutes between two checkpoints. None: no checkpoints by time.
        keep_checkpoints: number of newest checkpoints to keep, at least 1.
        log_rollouts: write the text and score of each rollout to `rollouts.jsonl`.
        notices: warn in the log and on the page if the reward function fails, always gives the same score or is slow, or
            if rollouts give little learning signal.
        engine: "sync": generate all ordered rollouts, then train a batch. "async": generate while training.
        streaming: settings of the asynchronous engine.
        generator_limit_s: time limit in seconds. If a generating process gives no sign of life for this time, the run is
            saved and ends. Every token is a sign of life, so long rollouts are safe.

    Raises:
        ValueError: a value is out of its range.
    """

    model: str = ""
    prompts: tuple[str, ...] = ()
    heldout: str | None = None
    reward: str = ""
    single_answer: bool = False
    drop_overlong: bool = False
    reward_workers: int = 1
    reward_limit_s: float = 10.0
    overlong_buffer: int | None = None
    device: str | None = None
    features: str | None = None
    lora: Lora | None = None
    chat_template_args: str | None = None
    accept_overlap: bool = False
    recipe: str = "reinforce"
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_rollouts: int | None = None
    staleness: int | None = None
    ahead: int | None = None
    label: str = ""
    task: str = ""
    track: tuple[str, ...] = ()
    seed: int = 0
    sampling: Sampling = field(default_factory=lambda: Sampling(MAX_NEW_TOKENS))
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer_steps_per_batch: int = 1
    loss: Loss = field(default_factory=Loss)
    max_grad_norm: float = 1.0
    averaging: int = 640
    tokens_per_forward: int = 8192
    precision: Precision = "auto"
    sampling_dtype: SamplingDtype = "float32"
    gradient_checkpointing: bool = False
    eval_every: int = 2000
    eval_samples: int = 4
    max_batches: int | None = None
    stop_when_barren: bool = True
    target: float | None = None
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = 10.0
    keep_checkpoints: int = 2
    log_rollouts: bool = False
    notices: bool = True
    engine: Engine = "sync"
    streaming: Streaming = field(default_factory=Streaming)
    generator_limit_s: float = 600.0

    def __post_init__(self) -> None:
        template_arguments(self.chat_template_args)
        at_least("reward_workers", self.reward_workers, 0, "0 scores in this process")
        if self.reward_workers > _MOST_WORKERS:
            raise ValueError(f"reward_workers must be at most {_MOST_WORKERS} processes, got {self.reward_workers}")
        if not 0 < self.reward_limit_s < 1e6:
            raise ValueError(f"reward_limit must be a positive number of seconds, got {self.reward_limit_s}")
        at_least("seed", self.seed, 0)
        at_least("averaging", self.averaging, 0)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be less than 2**63, got {self.seed}")
        if self.staleness is not None:
            at_least("staleness", self.staleness, 0)
        sizes = ("optimizer_steps_per_batch", "tokens_per_forward", "eval_every", "eval_samples", "keep_checkpoints")
        for name in (*sizes, "max_batches", "checkpoint_every", "max_rollouts", "overlong_buffer"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "max_grad_norm", "checkpoint_minutes"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 1 <= self.generator_limit_s < inf:
            raise ValueError(f"generator_limit_s must be at least 1 and finite, got {self.generator_limit_s}")
        if not (0 <= self.weight_decay < inf and len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)):
            expected = "weight_decay must be 0 or more, and betas (the second is adam_beta2) two numbers in [0, 1)"
            raise ValueError(f"{expected}, got {self.weight_decay} and {self.betas}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError(f"target must be an accuracy in (0, 1], got {self.target}")
        for name, kind in (("precision", Precision), ("sampling_dtype", SamplingDtype), ("engine", Engine)):
            if getattr(self, name) not in (known := get_args(kind)):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        self._check_together()

    def _check_together(self) -> None:
        """Raise a ValueError if values contradict each other."""
        longest = self.sampling.max_new_tokens
        if self.overlong_buffer is not None and self.overlong_buffer > longest:
            raise ValueError(f"overlong_buffer must be at most max_new_tokens, {longest}, got {self.overlong_buffer}")
        if self.ahead is not None and self.engine == "sync":
            raise ValueError(
                "ahead: the synchronous engine generates nothing while it trains; give engine=async as well"
            )
        if self.engine == "async" and self.sampling_dtype != "float32":
            raise ValueError(f"the asynchronous engine samples in float32, got sampling_dtype {self.sampling_dtype!r}")

    def make_recipe(self) -> Recipe:
        """The recipe with the run's budget, adapted to the engine.

        Raises:
            ValueError: there is no such recipe, or it does not have these parameters, or it can never teach.
        """
        recipe = make_recipe(self.recipe, self.parameters)
        refuse_unteachable(recipe)  # now, not when the allocator is made after the data are loaded
        if self.engine == "async":
            recipe = streamed(recipe, staleness=self.staleness, ahead=self.ahead)
        elif self.staleness is not None:
            recipe = replace(recipe, max_staleness=self.staleness)
        if self.max_rollouts is None:
            return recipe
        return replace(recipe, budget=replace(recipe.budget, run_rollouts=self.max_rollouts))

    @property
    def name(self) -> str:
        """The label, or the recipe's name."""
        return self.label or self.recipe

    def description(self) -> dict[str, Any]:
        """The run as plain data for `run.json`. A finished run with the same description is reused."""
        left_out = {*SAVING, *WAITING, *(ASYNC if self.engine == "sync" else ())}
        described = {name: value for name, value in asdict(self).items() if name not in left_out}
        return json.loads(json.dumps({"schema": SCHEMA, **described}))

    def identity(self) -> dict[str, Any]:
        """The fields in which a resumed run must equal the interrupted run, as plain data."""
        may_differ = {*SAVING, *WAITING, *WHERE_IT_RUNS, *DATA, *METHOD, *NAMES, *_ENDING, *_MEMORY}
        if self.engine == "sync":
            may_differ |= {*ASYNC}
        if self.schedule.over_budget:
            may_differ.remove("max_batches")  # part of the budget over which the learning rate falls
        if self.engine == "async" and not self.streaming.overlap:
            # The number of forward passes matters, because one decoding step of the rollouts follows each pass.
            may_differ.remove("tokens_per_forward")
        compared = [each.name for each in fields(self) if each.name not in may_differ]
        return {name: describe(getattr(self, name)) for name in compared}


_VERSION = 40  # a version of more characters is cut in an error


def write_config(config: Config, folder: Path) -> None:
    """Write `run.json`. `starts` says when and by what the run was started, and each time that it was resumed."""
    starts = [*_starts_in(folder), origin()]
    described = config.description() | {"digests": digests_of(config), "starts": starts}
    write_text(folder / DESCRIPTION, json.dumps(described, indent=2))


def _starts_in(folder: Path) -> list[Any]:
    """The starts in a folder's `run.json`; empty if there are none."""
    try:
        starts = json.loads(read_text(folder / DESCRIPTION)).get("starts")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    return starts if isinstance(starts, list) else []


def read_config(folder: Path) -> Config:
    """The configuration in a folder's `run.json`.

    Raises:
        FileNotFoundError: there is no `run.json`.
        ValueError: `run.json` is damaged, or a different version of rollalloc wrote it.
    """
    path = folder / DESCRIPTION
    if not path.exists():
        raise FileNotFoundError(ENOENT, "expected the folder of a run, with run.json in it", str(folder))
    try:
        saved = _saved_in(folder)[0]
        config = _revived(Config, {name: value for name, value in saved.items() if name != "schema"})
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged or from a different version of rollalloc ({error}); use the version that wrote it"
        ) from None
    if missing := [name for name in config.description() if name not in saved]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; {_why_it_lacks(folder)}")
    return config


def _why_it_lacks(folder: Path) -> str:
    """Why fields are missing in a folder's `run.json`, and what to do: by the version that wrote it last, if it says so."""
    starts = _starts_in(folder)
    version = starts[-1].get("rollalloc") if starts and isinstance(starts[-1], dict) else None
    if not isinstance(version, str):
        return "it is damaged, or an earlier version of rollalloc wrote it: restore it, or give another folder"
    if version == rollalloc.__version__:
        return "it is damaged: restore it, or give another folder"
    return (
        f"rollalloc {visible(version)[:_VERSION]} wrote it, and this is {rollalloc.__version__}, which records more: use "
        "the version that wrote it, or give another folder"
    )


def is_run_in(config: Config, folder: Path) -> bool:
    """Whether a folder's `run.json` describes this run, and the input files still have the same contents."""
    saved, digests = _saved_in(folder)
    config = _named_as(saved, config)
    if saved != config.description():
        return False
    # Files that are missing on this machine are not compared.
    return all(digests.get(name) == digest for name, digest in digests_of(config).items())


def is_described_in(config: Config, folder: Path) -> bool:
    """Whether a folder's `run.json` describes this run. Fast, because the contents of input files are not compared."""
    saved = _saved_in(folder)[0]
    return saved == _named_as(saved, config).description()


def was_begun_in(config: Config, folder: Path) -> bool:
    """Like `is_described_in`, but the device and the number of workers may differ."""
    if not (folder / DESCRIPTION).exists():
        return False
    begun = read_config(folder)
    return is_described_in(replace(config, **{name: getattr(begun, name) for name in WHERE_IT_RUNS}), folder)


def resumed(config: Config, folder: Path) -> Config:
    """The configuration with which the run in the folder is resumed: files have the names that the run's `run.json` has.

    Raises:
        ValueError: the configuration is of another run. The message names the differences.
    """
    config = _named_as(_saved_in(folder)[0], config)
    if others := list(differences(read_config(folder).identity(), config.identity(), "config")):
        raise ValueError(
            f"the checkpoints in {folder} are of another run: {'; '.join(others)}; use the settings of "
            "that run, or give another folder"
        )
    return config


def _named_as(saved: Mapping[str, Any], config: Config) -> Config:
    """The configuration with a saved one's names of model, data and reward, where both names lead to the same file."""
    names = {name: getattr(config, name) for name in ("model", "prompts", "heldout", "reward")}
    same = {
        name: saved[name]
        for name, own in names.items()
        if name in saved and _places(name, saved[name]) == _places(name, own)
    }
    return replace(config, **{name: tuple(value) if isinstance(value, list) else value for name, value in same.items()})


def _places(name: str, value: Any) -> Any:
    """Where a name, or each of several, leads: a path, or the name itself if there is no such file here."""
    if isinstance(value, (list, tuple)):
        return [_places(name, each) for each in value]
    if not isinstance(value, str):
        return value
    if name != "reward":
        return Path(value).resolve() if Path(value).exists() else value
    file = _reward_file(value)
    return (Path(file).resolve(), value.rpartition(":")[2]) if file else value


def folder_of(config: Config, folder: Path) -> Path:
    """The path of a run's folder inside a folder of many runs."""
    return folder / config.task.replace("/", "-") / f"{config.name}-{config.seed}"


def _saved_in(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The description and the digests in a folder's `run.json`; both empty if there is no `run.json`."""
    path = folder / DESCRIPTION
    if not path.exists():
        return {}, {}
    try:
        saved = json.loads(read_text(path))
        schema, digests = saved.get("schema"), saved.pop("digests", {})
        saved.pop("starts", None)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} does not describe a run ({error}); it is damaged, or another program wrote it"
        ) from None
    if schema != SCHEMA:
        raise ValueError(
            f"{path} has schema {short(schema)}, expected {SCHEMA}; this version of rollalloc can neither resume "
            "nor reuse the run: use the version that wrote it, or give another folder (--out)"
        )
    return saved, digests


def _revived(kind: type[Any], saved: Mapping[str, Any]) -> Any:
    """Rebuild a dataclass from the JSON of its `asdict`. Raise a TypeError if a field has another type or is missing."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in saved.items():
        hint = hints.get(name)
        nested = next((inner for inner in (hint, *get_args(hint)) if is_dataclass(inner)), None)
        if nested is not None and isinstance(value, dict):
            values[name] = _revived(cast("type[Any]", nested), value)
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
        if name in hints and not _fits(values[name], hints[name]):
            expected = hints[name].__name__ if type(hints[name]) is type else hints[name]
            raise TypeError(f"{kind.__name__}.{name}: expected {expected}, got {short(value)}")
    if kind is not Config and (missing := [field.name for field in fields(kind) if field.name not in saved]):
        raise TypeError(f"{kind.__name__} lacks {', '.join(missing)}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has this type. Supports the types that occur in a configuration."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, kind or hint)


def digests_of(config: Config) -> dict[str, str]:
    """SHA-256, by path, of each file that a configuration names and that is on this machine."""
    named = [*config.prompts, config.heldout, config.model, _reward_file(config.reward)]
    places = [Path(name) for name in named if name]
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    return {str(file): _digest(file, file.stat().st_mtime_ns) for file in files if file.is_file()}


@cache
def _digest(file: Path, changed_ns: int) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _reward_file(reward: str) -> str | None:
    """The file of a reward function `file.py:function` or `package.module:function`. The function is not imported."""
    module = reward.rpartition(":")[0]
    if not module or module.endswith(".py"):
        return module or None
    package, *inner = module.split(".")
    spec = PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    if spec is None or not inner:
        return None if spec is None else spec.origin
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return str(files[0]) if files else None
