"""Two processes, gloo: the decisions of one, and its gradients."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import several
import tiny_trl
import torch

from arithmetic import assert_same_gradients

pytestmark = pytest.mark.e2e

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def launched(
    out: Path, launcher: list[str], given: dict[str, Any], program: str = tiny_trl.__file__
) -> subprocess.CompletedProcess[str]:
    out.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [*launcher, program, json.dumps({"out": str(out)} | given)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=500)


@dataclass(frozen=True)
class Run:
    """What a training run left: weights, the gradient of each step, what each process decided, and what was printed."""

    weights: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    decided: list[dict[str, Any]]
    printed: str


def forked(out: Path, given: dict[str, Any], program: str = "tiny_trl") -> None:
    """A run of two processes that are forked, without torchrun; both must come to its end."""
    codes = several.exit_codes(out, given, program)
    assert codes == [0, 0], [several.said(out, process)[-4000:] for process in range(2)]


def run(out: Path, processes: int, *, launcher: list[str] | None = None, **given: Any) -> Run:
    """A run; without a launcher, one process is this one, and several are forked."""
    given = {"per_device_train_batch_size": 16 // processes} | given
    printed = ""
    if launcher is not None:
        done = launched(out, launcher, given)
        printed = done.stderr
        assert done.returncode == 0, printed[-4000:]
    elif processes > 1:
        forked(out, given)
    else:
        out.mkdir(exist_ok=True)
        tiny_trl.main({"out": str(out)} | given)
    decided = [json.loads(file.read_text()) for file in sorted(out.glob("process-*.json"))]
    weights, gradients = (torch.load(out / f"{name}.pt", weights_only=True) for name in ("weights", "gradients"))
    return Run(weights, gradients, decided, printed)


# Groups of different sizes, and a prompt whose rollouts get no score: the processes get different numbers of rows.
UNEQUAL_ROWS = {"recipe": "racing", "unscored": "k1", "loss_type": "grpo"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        UNEQUAL_ROWS,
        {"recipe": "foresight_replay"},
        {"recipe": "reinforce_gated"},
        {"recipe": "reinforce_limited", "num_generations": 2, "max_steps": 6},
    ],
    ids=["pilot-commit", "unequal rows", "features and replayed rows", "rows that a gate leaves out", "a limit"],
)
def test_two_processes_make_the_same_decisions_and_gradients_as_one(changes, tmp_path):
    """With `by_key`, a rollout's tokens depend on its number only and not on the weights: the two runs stay comparable."""
    given = {"recipe": "pilot_commit", "max_steps": 6, "learning_rate": 1e-3, "by_key": True, "max_grad_norm": 1e9}
    one, two = (run(tmp_path / str(count), count, **given | changes) for count in (1, 2))
    assert two.decided == one.decided * 2
    assert_same_gradients(one.gradients, two.gradients)


def test_two_processes_resume_exactly(tmp_path):
    """torchrun itself starts the first run, so that those that are forked are held to it too."""
    given = {"recipe": "pilot_commit", "save_strategy": "steps", "save_steps": 6, "max_steps": 12}
    whole = run(tmp_path / "whole", 2, launcher=[*TORCHRUN, "2"], **given)
    copytree(tmp_path / "whole" / "checkpoint-6", tmp_path / "part" / "checkpoint-6")
    resumed = run(tmp_path / "part", 2, resume=True, **given)
    assert whole.decided == resumed.decided
    assert whole.decided[0] == whole.decided[1]
    assert whole.decided[0]["held"]
    assert all(torch.equal(tensor, resumed.weights[name]) for name, tensor in whole.weights.items())


@pytest.mark.parametrize(
    ("wrong", "here", "there"),
    [
        ({"negative": 1}, "The metric is the whole reward", "The metric is the whole reward"),
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
    assert several.exit_codes(tmp_path, given | wrong) == [1, 1]
    assert here in several.said(tmp_path, 1)
    assert there in several.said(tmp_path, 0)


def test_with_vllm_a_process_keeps_up_with_rollouts_of_more_turns_on_another(tmp_path):
    """Process 0 calls its tool three times in each rollout, process 1 never; the engine needs both for every turn."""
    forked(tmp_path, {}, program="turns_in_step")
    first, second = (json.loads((tmp_path / f"process-{process}.json").read_text()) for process in (0, 1))
    assert first["turns"] == second["turns"] == 2 * 4  # two batches of four turns
    assert sorted(first["answers"]) == sorted(second["answers"]) == [0, 0, 3, 3]


@pytest.mark.parametrize(
    "given",
    [
        {"recipe": "pilot_commit"},
        {"recipe": "foresight_replay", "num_iterations": 2},
    ],
    ids=["rounds of generation", "log-probabilities of older rows"],
)
def test_a_sharded_model_is_trained_as_a_whole_one(given, tmp_path):
    """Each forward pass of a sharded model needs both processes."""
    given = given | {"per_device_train_batch_size": 8, "driver": {"use_sampler": False, "features": None}}
    losses = []
    for sharded in (False, True):
        forked(tmp_path / str(sharded), given | {"sharded": sharded})
        history = json.loads((tmp_path / str(sharded) / "history.json").read_text())
        losses.append([(line["loss"], line["grad_norm"]) for line in history if "loss" in line])
    assert np.array(losses[0]) == pytest.approx(np.array(losses[1]), rel=1e-3)


def test_a_process_without_a_rollout_joins_the_others_in_the_forward_passes_of_a_sharded_model(tmp_path):
    """Pilot-Commit orders one more rollout for its only group; the process that does not generate it must not go ahead."""
    given = {"recipe": "lone_commits", "per_device_train_batch_size": 2, "sharded": True}
    forked(tmp_path, given)
    first, second = (json.loads((tmp_path / f"process-{process}.json").read_text()) for process in (0, 1))
    assert first == second
    history = json.loads((tmp_path / "history.json").read_text())
    assert sum("loss" in line for line in history) == 4


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--cpu"], []])
def test_accelerate_launch_on_the_cpu_starts_one_process_which_says_so(tmp_path, flags):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *flags, "--num_processes", "2"]
    alone = run(tmp_path, 1, launcher=launcher, recipe="grpo")
    assert len(alone.decided) == 1
    assert "torchrun --nproc_per_node N" in alone.printed
