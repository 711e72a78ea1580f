"""A user's own tiny model, prompts and reward, and the command line in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollalloc.data.prompts import write_prompts
from rollalloc.tasks import sort
from rollalloc.tasks.tiny import WarmUp

REWARD = (
    "def score(data_source, solution_str, ground_truth, extra_info):\n    return float(solution_str.startswith('s'))\n"
)


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `prompts.parquet`, the same as `prompts.jsonl`, `heldout.jsonl` and `my_reward.py`.

    One of the 6 prompts of `long.jsonl` is longer than the model's context.
    """
    folder = tmp_path_factory.mktemp("own")
    sort.prepare(folder, sort.SortConfig(symbols=6, train=8, heldout=4, warm_up=WarmUp(steps=2, batch=4, rise=1)))
    rows: list[dict[str, Any]] = [
        {
            "data_source": "mine",
            "prompt": f"s{number % 6} s{number // 6} =",
            "reward_model": {"ground_truth": f"s{number % 6}"},
        }
        for number in range(36)
    ]
    for name in ("prompts.parquet", "prompts.jsonl"):
        write_prompts(folder / name, rows[:24])
    write_prompts(folder / "heldout.jsonl", rows[24:])
    write_prompts(folder / "long.jsonl", [*rows[:5], rows[5] | {"prompt": "s1 " * 70 + "="}])
    (folder / "my_reward.py").write_text(REWARD)
    return folder


@pytest.fixture
def call(
    own: Path, monkeypatch: pytest.MonkeyPatch, rollalloc: Callable[..., tuple[int, str, str]]
) -> Callable[..., tuple[int, str]]:
    """Call `rollalloc` with these arguments in the user's folder: (exit code, what it wrote, as one line)."""

    def called(*arguments: Any) -> tuple[int, str]:
        monkeypatch.chdir(own)
        code, out, err = rollalloc(*arguments)
        return code, " ".join((out + err).split())

    return called


@pytest.fixture
def script(own: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The installed `rollalloc` in a process of its own, in the user's folder."""

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).with_name("rollalloc"), *map(str, arguments)]
        return subprocess.run(
            command, cwd=own, env=os.environ | {"COLUMNS": "300"}, capture_output=True, text=True, timeout=300
        )

    return run
