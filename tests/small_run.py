"""Fixtures of several folders: a small `sort` task and runs on it."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from rollalloc.models.settings import Sampling
from rollalloc.tasks import presets, sort
from rollalloc.tasks.files import TaskFiles
from rollalloc.tasks.presets import fields_of
from rollalloc.tasks.tiny import WarmUp
from rollalloc.train.config import Config


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    config = sort.SortConfig(symbols=8, train=80, heldout=20, warm_up=WarmUp(steps=20, batch=32, rise=1))
    return sort.prepare(tmp_path_factory.mktemp("task"), config)


@pytest.fixture(scope="session")
def run_of(task: TaskFiles) -> Callable[..., Config]:
    """(recipe, parameters, **changes) → the configuration of a short run."""

    def made(recipe: str = "grpo", parameters: dict[str, Any] | None = None, **changes: Any) -> Config:
        fields: dict[str, Any] = {
            **fields_of(task),
            "reward_workers": 0,
            "device": "cpu",
            "recipe": recipe,
            "parameters": {"groups": 4, "n": 4} if parameters is None else parameters,
            "max_rollouts": 96,
            "sampling": Sampling(task.max_new_tokens),
            "learning_rate": 1e-4,
            "eval_every": 32,
            "target": 0.999,
        }
        return Config(**fields | changes)

    return made


@pytest.fixture
def interrupted_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the files of a task are made, as in the middle of a warm-up."""

    def made(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(presets, "task_files", made)
