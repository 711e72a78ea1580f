"""The entry point `verl.plugins`. verl loads it in each of its processes.

Our trainers are registered only in processes in which verl imports its own trainers, so that loading stays fast.
"""

from __future__ import annotations

import logging
import sys
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from rollalloc.drivers.verl.hooks import after_import

log = logging.getLogger(__name__)


def _register_trainer(_: ModuleType) -> None:
    try:
        import_module("rollalloc.drivers.verl.trainer")
    except Exception:  # verl's own trainers must work even if this version of verl is not supported
        log.exception("rollalloc's trainer modes are not available; they need verl 0.9")


def check_early(module: ModuleType) -> None:
    """Add our checks to verl's validation of its configuration, which runs before Ray starts, and print a step's cost."""
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]  # a dependency of verl

    check = module.validate_config

    @wraps(check)
    def checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
        if mode.startswith("rollalloc"):
            settings = import_module("rollalloc.drivers.verl.configure").configure(config)
            step = import_module("rollalloc.drivers.verl.step")
            for line in step.cost_of(step.planned(config, settings)):
                sys.stdout.write(f"rollalloc: {line}\n")
        elif OmegaConf.select(config, "trainer.v1.rollalloc") is not None:
            modes = import_module("rollalloc.drivers.verl.modes").MODES
            raise ValueError(
                f"trainer.v1.rollalloc is set, but nothing reads it under trainer.v1.trainer_mode={mode}; set the mode "
                f"to one of {', '.join(modes)}, or leave the section out"
            )
        return check(config, *args, **kwargs)

    module.validate_config = checked  # pyright: ignore[reportAttributeAccessIssue]


after_import("verl.trainer.ppo.v1", _register_trainer)
after_import("verl.utils.config", check_early)
