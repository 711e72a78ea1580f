"""Under TRL, gradients are clipped by what their norms have been so far."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_trl
import torch
from transformers import TrainerCallback

CLIPPED = {"adaptive_clip": 1.5}
SAVED = {"save_strategy": "steps", "save_steps": 3}


class Norms(TrainerCallback):
    """The norm of the gradient that each step is taken with; `most` of them as if a spike came at step `spike`."""

    def __init__(self, spike: int | None = None) -> None:
        self.spike, self.seen = spike, list[float]()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == self.spike:
            for parameter in model.parameters():
                parameter.grad *= 100

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.seen.append(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item())


def run(out: Any, spike: int | None = None, resume: Any = None, **driver: Any) -> list[float]:
    """Norms of the gradients of six steps."""
    norms = Norms(spike)
    given = {"learning_rate": 1e-3, "max_steps": 6, "max_grad_norm": 100.0}
    trainer = tiny_trl.trainer(out, "reinforce", more={"callbacks": [norms]}, driver=driver, **given, **SAVED)
    trainer.train(resume)
    return norms.seen


def test_a_spike_is_clipped_to_a_multiple_of_the_mean_norm(tmp_path):
    free, spiked = run(tmp_path / "free"), run(tmp_path / "spiked", 4, **CLIPPED)
    mean = free[0]
    for norm in free[1:4]:
        mean = 0.95 * mean + 0.05 * min(norm, 3 * mean)
    assert free[4] * 100 > 1.5 * mean
    assert spiked[4] == pytest.approx(1.5 * mean, rel=1e-3)


def test_a_resumed_run_goes_on_from_the_mean_norm(tmp_path):
    whole = run(tmp_path, 4, **CLIPPED)
    resumed = run(tmp_path, 4, resume=str(tmp_path / "checkpoint-3"), **CLIPPED)
    assert resumed == pytest.approx(whole[3:], rel=1e-5)


@pytest.mark.parametrize("factor", [0.5, float("inf"), float("nan")])
def test_a_factor_that_is_none_is_refused(factor, tmp_path):
    with pytest.raises(ValueError, match="adaptive_clip must be a multiple of the mean gradient norm, at least 1"):
        tiny_trl.trainer(tmp_path, "reinforce", driver={"adaptive_clip": factor})


def test_without_a_limit_of_trls_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="goes with a max_grad_norm above 0, got 0"):
        tiny_trl.trainer(tmp_path, "reinforce", driver=CLIPPED, max_grad_norm=0.0)
