"""A run under TRL whose loss, gradient or weights are not finite: no step, no mean, no checkpoint; an error says where."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_trl
import torch
from safetensors.torch import load_file, save_file

from rollalloc.drivers.trl.checkpoints import FiniteTraining
from rollalloc.files.stamps import stamp_of
from rollalloc.models.weights import Diverged

SAVED = {"save_strategy": "steps", "save_steps": 1}


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten().clone() for each in model.parameters()])


def breaking(trainer: Any, call: int, value: float = math.nan) -> Any:
    """The trainer, whose loss is multiplied by the value when it is computed for the given time in training."""
    compute, calls = trainer._compute_loss, []

    def broken(model: Any, inputs: Any) -> torch.Tensor:
        calls.extend([1] * torch.is_grad_enabled())  # not the check of the first rows
        return compute(model, inputs) * (value if torch.is_grad_enabled() and len(calls) == call else 1)

    trainer._compute_loss = broken
    return trainer


@pytest.mark.parametrize(
    ("given", "call", "value"),
    [
        ({}, 3, math.inf),
        # The first micro-batch of the third step; TRL's log would show a finite loss for it.
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "driver": {"averaging": 32}},
            5,
            math.nan,
        ),
    ],
    ids=["inf", "accumulated and averaged"],
)
def test_a_step_that_is_not_finite_is_not_taken_and_its_batch_is_named(given, call, value, tmp_path):
    trainer = breaking(tiny_trl.trainer(tmp_path, "grpo", **SAVED, **given), call, value)
    with pytest.raises(
        Diverged, match=r"the loss is (nan|inf) .* in optimizer step 3: .*not taken\. It was batch 3,"
    ) as error:
        trainer.train()
    prompts = dict.fromkeys(row.prompt for row in trainer.allocation.allocator.batch.rows)
    assert re.findall(r"row (\d+)", str(error.value)) == [str(prompt) for prompt in prompts]
    assert f"The last checkpoint with finite weights is {tmp_path / 'checkpoint-2'} " in str(error.value)
    assert sorted(place.name for place in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert all(math.isfinite(line["loss"]) for line in trainer.state.log_history)
    saved = load_file(tmp_path / "checkpoint-2/model.safetensors")
    with trainer.averaged.sampling():
        assert all(torch.equal(saved[name], each) for name, each in trainer.model.named_parameters() if name in saved)
    again = tiny_trl.trainer(tmp_path, "grpo", **SAVED, **given)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert flat(again.model).isfinite().all()


def test_weights_that_a_step_made_infinite_are_neither_averaged_nor_saved(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo", driver={"averaging": 32}, max_steps=2, **SAVED)
    trainer.create_optimizer()
    step, steps = trainer.optimizer.step, []

    def overflowing(*given: Any, **named: Any) -> Any:
        step(*given, **named)
        steps.append(1)
        if len(steps) == 2:
            with torch.no_grad():
                trainer.model.lm_head.weight[0, 0] = math.inf

    trainer.optimizer.step = overflowing
    with pytest.raises(
        Diverged, match=r"after optimizer step 2: the first of them is lm_head\.weight\. It was batch 2,"
    ):
        trainer.train()
    assert not (tmp_path / "checkpoint-2").exists()
    with trainer.averaged.sampling():
        assert flat(trainer.model).isfinite().all()
    with trainer.averaged.sampling(), torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(Diverged, match=r"not saved: the first of them is lm_head\.weight.*checkpoint-1 "):
        trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("averaging", [0, 32])
def test_a_checkpoint_that_is_not_finite_is_refused_with_the_newest_that_is(averaging, tmp_path):
    made = {"driver": {"averaging": averaging}, "max_steps": 3, **SAVED}
    tiny_trl.trainer(tmp_path, "grpo", **made).train()
    for step in (2, 3):
        place = tmp_path / f"checkpoint-{step}"
        for file in [place / "model.safetensors", *place.rglob("trained.safetensors")][-1:]:
            tensors = load_file(file)
            tensors["lm_head.weight"][3] = math.nan
            save_file(tensors, file, {"format": "pt"})
    if averaging:  # the digest that an older release would have written
        forget_digests(tmp_path)
    with pytest.raises(Diverged, match=r"from .*/checkpoint-3: .* lm_head\.weight; .* is .*/checkpoint-1 "):
        tiny_trl.trainer(tmp_path, "grpo", **made).train(resume_from_checkpoint=True)
    with pytest.raises(Diverged, match=r"from .*/checkpoint-2: .*/checkpoint-1 "):
        tiny_trl.trainer(tmp_path, "grpo", **made).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def forget_digests(folder: Any) -> None:
    for manifest in folder.rglob("manifest.json"):
        there = json.loads(manifest.read_text())
        there["files"] = {name: stamp_of(manifest.parent / name) for name in there["files"]}
        manifest.write_text(json.dumps(there))


def test_a_model_that_is_not_finite_is_refused_before_the_first_step(tmp_path):
    model = tiny_trl.tiny_model()
    with torch.no_grad():
        model.lm_head.weight[2, 2] = -math.inf
    trainer = tiny_trl.trainer(tmp_path, "grpo", model=model)
    with pytest.raises(
        Diverged, match=r"the model's weights are not finite: the first of them is lm_head\.weight; load"
    ):
        trainer.train()
    assert trainer.allocation.allocator.paid == 0


class Accelerator:
    """Two processes; the other one has these figures."""

    def __init__(self, others: tuple[float, ...], scaler: Any = None) -> None:
        self.others, self.scaler = others, scaler
        self.num_processes, self.device = 2, torch.device("cpu")

    def gather(self, figures: torch.Tensor) -> torch.Tensor:
        return torch.cat([figures, torch.tensor([self.others])])


def watch_of(tmp_path: Any, others: tuple[float, ...] = (0.0, 0.0), scaler: Any = None) -> FiniteTraining:
    return FiniteTraining(
        SimpleNamespace(
            accelerator=Accelerator(others, scaler),
            is_deepspeed_enabled=False,
            args=SimpleNamespace(output_dir=str(tmp_path)),
            state=SimpleNamespace(global_step=6),
            allocation=SimpleNamespace(allocator=SimpleNamespace(batch=None)),
        )
    )


def optimizer_with(gradient: float) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, gradient])
    return torch.optim.SGD([weight])


@pytest.mark.parametrize(("others", "named"), [((math.nan, 0.0), "the loss"), ((0.0, math.nan), "the gradient")])
def test_what_is_not_finite_in_another_process_ends_this_one_too(others, named, tmp_path):
    watch = watch_of(tmp_path, others)
    watch.see(torch.tensor(0.5))
    with pytest.raises(Diverged, match=f"^{named} is nan in optimizer step 7: .*; there is no earlier checkpoint"):
        watch.on_pre_optimizer_step(None, None, None, optimizer=optimizer_with(2.0))


@pytest.mark.parametrize("scale", [65536.0, 1.0])
def test_a_scaled_gradient_that_overflows_is_left_to_the_scaler(scale, tmp_path):
    watch = watch_of(tmp_path, scaler=SimpleNamespace(get_scale=lambda: scale))
    watch.see(torch.tensor(0.5))
    watch.on_pre_optimizer_step(None, None, None, optimizer=optimizer_with(math.inf))
    watch.see(torch.tensor(math.nan))  # the loss itself is not scaled
    with pytest.raises(Diverged, match="the loss is nan"):
        watch.on_pre_optimizer_step(None, None, None, optimizer=optimizer_with(math.inf))


def test_a_gradient_that_overflows_at_the_least_scale_is_an_error(tmp_path):
    watch = watch_of(tmp_path, scaler=SimpleNamespace(get_scale=lambda: 0.5))
    with pytest.raises(Diverged, match=r"^the gradient is nan"):
        watch.on_pre_optimizer_step(None, None, None, optimizer=optimizer_with(math.inf))
