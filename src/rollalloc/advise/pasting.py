"""Settings for a recommended recipe, to paste into our command line, TRL or verl.

Each text is generated from the recipe's own parameters, and the tests validate the same settings with the frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from shlex import join
from typing import Any

from rollalloc.advise.verdict import Choice
from rollalloc.named import make_recipe
from rollalloc.train.config import Config

_STOCK = "grpo"  # TRL and verl implement this recipe, so it needs none of our drivers
_MOST_ROWS = 8  # maximum number of rows per micro-batch
_LEAST_ROWS = 2  # minimum number of rows per batch in TRL
_AVERAGING = 640  # window of averaged weights, in rows; the quoted figures were measured with it
_VERL = "python -m verl.trainer.main_ppo ..."
_FEATURES = "features.safetensors"
_RATES = "with one rollout per prompt, the best rate was 0.5 to 3.3 times that of GRPO, and the median was 1.7 times"
_PLACES = Config(model="MODEL", prompts=("PROMPTS",), reward="REWARD")


def pasted(choice: Choice, framework: str, config: Config = _PLACES, task: str = "") -> str:
    """Settings that train with a recommended recipe, with one optimizer step per batch.

    Args:
        choice: the recipe and its batch shape.
        framework: a key of `FRAMEWORKS`.
        config: the configuration with the model, prompts and reward to be named in the settings. By default, the settings
            have placeholders.
        task: name of the built-in task; "" if there is none.

    Raises:
        ValueError: an unknown framework, or batches of a single row, which TRL refuses.
    """
    check_framework(framework)
    return FRAMEWORKS[framework](choice, config, task)


def check_framework(framework: str | None) -> None:
    """Raise an error if the framework is unknown. None stands for the framework that wrote the log.

    Raises:
        ValueError: the framework is unknown.
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise ValueError(f"--framework: expected one of {', '.join(FRAMEWORKS)} to paste into, got {framework!r}")


def parameters_of(choice: Choice) -> dict[str, Any]:
    """The batch shape, as parameters for `rollalloc.named.make_recipe`. All other parameters keep their defaults."""
    return {"groups": choice.groups, "n": choice.n}


def changes(choice: Choice, present: Choice) -> tuple[str, ...]:
    """Sentences about changes of the batch shape and of the learning rate."""
    sentences: list[str] = []
    rows, before = choice.groups * choice.n, present.groups * present.n
    size = f"still {rows} rows" if rows == before else f"{rows} rows instead of {before}"
    if (choice.groups, choice.n) != (present.groups, present.n):
        sentences.append(
            f"A batch has {choice.groups} prompts × {choice.n} instead of {present.groups} × {present.n}: {size}."
        )
    if (choice.n == 1) != (present.n == 1):
        sentences.append(
            "Begin with your present learning rate, because the recipes were compared at one rate. We searched for the "
            f"best rate on six tasks with models of 152,000 parameters: {_RATES} (lab/docs/leaderboard.md). We have not "
            "tried this with larger models."
        )
    return tuple(sentences)


def _ours(choice: Choice, config: Config, task: str) -> str:
    inputs = ["--model", config.model, *(word for file in config.prompts for word in ("--prompts", file))]
    sets = [word for name, value in parameters_of(choice).items() for word in ("--set", f"{name}={value}")]
    return _continued(
        ["rollalloc", "train", *(["--task", task] if task else [*inputs, "--reward", config.reward])],
        *([how] if (how := _sampled_as(config)) else []),
        ["--recipe", choice.recipe, *sets],
    )


def _sampled_as(config: Config) -> list[str]:
    """The options that decide which rewards a rollout gets, where they differ from the defaults of `rollalloc train`."""
    valued = {
        "--max-new-tokens": (config.sampling.max_new_tokens, _PLACES.sampling.max_new_tokens),
        "--temperature": (config.sampling.temperature, _PLACES.sampling.temperature),
        "--overlong-buffer": (config.overlong_buffer, None),
        "--chat-template-args": (config.chat_template_args, None),
    }
    words = [word for name, (value, usual) in valued.items() if value != usual for word in (name, str(value))]
    return [*words, *(["--drop-overlong"] if config.drop_overlong else [])]


def _trl(choice: Choice, config: Config, task: str) -> str:
    rows = choice.groups * choice.n
    if rows < _LEAST_ROWS:
        raise ValueError(f"TRL needs batches of at least {_LEAST_ROWS} rows, got {choice.groups} × {choice.n}")
    # The recipe decides n, and num_generations has no effect. TRL refuses 1, so set the smallest
    # divisor of the batch that is above 1.
    num_generations = choice.n if choice.n > 1 else _divisors(rows)[1]
    why = f"  # ignored: the recipe generates n={choice.n}; TRL refuses 1" if num_generations != choice.n else ""
    device = max(size for size in _divisors(rows) if size <= _MOST_ROWS)
    stock = choice.recipe == _STOCK
    trainer = "GRPOTrainer" if stock else "AllocatedGRPOTrainer"
    arguments = ", ".join(f"{name}={value}" for name, value in parameters_of(choice).items())
    averaging = f"\n    averaging={_AVERAGING}," if choice.n == 1 else ""
    ours = "\nfrom rollalloc import recipes\nfrom rollalloc.drivers.trl import AllocatedGRPOTrainer\n"
    return f"""\
from trl import GRPOConfig{", GRPOTrainer" if stock else ""}
{"" if stock else ours}
args = GRPOConfig(
    output_dir="runs/{choice.name}",
    num_generations={num_generations},{why}
    per_device_train_batch_size={device},
    gradient_accumulation_steps={rows // device},  # on one process: {rows} rows, of {choice.groups} prompts
)
trainer = {trainer}(
    model,
    reward_funcs,
    args=args,
    train_dataset=dataset,
{"" if stock else f"    recipe=recipes.{choice.recipe}({arguments}),{averaging}{chr(10)}"})
trainer.train()
"""


def _verl(choice: Choice, config: Config, task: str) -> str:
    shape = [
        f"data.train_batch_size={choice.groups}",
        f"actor_rollout_ref.rollout.n={choice.n}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={choice.groups}",
    ]
    lines = [_VERL, ["algorithm.adv_estimator=grpo"], shape]
    if choice.recipe == _STOCK:
        return _continued(*lines)
    parameters = {name: value for name, value in parameters_of(choice).items() if name not in ("groups", "n")}
    features_command = ""
    if make_recipe(choice.recipe, parameters_of(choice)).reads_features:
        prompts = [word for file in config.prompts for word in ("--prompts", file)]
        features_command = join(["rollalloc", "features", "--model", config.model, *prompts, "--out", _FEATURES]) + "\n"
        parameters["features"] = _FEATURES
    keys = [f"+trainer.v1.rollalloc.{name}={value}" for name, value in ({"recipe": choice.recipe} | parameters).items()]
    return features_command + _continued(*lines, ["trainer.v1.trainer_mode=rollalloc", *keys])


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _continued(*lines: str | list[str]) -> str:
    """A shell command split over several lines."""
    return " \\\n    ".join(line if isinstance(line, str) else join(line) for line in lines) + "\n"


FRAMEWORKS: Mapping[str, Callable[[Choice, Config, str], str]] = {"rollalloc": _ours, "trl": _trl, "verl": _verl}
