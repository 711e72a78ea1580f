"""The running mean of trained weights, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from rollalloc import recipes
from rollalloc.core.events import Batch, Row
from rollalloc.models.policy import Policy
from rollalloc.models.weights import Diverged, WeightAverage, check_figures, first_not_finite, in_batch
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_first_tensor_with_an_entry_that_is_not_finite_is_named(dtype, value):
    tensors = {name: torch.ones(3, 5, dtype=dtype) for name in ("first", "second", "third")}
    assert first_not_finite(tensors.items()) is None
    tensors["second"][2, 4] = value
    tensors["third"][0, 0] = value
    assert first_not_finite(tensors.items()) == "second"


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 6e4), (torch.float32, 1e30), (torch.bfloat16, 1e38)])
def test_large_entries_are_finite_even_where_their_norm_is_not(dtype, large):
    assert first_not_finite([("large", torch.full((9,), large, dtype=dtype)), ("usual", torch.ones(3))]) is None


def test_empty_and_quantized_tensors_are_passed_over():
    named = [("empty", torch.empty(0)), ("quantized", torch.ones(3, dtype=torch.uint8))]
    assert first_not_finite(named) is None
    assert first_not_finite([*named, ("broken", torch.tensor([math.nan]))]) == "broken"


def test_every_figure_that_is_not_finite_is_named_with_its_value_and_step():
    check_figures({"the loss": 1e300, "the norm": 0.0}, 4, "nothing")
    with pytest.raises(
        Diverged, match=r"^the loss is -inf and the norm is nan in optimizer step 4: .* the step was skipped$"
    ):
        check_figures(
            {"the loss": -math.inf, "the mean": 1.0, "the norm": math.nan}, 4, consequence="the step was skipped"
        )


def test_the_message_names_the_batch_at_most_five_prompts_and_the_checkpoint():
    def message(prompts):
        rows = tuple(
            Row(rollout=rollout, group=0, prompt=prompt, advantage=0.0, weight=1.0, version=6)
            for rollout, prompt in enumerate(prompts)
        )
        return str(in_batch(Diverged("the loss is nan"), Batch(rows, 6), "p{}".format, "the last one is in x"))

    assert "batch 7, with the prompts p3, p1. The last one is in x. Look at" in message([3, 1, 3])
    assert "p8, p7, p6, p5, p4 and 2 more. " in message([8, 7, 6, 5, 4, 3, 2])
