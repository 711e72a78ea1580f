"""`AllocatedGRPOTrainer` where Unsloth has patched TRL: losses and gradients are those of stock TRL on the same rows."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportMissingImports=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import patched_run
import pytest
import tiny_trl
import torch
import trl
from peft import LoraConfig
from test_distributed import TORCHRUN, launched
from test_turns import Shelf, Spoken, answered, chats, look_up, talking_model, talking_tokenizer
from transformers import AutoModelForCausalLM
from trl.trainer import utils

import tiny_policy
from arithmetic import assert_same_gradients
from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer, unsloth
from rollalloc.drivers.trl import trainer as driver
from rollalloc.drivers.trl.loss_check import LossError


class Plain:
    """TRL's fused head of this release in plain PyTorch: its Triton kernel needs a GPU."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *_: Any) -> Any:
        logprobs = (torch.nn.functional.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
        return logprobs.gather(-1, labels[:, None])[:, 0], entropy, None, None, None


def stock_class() -> Any:
    """TRL's own class, read again from its file."""
    place = Path(trl.__file__).parent / "trainer" / "grpo_trainer.py"
    spec = importlib.util.spec_from_file_location("trl.trainer.stock_grpo_trainer", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.GRPOTrainer


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float, float]]:
    """The loss, stock TRL's, and the largest difference of a gradient over the largest gradient, of each micro-batch."""
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Plain)
    monkeypatch.setattr(tiny_policy, "WORDS", patched_run.WORDS)
    monkeypatch.setattr(tiny_trl, "WORDS", patched_run.WORDS)
    stock, own, found = stock_class(), AllocatedGRPOTrainer.compute_loss, []

    def compute_loss(self: Any, model: Any, inputs: Any, **named: Any) -> Any:
        loss = own(self, model, inputs, **named)
        twin = copy.copy(self)
        twin.__class__, twin._metrics = stock, {"train": defaultdict(list), "eval": defaultdict(list)}
        theirs = twin._compute_loss(model, inputs)
        weights = [each for each in self.model.parameters() if each.requires_grad]
        ours = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        pairs = [
            (mine, yours)
            for mine, yours in zip(ours, torch.autograd.grad(theirs, weights, allow_unused=True), strict=True)
            if yours is not None
        ]
        apart = max(float((mine - yours).abs().max()) for mine, yours in pairs)
        largest = max(float(yours.abs().max()) for _, yours in pairs)
        found.append((float(loss), float(theirs), apart / largest if largest else apart))
        return loss

    monkeypatch.setattr(AllocatedGRPOTrainer, "compute_loss", compute_loss)
    return found


def thirds(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3 == 0) for text in completions]


def made(out: Path, recipe: str, **given: Any) -> Any:
    usual = {"gradient_accumulation_steps": 1, "beta": 0.0, "reward": thirds, "max_steps": 2}
    return tiny_trl.trainer(out, recipe, **usual | given)


SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
LORA = {"more": {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}}
RUNS = {
    "grpo": ("grpo", {}),
    "dapo": ("dapo", {}),
    "pods": ("pods", {}),
    "darts": ("darts_none", {}),
    "reinforce": ("reinforce", {}),
    "raft": ("raft", {}),
    "stale rows": ("pilot_commit", {"max_steps": 3}),
    "replay": ("foresight_replay", {"max_steps": 3, "driver": {"features": None}}),
    "averaging": ("grpo", {"driver": {"averaging": 32}}),
    "two passes": ("grpo", {"num_iterations": 2}),
    "several steps": ("grpo", SPLIT | {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 4}),
    "accumulation": ("grpo", SPLIT),
    "stale rows, averaging, two passes": (
        "pilot_commit",
        {"num_iterations": 2, "max_steps": 4, "driver": {"averaging": 32}},
    ),
    "LoRA": ("pilot_commit", {"max_steps": 3} | LORA),
} | {
    f"loss {loss}": ("pilot_commit", {"loss_type": loss, "num_iterations": 2, "max_steps": 4})
    for loss in ("grpo", "bnpo")
}


def assert_as_stock(compared: list[tuple[float, float, float]]) -> None:
    """Six digits of the loss, and gradients to 1e-4 of the largest: what two ways to pad rows differ by in float32."""
    assert any(theirs for _, theirs, _ in compared)
    for loss, theirs, gradients in compared:
        assert loss == pytest.approx(theirs, abs=2e-6, rel=2e-6)
        assert gradients < 1e-4


@pytest.mark.parametrize(("recipe", "given"), RUNS.values(), ids=RUNS.keys())
def test_losses_and_gradients_equal_those_of_stock_trl(recipe, given, tmp_path, compared):
    trainer = made(tmp_path, recipe, **given)
    assert unsloth.is_unsloths(trainer)
    trainer.train()
    assert_as_stock(compared)


def test_the_reference_term_equals_that_of_stock_trl(tmp_path, compared):
    tiny_trl.tiny_model().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    made(tmp_path, "pilot_commit", model=model, beta=0.1, max_steps=3).train()
    assert_as_stock(compared)


@pytest.mark.parametrize("given", [{"tools": [look_up]}, {"environment_factory": Shelf}], ids=["tools", "environment"])
def test_rows_in_which_a_tool_answers_are_stocks(given, tmp_path, compared):
    """The tool's answer is in a row, and does not count; two passes, so that log-probabilities are handed over, too."""
    trainer = made(
        tmp_path,
        recipes.grpo(groups=1, n=3),
        model=talking_model(),
        dataset=chats(),
        reward=answered,
        more={"processing_class": talking_tokenizer()} | given,
        per_device_train_batch_size=3,
        num_generations=3,
        max_completion_length=400,
        num_iterations=2,
    )
    with patch.object(trainer.model, "generate", Spoken("look_up")):
        trainer.train()
    assert_as_stock(compared)
    assert trainer.state.log_history[0]["tools/call_frequency"] == pytest.approx(2 / 3)


def test_two_processes_train_as_one(tmp_path, monkeypatch):
    """The same decisions and gradients, with log-probabilities handed over."""
    for module in (tiny_policy, tiny_trl):
        monkeypatch.setattr(module, "WORDS", patched_run.WORDS)
    given = {"recipe": "pilot_commit", "max_steps": 2, "num_iterations": 2, "gradient_accumulation_steps": 1}
    given |= {"by_key": True, "beta": 0.0, "learning_rate": 1e-3, "max_grad_norm": 1e9}
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    tiny_trl.main({"out": one, "per_device_train_batch_size": 16} | given)
    done = launched(
        two, [*TORCHRUN, "2"], {"per_device_train_batch_size": 8} | given, program=str(patched_run.__file__)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    decided = [json.loads(file.read_text()) for out in (one, two) for file in sorted(out.glob("process-*.json"))]
    assert decided == decided[:1] * 3
    assert_same_gradients(*(torch.load(out / "gradients.pt", weights_only=True) for out in (one, two)))


def test_rows_of_vllm_are_weighed_as_in_stock(tmp_path, compared):
    trainer = made(tmp_path, "grpo", num_iterations=2)
    trainer.use_vllm, trainer.vllm_generation = True, tiny_trl.FakeVllm()
    trainer.train()
    loss, theirs, gradients = compared[0]
    assert loss == pytest.approx(theirs, abs=1e-3)  # with vLLM, Unsloth computes in half precision
    assert gradients < 1e-2


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path, compared):
    def weights(trainer: Any) -> torch.Tensor:
        return torch.cat([each.detach().flatten().clone() for each in trainer.model.parameters()])

    saved = {"save_strategy": "steps", "save_steps": 1, "driver": {"averaging": 32}}
    whole = made(tmp_path / "whole", "pilot_commit", **saved)
    whole.train()
    made(tmp_path / "a", "pilot_commit", **saved | {"max_steps": 1}).train()
    resumed = made(tmp_path / "a", "pilot_commit", **saved)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("recipe", "given"),
    [("grpo", {"num_iterations": 2}), ("grpo", {"driver": {"averaging": 32}}), ("reinforce", {})],
    ids=["two passes", "averaging", "generated padding"],
)
def test_without_its_layout_the_check_stops_the_run(recipe, given, tmp_path, monkeypatch):
    """What was silently wrong before: log-probabilities at other tokens, and generated pad tokens that do not count."""
    monkeypatch.setattr(driver, "is_unsloths", lambda _: False)
    trainer = made(tmp_path, recipe, reward=tiny_trl.starts_right, **given)
    with pytest.raises(LossError, match=r"nothing was trained.*class UnslothGRPOTrainer"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_vllm_without_fast_inference_is_refused(tmp_path):
    with pytest.raises(ValueError, match="fast_inference=True"):
        made(tmp_path, "grpo", use_vllm=True)


def test_a_generated_file_of_another_release_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unsloth, "_installed", lambda name: "0.1")
    with pytest.raises(ImportError, match=r"was generated for unsloth .* \(installed: 0.1\).*delete the folder"):
        made(tmp_path, "grpo")


def test_a_newer_unsloth_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(unsloth, "TESTED", unsloth.Version("2020.1"))
    made(tmp_path, "grpo")
    assert "is newer than 2020.1, the newest release that rollalloc was tested with" in caplog.text
