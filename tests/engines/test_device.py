"""On a device that is not the CPU: nothing is where it should not be, the same tokens come, and the host seldom waits.

The device is `rollalloc.testing.device`, a stand-in for a GPU; what a kernel of a GPU rounds otherwise it does not show.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollalloc import recipes
from rollalloc.engines import checkpoint
from rollalloc.engines.evaluation import HeldOut
from rollalloc.engines.lora import Lora
from rollalloc.engines.objective import Loss
from rollalloc.engines.settings import Streaming
from rollalloc.testing.device import stand_in

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA.*")


@pytest.fixture
def device():
    """The device, and both sides attend in one and the same way."""
    with sdpa_kernel(SDPBackend.MATH), stand_in() as counts:
        yield counts


@pytest.fixture
def on(policy_of):
    """(device) → a policy that is there."""

    def made(where, **changes):
        policy = policy_of(**changes)
        policy.model.to(where)
        return policy

    return made


def weights(model):
    return {name: tensor.detach().cpu().clone() for name, tensor in checkpoint.weights(model).items()}


def lines(folder):
    """The metrics, without what depends on a clock."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in read]


RECIPE = recipes.pilot_commit(4, 2, 6, 12)
RUNS = {
    "plain": {},
    "kl": {"loss": Loss(kl=0.1)},
    "steps": {"optimizer_steps_per_batch": 2},
    "stale": {"recipe": recipes.dapo(4, 4, 8, surplus="carry")},
    "half": {"sampling_dtype": "bfloat16"},
    "recomputed": {"gradient_checkpointing": True},
    "lora": {"lora": Lora(2)},
    "lora half": {"lora": Lora(2), "sampling_dtype": "bfloat16"},
    "in turn": {"engine": "async", "streaming": Streaming(overlap=False)},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_decides_and_learns_as_on_the_cpu(name, device, on, trainer_of, prompts_of, tmp_path):
    found = []
    for where in ("cpu", "cuda"):
        changes = dict(RUNS[name])
        recipe, lora = changes.pop("recipe", RECIPE), changes.pop("lora", None)

        def made(recipe=recipe, lora=lora, where=where, changes=changes, **more):
            policy = on(where)
            policy = policy if lora is None else policy.with_lora(lora, seed=0)
            given = {"max_batches": 4, "eval_every": 30, "heldout": HeldOut(prompts_of(6)), "precision": "fp32"}
            return trainer_of(recipe, policy=policy, folder=tmp_path / where, **given | changes | more)

        trainer = made(max_batches=2)
        trainer.run()
        resumed = made()
        resumed.resume()
        resumed.run()
        found.append((lines(tmp_path / where), weights(resumed.policy.model)))
    (cpu, cpu_weights), (there, there_weights) = found
    print(RUNS[name], [(k, a[k], b[k]) for a, b in zip(cpu, there) for k in a if a[k] != b[k]])
    print({k: float((there_weights[k]-t).abs().max()) for k, t in cpu_weights.items()})
