# pyright: reportMissingImports=false
# (verl and what it needs live in an environment of their own: constraints/verl-cpu.txt)
"""What verl and this driver think of a command, without a GPU, a model or Ray.

    python -m rollalloc.drivers.verl.check python -m verl.trainer.main_ppo ... trainer.v1.trainer_mode=rollalloc

composes the configuration as verl does, asks its own validation and ours, and says what a step would be. It ends with exit
code 1 and the reason where either refuses, 2 where the command is none.
"""

from __future__ import annotations

import io
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from omegaconf import OmegaConf

from rollalloc.drivers.verl.configure import configure
from rollalloc.drivers.verl.modes import MODES
from rollalloc.drivers.verl.settings import Settings
from rollalloc.files.text import visible

_REFUSED, _NO_COMMAND = 1, 2
_PROGRAM = "verl.trainer.main_ppo"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one training step of a command is.

    Attributes:
        recipe: by its rules.
        prompts: groups trained on.
        rows: trained on for each group; None: their number varies.
        optimizer_steps: of the batch.
        mode: how generation and training overlap, verl's own name.
    """

    recipe: str
    prompts: int
    rows: int | None
    optimizer_steps: float
    mode: str


def composed(arguments: Sequence[str]) -> Any:
    """The configuration that verl makes of its command line.

    Args:
        arguments: those of `python -m verl.trainer.main_ppo`; that beginning itself may stand before them.

    Raises:
        ValueError: a key or file that there is not, as Hydra says it.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    given, overrides = _parser().parse_known_args(_own(arguments))
    folder = Path(given.config_path or str(files("verl") / "trainer" / "config")).absolute()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = compose(given.config_name, [*overrides])
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error).strip()) from error
    return config


def _own(arguments: Sequence[str]) -> list[str]:
    """The arguments without what calls the program."""
    return list(arguments[arguments.index(_PROGRAM) + 1 :] if _PROGRAM in arguments else arguments)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m rollalloc.drivers.verl.check", allow_abbrev=False)
    parser.add_argument(
        "--config-path", "-cp", "--config-dir", help="folder of the configuration (default: verl's own)"
    )
    parser.add_argument("--config-name", "-cn", default="ppo_trainer", help="its name (default: ppo_trainer)")
    return parser


def checked(config: Any) -> Step:
    """What a step is, of a configuration that verl and this driver both accept; it is completed in place.

    Raises:
        ValueError: ours refuses it.
        Exception: verl's own validation does, by whatever it raises.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    settings = configure(config) if str(config.trainer.v1.trainer_mode) in MODES else None
    with (
        redirect_stdout(io.StringIO()),
        catch_warnings(),
    ):  # it prints that all is well, and warns of a critic that is off
        simplefilter("ignore")
        validate_config(config, need_reference_policy(config), need_critic(config))
    return _step(config, settings)


def _step(config: Any, settings: Settings | None) -> Step:
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mode = str(config.trainer.v1.trainer_mode)
    return Step(
        recipe=f"stock verl, {n} rollouts per prompt" if settings is None else repr(settings.recipe),
        prompts=prompts,
        rows=n if settings is None else settings.recipe.rows.traits.rows,
        optimizer_steps=prompts / config.actor_rollout_ref.actor.ppo_mini_batch_size,
        mode=MODES.get(mode, mode),
    )


def described(step: Step) -> str:
    """A step in words."""
    rows = "as many rows as a group has" if step.rows is None else f"{step.rows} rows each"
    return (
        f"accepted by verl and by rollalloc, mode {step.mode}: {step.prompts} groups per batch, {rows}, "
        f"{step.optimizer_steps:g} optimizer steps per batch\n{step.recipe}"
    )


def main(arguments: Sequence[str]) -> int:
    """Say what is thought of a command; returns the exit code."""
    if not arguments:
        _parser().print_help(sys.stderr)
        return _NO_COMMAND
    try:
        config = composed(arguments)
    except ValueError as error:
        sys.stderr.write(visible(f"not a command of verl's: {error}\n"))
        return _NO_COMMAND
    try:
        said = described(checked(config))
    except Exception as error:  # verl's validation raises what it likes
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        sys.stderr.write(visible(f"refused: {said}\n"))
        return _REFUSED
    sys.stdout.write(said + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
