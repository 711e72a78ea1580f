"""The entry point `verl.plugins`, which verl loads in each of its processes.

To keep it cheap, the trainers are registered only when verl imports its own, and the CPU platform only with
`VERL_PLATFORM=cpu`.
"""

from __future__ import annotations

import logging
import os
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from rollalloc.drivers.verl.hooks import after_import

log = logging.getLogger(__name__)

_ON_CPU = os.environ.get("VERL_PLATFORM", "").lower() == "cpu"


def _register_trainer(_: ModuleType) -> None:
    try:
        import_module("rollalloc.drivers.verl.trainer")
    except Exception:  # with another version of verl, verl's own trainers must still work
        log.exception("rollalloc's trainer modes are not available; they need verl 0.9")


def _refuse_tied_embeddings(path: str) -> None:
    """Refuse a model with tied embeddings: vLLM's CPU build packs the head at its start, and would never update it."""
    from transformers import AutoConfig

    if AutoConfig.from_pretrained(path).get_text_config().tie_word_embeddings:
        raise ValueError(
            f"on CPUs vLLM cannot update an output head that is tied to the embeddings, as in {path}; use a model with "
            "tie_word_embeddings=false, or GPUs"
        )


def _check_early(module: ModuleType) -> None:
    """Add our checks to verl's validation of its configuration, which runs before Ray starts."""
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]  # verl brings it

    check = module.validate_config

    @wraps(check)
    def checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
        if mode.startswith("rollalloc"):
            import_module("rollalloc.drivers.verl.configure").configure(config)
        elif OmegaConf.select(config, "trainer.v1.rollalloc") is not None:
            modes = import_module("rollalloc.drivers.verl.modes").MODES
            raise ValueError(
                f"trainer.v1.rollalloc is set, but nothing reads it under trainer.v1.trainer_mode={mode}; set that to "
                f"one of {', '.join(modes)}, or leave the section out"
            )
        if _ON_CPU:
            _refuse_tied_embeddings(OmegaConf.select(config, "actor_rollout_ref.model.path"))
        return check(config, *args, **kwargs)

    module.validate_config = checked  # pyright: ignore[reportAttributeAccessIssue]


after_import("verl.trainer.ppo.v1", _register_trainer)
after_import("verl.utils.config", _check_early)
if _ON_CPU:
    import_module("rollalloc.drivers.verl.cpu")
