"""Averaged weights under TRL: the model has them when it samples, is evaluated and is saved, and not when it is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_trl
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback

from rollalloc.drivers.trl.averaging import AveragedWeights

AVERAGED = {"driver": {"averaging": 32}}
SAVED = {"save_strategy": "steps", "save_steps": 3}


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten().clone() for each in model.parameters() if each.requires_grad])


class Watch(TrainerCallback):
    """The weights when each step was over."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.seen.append(flat(model))


def run(out: Any, **given: Any) -> tuple[Any, list[torch.Tensor]]:
    watch = Watch()
    trainer = tiny_trl.trainer(out, "grpo", **AVERAGED, more={"callbacks": [watch]}, **given)
    trainer.train()
    return trainer, watch.seen


def mean_of(start: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    mean = start
    for step, each in enumerate(seen, 1):
        kept = min(0.5, step / (step + 9))
        mean = kept * mean + (1 - kept) * each
    return mean


def test_the_mean_is_saved_and_is_the_model_when_training_is_over(tmp_path):
    trainer, seen = run(tmp_path, max_steps=3, **SAVED)
    mean = mean_of(flat(tiny_trl.tiny_model()), seen)
    torch.testing.assert_close(flat(trainer.model), mean)
    assert not torch.allclose(mean, seen[-1])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    torch.testing.assert_close(flat(saved), mean)
    trainer.save_model(str(tmp_path / "model"))
    torch.testing.assert_close(flat(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), mean)


def test_what_samples_and_is_evaluated_is_the_mean(tmp_path, monkeypatch):
    before, sampled, evaluated = [], [], []
    watch = Watch()
    trainer = tiny_trl.trainer(
        tmp_path,
        "grpo",
        **AVERAGED,
        more={"callbacks": [watch], "eval_dataset": tiny_trl.prompts(4)},
        max_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        per_device_eval_batch_size=4,
    )
    generate, complete = trainer.allocation.next_batch, trainer._calculate_rewards

    def next_batch(*given: Any) -> Any:
        before.append(flat(trainer.model))
        return generate(*given)

    def rewards(*given: Any) -> Any:
        if not trainer.model.training:
            evaluated.append(flat(trainer.model))
        return complete(*given)

    monkeypatch.setattr(trainer.allocation, "next_batch", next_batch)
    monkeypatch.setattr(trainer, "_calculate_rewards", rewards)
    trainer.train()
    start = flat(tiny_trl.tiny_model())
    sampled = [mean_of(start, watch.seen[:steps]) for steps in range(3)]
    for found, expected in zip(before, sampled, strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(evaluated[-1], mean_of(start, watch.seen))


def adapters() -> dict[str, Any]:
    return {"more": {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}}


@pytest.mark.parametrize("of", [dict, lambda: {"num_iterations": 2}, adapters], ids=["plain", "two passes", "LoRA"])
def test_a_resumed_run_is_the_run_that_was_not_stopped(of, tmp_path):
    def made(out: str, steps: int, **saving: Any) -> Any:
        torch.manual_seed(0)  # TRL's first versions leave the adapters to chance
        return tiny_trl.trainer(tmp_path / out, "pilot_commit", max_steps=steps, **saving, **AVERAGED, **of())

    steps = 2 * of().get("num_iterations", 1)
    whole = made("whole", 2 * steps)
    whole.train()
    made("a", steps, save_strategy="steps", save_steps=steps).train()
    resumed = made("a", 2 * steps)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(flat(resumed.model), flat(whole.model))


@pytest.mark.parametrize(("first", "then"), [(32, 0), (0, 32)])
def test_a_run_is_resumed_as_it_was_begun(first, then, tmp_path):
    tiny_trl.trainer(tmp_path, "grpo", max_steps=3, driver={"averaging": first}, **SAVED).train()
    resumed = tiny_trl.trainer(tmp_path, "grpo", max_steps=6, driver={"averaging": then}, **SAVED)
    with pytest.raises(ValueError, match=rf"averaging={then}, but .*checkpoint-3 was saved otherwise"):
        resumed.train(resume_from_checkpoint=True)


def test_trained_again_it_goes_on_from_what_was_trained(tmp_path):
    trainer, seen = run(tmp_path, max_steps=3)
    other = [each.clone() for each in trainer.averaged._other]
    torch.testing.assert_close(torch.cat([each.flatten() for each in other]), seen[-1])
    began = []
    trainer.add_callback(Began(began))
    trainer.train()
    torch.testing.assert_close(began[0], seen[2])


class Began(TrainerCallback):
    def __init__(self, began: list[torch.Tensor]) -> None:
        self.began = began

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if not self.began:
            self.began.append(flat(model))


@pytest.mark.parametrize(
    ("window", "sharded", "said"),
    [
        (-1, False, "averaging must be a whole number of at least 0"),
        (640, True, "needs the whole model on every process"),
    ],
)
def test_what_cannot_be_averaged_is_refused(window, sharded, said):
    with pytest.raises(ValueError, match=said):
        AveragedWeights(SimpleNamespace(is_fsdp_enabled=sharded, is_deepspeed_enabled=False), window)


def test_weights_in_half_precision_are_refused_for_their_mean_would_stand_still(tmp_path):
    model = tiny_trl.tiny_model().to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"averaging=32 needs weights in float32, for in torch.bfloat16"):
        tiny_trl.trainer(tmp_path, "grpo", model=model, **AVERAGED)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file, held: file.write_bytes(b"{}"), "is no safetensors file"),
        (lambda file, held: save_file({"lm_head.weight": held["lm_head.weight"]}, file), "missing keys"),
        (lambda file, held: save_file({name: torch.zeros(1) for name in held}, file), "must have shape"),
        (lambda file, held: file.unlink(), "it has no rollalloc-trained"),
    ],
)
def test_a_spoilt_file_is_named_and_the_model_stays_the_mean(spoil, said, tmp_path):
    trainer, _ = run(tmp_path, max_steps=3, **SAVED)
    mean = flat(trainer.model)
    file = tmp_path / "checkpoint-3/rollalloc-trained.safetensors"
    spoil(file, load_file(file))
    with pytest.raises(ValueError, match=said):
        trainer.train(resume_from_checkpoint=True)
    trainer.save_model(str(tmp_path / "model"))
    torch.testing.assert_close(flat(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), mean)
