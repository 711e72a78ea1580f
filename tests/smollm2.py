"""SmolLM2-135M, where it was made, and prompts for it: what the slow tests of the drivers with a real model share."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rollalloc.tasks.chat import CHAT_TASKS, ChatFiles, prepare

ROOT = Path(__file__).parents[1]


def made(variable: str, usual: str, how: str) -> Path:
    """The folder of the model, named by a variable of the environment or where it usually is; skips where there is none."""
    folder = Path(os.environ.get(variable) or ROOT / usual).resolve()
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"needs the model: `{how}`, or name its folder in {variable}")
    return folder


def stories(folder: Path) -> ChatFiles:
    """Word problems as messages; scoring them needs no other package."""
    return prepare(folder, replace(CHAT_TASKS["stories"], train=16, heldout=4))
