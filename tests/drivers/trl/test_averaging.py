"""Averaged weights under TRL: the model has them when it samples, is evaluated and is saved, and not when it is trained."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_trl
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from rollalloc.drivers.trl.averaging import AveragedWeights
from rollalloc.models.weights import weights_of

AVERAGED = {"driver": {"averaging": 32}}
SAVED = {"save_strategy": "steps", "save_steps": 3}


@pytest.fixture(autouse=True)
def begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean begins with the first step, so that three steps are enough for a test."""
    monkeypatch.setattr("rollalloc.models.weights.WINDOWS_BEFORE", 0.0)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten().clone() for each in model.parameters() if each.requires_grad])


class Watch(TrainerCallback):
    """The weights when each step was over."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.seen.append(flat(model))


def run(out: Any, window: int = 32, **given: Any) -> tuple[Any, list[torch.Tensor]]:
    watch = Watch()
    trainer = tiny_trl.trainer(out, "grpo", driver={"averaging": window}, more={"callbacks": [watch]}, **given)
    trainer.train()
    return trainer, watch.seen


def mean_of(seen: list[torch.Tensor], most_kept: float = 0.5) -> torch.Tensor:
    """The mean after these steps; a step of 16 rows keeps at most half of a window of 32."""
    mean = flat(tiny_trl.tiny_model())
    for step, each in enumerate(seen, 1):
        kept = min(most_kept, step / (step + 9))
        mean = kept * mean + (1 - kept) * each
    return mean


def assert_saves(trainer: Any, expected: torch.Tensor, out: Path) -> None:
    trainer.save_model(str(out / "model"))
    torch.testing.assert_close(flat(AutoModelForCausalLM.from_pretrained(out / "model")), expected)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def test_the_mean_is_saved_and_is_the_model_when_training_is_over(tmp_path):
    trainer, seen = run(tmp_path, max_steps=3, **SAVED)
    mean = mean_of(seen)
    torch.testing.assert_close(flat(trainer.model), mean)
    assert not torch.allclose(mean, seen[-1])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    torch.testing.assert_close(flat(saved), mean)
    assert_saves(trainer, mean, tmp_path)


def test_the_averaged_weights_sample_and_are_evaluated(tmp_path, monkeypatch):
    before, evaluated = [], []
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
    for steps, found in enumerate(before):
        torch.testing.assert_close(found, mean_of(watch.seen[:steps]))
    assert len(before) == 3
    torch.testing.assert_close(evaluated[-1], mean_of(watch.seen))


ADAPTERS = {"more": {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}}


@pytest.mark.parametrize("given", [{}, {"num_iterations": 2}, ADAPTERS], ids=["plain", "two passes", "LoRA"])
def test_a_resumed_run_is_the_run_that_was_not_stopped(given, tmp_path):
    def made(out: str, steps: int, **saving: Any) -> Any:
        torch.manual_seed(0)  # TRL's first versions leave the adapters to chance
        return tiny_trl.trainer(tmp_path / out, "pilot_commit", max_steps=steps, **saving, **AVERAGED, **given)

    steps = 2 * given.get("num_iterations", 1)
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
    with pytest.raises(ValueError, match=rf"averaging={then}, but .*checkpoint-3 was saved with"):
        resumed.train(resume_from_checkpoint=True)


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
    with pytest.raises(ValueError, match=r"averaging=32 needs weights in float32: in torch.bfloat16"):
        tiny_trl.trainer(tmp_path, "grpo", model=model, **AVERAGED)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flip_a_bit, "trained.safetensors was changed: its digest differs"),
        (lambda file: file.write_bytes(b"{}"), "trained.safetensors has 2 bytes of"),
        (lambda file: file.unlink(), "trained.safetensors is missing"),
        (lambda file: flip_a_bit(file.with_name("generations.safetensors")), "generations.safetensors was changed"),
        (lambda file: flip_a_bit(file.with_name("allocator.safetensors")), "allocator.safetensors was changed"),
        (lambda file: flip_a_bit(file.with_name("state.json")), "state.json was changed"),
        (lambda file: file.with_name("manifest.json").write_text("{}"), "manifest.json"),
    ],
)
def test_a_changed_file_is_named_and_the_model_stays_the_mean(spoil, said, tmp_path):
    trainer, _ = run(tmp_path, max_steps=3, **SAVED)
    mean = flat(trainer.model)
    spoil(tmp_path / "checkpoint-3/rollalloc/checkpoints/3/trained.safetensors")
    with pytest.raises(ValueError, match=said):
        trainer.train(resume_from_checkpoint=True)
    assert_saves(trainer, mean, tmp_path)


def test_weights_of_another_model_are_refused(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo", **AVERAGED)
    with pytest.raises(ValueError, match=r"here: trained weights.*missing"):
        trainer.averaged.check({"lm_head.weight": torch.zeros(1)}, Path("here"))
    other = {name: torch.zeros(1) for name in weights_of(trainer.model)}
    with pytest.raises(ValueError, match=r"here: trained weights.*must have shape"):
        trainer.averaged.check(other, Path("here"))


class Interrupting(torch.nn.Parameter):
    """Raises at the third assignment of its data: what a model's own parameter class, or a debugger, may do."""

    left = 2

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            if not Interrupting.left:
                Interrupting.left = -1
                raise KeyboardInterrupt
            Interrupting.left -= 1
        super().__setattr__(name, value)


def begun(out: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A trainer of which training began and whose mean differs from what is trained; both."""
    trainer = tiny_trl.trainer(out, "grpo", **AVERAGED)
    trainer.averaged.begin(None)
    own = flat(trainer.model)
    for parameter in trainer.model.parameters():
        parameter.data += 1
    return trainer, own, flat(trainer.model)


@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_swap_that_is_interrupted_did_not_happen(at, tmp_path):
    trainer, mean, own = begun(tmp_path)
    for parameter in trainer.model.parameters():
        parameter.__class__ = Interrupting
    Interrupting.left = at - 1
    with pytest.raises(KeyboardInterrupt), trainer.averaged.sampling():
        raise AssertionError("it was not interrupted")
    assert torch.equal(flat(trainer.model), own)
    with trainer.averaged.sampling():
        assert torch.equal(flat(trainer.model), mean)
    assert torch.equal(flat(trainer.model), own)


@pytest.mark.parametrize(
    ("ends", "error"), [(lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt), ({}.popitem, KeyError)]
)
def test_after_sampling_was_broken_off_what_is_trained_is_in_the_model_and_the_mean_is_saved(ends, error, tmp_path):
    trainer, mean, own = begun(tmp_path)
    with pytest.raises(error), trainer.averaged.sampling():
        ends()
    assert torch.equal(flat(trainer.model), own)
    assert_saves(trainer, mean, tmp_path)


def test_the_averaged_weights_may_be_asked_for_twice(tmp_path):
    trainer, mean, own = begun(tmp_path)
    with trainer.averaged.sampling():
        with trainer.averaged.sampling():
            assert torch.equal(flat(trainer.model), mean)
        assert torch.equal(flat(trainer.model), mean)
    assert torch.equal(flat(trainer.model), own)


def test_predict_uses_the_averaged_weights(tmp_path, monkeypatch):
    trainer, mean, own = begun(tmp_path)
    seen = []
    monkeypatch.setattr(GRPOTrainer, "predict", lambda self, *_: seen.append(flat(self.model)))
    trainer.predict(tiny_trl.prompts(4))
    assert torch.equal(seen[0], mean)
    assert torch.equal(flat(trainer.model), own)


def test_the_best_model_is_loaded_into_the_mean(tmp_path, monkeypatch):
    """Of three checkpoints the first is the best: the model is its mean when training is over, and is saved as that."""
    monkeypatch.setattr(GRPOTrainer, "evaluate", lambda self, *_, **__: {"eval_loss": float(self.state.global_step)})
    trainer = tiny_trl.trainer(
        tmp_path,
        "grpo",
        **AVERAGED,
        more={"eval_dataset": tiny_trl.prompts(4)},
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    best = flat(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(flat(trainer.model), best)
    assert_saves(trainer, best, tmp_path)


def test_each_of_several_steps_counts_its_share_of_the_rows_in_the_average(tmp_path):
    """A batch of 16 rows, in two steps: a step keeps at most 2 of a window of 10 rows, from the third step on."""
    trainer, seen = run(tmp_path, window=10, max_steps=4, num_iterations=2)
    torch.testing.assert_close(flat(trainer.model), mean_of(seen, most_kept=0.2))


class Begin(TrainerCallback):
    """The weights with which each call of `train` takes its first step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.first = True

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if self.first:
            self.seen.append(flat(model))
        self.first = False


def test_a_second_call_of_train_goes_on_from_what_was_trained_not_from_the_mean(tmp_path):
    trainer, trained = run(tmp_path, max_steps=2)
    trainer.add_callback(begin := Begin())
    trainer.train()
    assert not torch.allclose(mean_of(trained), trained[-1])
    assert torch.equal(begin.seen[0], trained[1])


def test_a_trainer_that_has_trained_resumes_with_the_checkpoints_mean(tmp_path):
    trainer, _ = run(tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    mean = flat(trainer.model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(flat(trainer.model), mean)
