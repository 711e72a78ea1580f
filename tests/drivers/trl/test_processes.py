"""Two processes, gloo: the same decisions, and the results of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_trl
import torch

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def launched(out: Path, launcher: list[str], given: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    out.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [*launcher, tiny_trl.__file__, json.dumps({"out": str(out)} | given)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=500)


def run(out: Path, processes: int, *, launcher: list[str] | None = None, **given: Any) -> tuple[dict, list[dict], str]:
    """Weights, what each process decided, and what was printed; without a launcher, one process is this one."""
    given = {"per_device_train_batch_size": 16 // processes} | given
    printed = ""
    if processes == 1 and launcher is None:
        out.mkdir(exist_ok=True)
        tiny_trl.main({"out": str(out)} | given)
    else:
        done = launched(out, launcher or [*TORCHRUN, str(processes)], given)
        printed = done.stderr
        assert done.returncode == 0, printed[-4000:]
    decided = [json.loads(file.read_text()) for file in sorted(out.glob("process-*.json"))]
    return torch.load(out / "weights.pt", weights_only=True), decided, printed


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=3e-4)


RAGGED = {"recipe": "racing", "unscored": "k1", "loss_type": "grpo"}
PLAIN = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 1e9}  # AdamW would not see a scaled loss


@pytest.mark.parametrize(
    "changes",
    [{}, RAGGED | PLAIN, {"recipe": "foresight_replay"}],
    ids=["pilot-commit", "ragged", "features and replayed rows"],
)
def test_two_processes_decide_alike_and_train_to_the_weights_of_one(changes, tmp_path):
    given = {"recipe": "pilot_commit", "max_steps": 6} | changes
    one, _, _ = run(tmp_path / "one", 1, **given)
    two, decided, _ = run(tmp_path / "two", 2, **given)
    assert len(decided) == 2
    assert decided[0] == decided[1]
    assert_close(one, two)


def test_two_processes_resume_exactly(tmp_path):
    given = {"recipe": "pilot_commit", "save_strategy": "steps", "save_steps": 10}
    whole, decided, _ = run(tmp_path / "whole", 2, max_steps=20, **given)
    run(tmp_path / "parts", 2, max_steps=10, **given)
    resumed, decided_again, _ = run(tmp_path / "parts", 2, max_steps=20, resume=True, **given)
    assert decided == decided_again
    assert decided[0]["held"]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("wrong", "here", "there"),
    [
        ({"negative": 1}, "MetricError: the metric is the whole reward", "MetricError: the metric is the whole reward"),
        (
            {"broken_in": 1},
            "KeyError: 'broken'",
            "process 1 could not generate and score its share: KeyError: 'broken'",
        ),
    ],
    ids=["no success rate", "one reward raises"],
)
def test_two_processes_fail_together_instead_of_waiting_for_each_other(wrong, here, there, tmp_path):
    given = {"recipe": "pilot_commit", "per_device_train_batch_size": 8}
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs"), "--monitor-interval", "10"]
    done = launched(tmp_path, [*TORCHRUN, "2", *logs], given | wrong)
    assert done.returncode == 1
    printed = [next((tmp_path / "logs").rglob(f"{process}/stderr.log")).read_text() for process in (0, 1)]
    assert here in printed[1]
    assert there in printed[0]


@pytest.mark.slow
def test_the_hook_with_two_processes(tmp_path):
    given = {"recipe": "fresh_pilot_commit", "with_hook": True}
    one, _, _ = run(tmp_path / "one", 1, **given)
    two, decided, _ = run(tmp_path / "two", 2, **given)
    assert decided[0] == decided[1]
    assert_close(one, two)


@pytest.mark.slow
def test_accelerate_launch_on_the_cpu_starts_one_process_which_says_so(tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    _, decided, printed = run(tmp_path, 1, launcher=launcher, recipe="grpo")
    assert len(decided) == 1
    assert "torchrun --nproc_per_node N" in printed
