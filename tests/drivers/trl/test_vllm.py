"""TRL's `use_vllm=True` with the real vLLM, on CPUs: `make test-trl-vllm`. A run takes about a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "verl"
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")]


def steps_of(tmp_path: Path, recipe: str, averaging: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a run found, and the log of its steps."""
    subprocess.run([sys.executable, EXAMPLE / "make_tiny.py", tmp_path], check=True)
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, HERE / "vllm_run.py", tmp_path / "model", recipe, str(averaging), tmp_path]
    run = subprocess.run(command, env=os.environ | alone, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    steps = [line for line in found["log"] if "loss" in line]
    assert len(steps) == 6
    return found, steps


def test_vllm_stops_at_the_limit_of_a_batch(tmp_path):
    """The core refuses a longer rollout. The first batches and each third one have no limit but TRL's, of 40 tokens."""
    _, steps = steps_of(tmp_path, "limited", 0)
    longest = [step["completions/max_length"] for step in steps]
    assert longest[0] == longest[3] == 40
    assert longest[5] == steps[5]["rollalloc/limit"] < 40


@pytest.mark.parametrize(("recipe", "averaging"), [("reinforce", 32), ("grpo", 0)])
def test_vllm_samples_from_the_weights_that_are_trained(tmp_path, recipe, averaging):
    """Averaged weights if there are any, else the current ones: with others, the log-probabilities would differ."""
    found, steps = steps_of(tmp_path, recipe, averaging)
    assert found["accounts"]["trained"] >= 6 * 12
    assert found["moved"] > 1e-3
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)
