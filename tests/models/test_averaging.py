"""Averaged weights: what samples, is evaluated and is kept is the running mean of what is trained."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rollalloc import recipes
from rollalloc.models.policy import Policy
from rollalloc.models.weights import WeightAverage
from tiny_policy import flat


def test_averaged_weights_by_hand():
    """With 4 rows a step: none for two windows, 5 steps; then .1, 2/11 and so on, until the window of 10 rows bounds it."""
    mean = torch.nn.Linear(1, 1, bias=False)
    mean.weight.data.fill_(1.0)
    average = WeightAverage(mean, 10)
    expected = 1.0
    for step, kept in enumerate([0, 0, 0, 0, 0, *(t / (t + 9) for t in range(1, 14)), 0.6, 0.6], 1):
        weight = float(step % 3)
        average.model.weight.data.fill_(weight)
        average.take(step, 4)
        expected = kept * expected + (1 - kept) * weight
        assert mean.weight.item() == pytest.approx(expected)
    average.take(21, 12)  # more rows than the window has
    assert mean.weight.item() == average.model.weight.item()


def test_without_a_decay_there_is_one_model():
    model = torch.nn.Linear(2, 2)
    average = WeightAverage(model, 0)
    average.take(1, 8)
    assert average.model is model


def test_frozen_weights_are_not_copied_for_the_average():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    trained = WeightAverage(model, 640).model
    assert trained[0].weight is model[0].weight
    assert trained[1].weight is not model[1].weight
    assert torch.equal(trained[1].weight, model[1].weight)


def test_a_run_samples_from_evaluates_and_keeps_the_mean(trainer_of, tmp_path):
    trainer = trainer_of(recipes.grpo(4, 4), max_batches=5, averaging=32, learning_rate=0.01, folder=tmp_path / "run")
    trainer.run()
    assert trainer.behaviour.policy().model is trainer.policy.model
    kept = Policy.load(tmp_path / "run/model", device="cpu")
    assert torch.equal(flat(kept.model), flat(trainer.policy.model))
    assert not torch.allclose(flat(trainer.policy.model), flat(trainer.updater.model))
    newest = max((tmp_path / "run/checkpoints").iterdir(), key=lambda each: int(each.name))
    here = dict(trainer.updater.model.named_parameters())
    for name, saved in load_file(newest / "trained.safetensors").items():
        torch.testing.assert_close(saved, here[name].detach())
