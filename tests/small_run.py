"""Fixtures of several folders: a small `sort` task and runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollalloc.generate.sampling import Sampling
from rollalloc.lab.bench.tasks import sort
from rollalloc.lab.bench.tasks.files import TaskFiles
from rollalloc.lab.bench.tasks.tiny import WarmUp
from rollalloc.train.description import Run, Source
from rollalloc.train.settings import Settings


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    config = sort.SortConfig(symbols=8, train=80, heldout=20, warm_up=WarmUp(steps=20, batch=32, rise=1))
    return sort.prepare(tmp_path_factory.mktemp("task"), config)


@pytest.fixture(scope="session")
def run_of(task: TaskFiles) -> Callable[..., Run]:
    """(recipe, parameters, **changes) → a short run; `changes` of the run, its source or its settings."""

    def made(recipe: str = "grpo", parameters: dict[str, Any] | None = None, **changes: Any) -> Run:
        source: dict[str, Any] = {
            "model": str(task.model),
            "prompts": (str(task.train),),
            "heldout": str(task.heldout),
            "reward": task.reward,
            "single_answer": True,
            "reward_workers": 0,
            "device": "cpu",
        }
        settings: dict[str, Any] = {
            "sampling": Sampling(task.max_new_tokens),
            "learning_rate": 1e-4,
            "eval_every": 32,
            "target": 0.999,
        }
        run: dict[str, Any] = {"max_rollouts": 96}
        for name, value in changes.items():
            where = next((given for given in (source, settings) if name in given), None)
            if where is None:
                where = settings if name in ("seed", "optimizer_steps_per_batch") else run
                where = source if name == "drop_overlong" else where
            where[name] = value
        parameters = {"groups": 4, "n": 4} if parameters is None else parameters
        return Run(source=Source(**source), settings=Settings(**settings), recipe=recipe, parameters=parameters, **run)

    return made
