"""Imports Unsloth before TRL, and patches TRL as Unsloth does where it finds a GPU. Without Unsloth, nothing runs."""

# pyright: reportMissingImports=false

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("unsloth") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    alone = {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_COMPILE_DISABLE": "1", "UNSLOTH_FORCE_FLOAT32": "1"}
    os.environ |= alone | {"ACCELERATE_MIXED_PRECISION": "no"}
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "trl")]

    import unsloth  # noqa: F401
    from unsloth.models.rl import _patch_trl_rl_trainers

    _patch_trl_rl_trainers("grpo_trainer")
