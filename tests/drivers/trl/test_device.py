"""TRL's trainer on a device that is not the CPU, see tests/models/test_device.py."""

from __future__ import annotations

import pytest
import tiny_trl
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_stand_in import register, stand_in

try:
    register()
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("recipe", ["foresight_replay", pytest.param("pilot_commit", marks=pytest.mark.e2e)])
def test_a_run_decides_and_learns_as_on_the_cpu(recipe, tmp_path):
    found = []
    with sdpa_kernel(SDPBackend.MATH), stand_in() as counts:
        for place in ("cpu", "cuda"):
            trainer = tiny_trl.trainer(tmp_path / place, recipe, use_cpu=place == "cpu")
            assert trainer.accelerator.device.type == place
            counts.reset()
            trainer.train()
            assert bool(counts.to_host) == (place == "cuda")
            rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
            weights = {name: tensor.cpu() for name, tensor in tiny_trl.weights(trainer.model).items()}
            found.append((rewards, trainer.allocation.allocator.accounts(), weights))
        # Each rollout's likelihood comes with those of its pass.
        assert not any("trl/generation.py" in place for place in counts.places if place.startswith("aten::index"))
    (rewards, accounts, weights), (there_rewards, there_accounts, there_weights) = found
    assert there_rewards == pytest.approx(rewards)
    assert there_accounts == accounts
    for name, tensor in weights.items():
        torch.testing.assert_close(there_weights[name], tensor, rtol=0, atol=1e-4)
