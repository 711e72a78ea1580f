"""`LossCheck`: the trainer's own loss is checked on the first rows of a run, whoever patched it."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_trl
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from rollalloc.drivers.trl.loss_check import LossError
from rollalloc.drivers.trl.patched import origin

SEVERAL = {"num_iterations": 2}
Rows = dict[str, Any]


def patched(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Rows], Rows | None]) -> None:
    """Let TRL's class compute the loss of changed rows, as a library that patches it may do by mistake."""
    own = GRPOTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Rows, *given: Any, **named: Any) -> Tensor:
        return own(self, model, change(self, dict(inputs)) or inputs, *given, **named)

    monkeypatch.setattr(GRPOTrainer, "compute_loss", compute_loss)


def shift(trainer: Any, rows: Rows) -> Rows:
    old = "old_per_token_logps"
    return rows | ({old: rows[old].roll(1, dims=1)} if old in rows else {})


def mask_by_token(trainer: Any, rows: Rows) -> Rows:
    """As if the end of a sequence were the padding."""
    return rows | {"completion_mask": rows["completion_mask"] * (rows["completion_ids"] != 1)}


def scale(trainer: Any, rows: Rows) -> Rows:
    return rows | {"advantages": 2 * rows["advantages"]}


def ignore(name: str) -> Callable[[Any, Rows], Rows]:
    def change(trainer: Any, rows: Rows) -> Rows:
        if name == "importance_sampling_ratio":
            return rows | ({name: torch.ones_like(rows[name])} if name in rows else {})
        return {key: value for key, value in rows.items() if key != name}

    return change


def shift_reference(trainer: Any, rows: Rows) -> Rows:
    name = "ref_per_token_logps"
    return rows | ({name: rows[name].roll(1, dims=1)} if name in rows else {})


def with_vllm(trainer: Any) -> Any:
    trainer.use_vllm, trainer.vllm_generation = True, tiny_trl.FakeVllm()
    return trainer


def flat(trainer: Any) -> Tensor:
    return torch.cat([each.detach().flatten().clone() for each in trainer.model.parameters()])


def assert_stops(trainer: Any, *said: str) -> None:
    """The run ends before it has trained anything, and says each of these."""
    before = flat(trainer)
    with pytest.raises(LossError, match="nothing was trained") as stopped:
        trainer.train()
    for part in (*said, "compute_loss of module"):
        assert part in str(stopped.value)
    assert torch.equal(flat(trainer), before)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (shift, SEVERAL, ("the importance ratio is", "num_iterations=1")),
        (mask_by_token, {"loss_type": "grpo"}, ("the masks do not cover exactly", "No setting mends this")),
        (mask_by_token, {}, ("the masks do not cover exactly the completion tokens", "No setting mends this")),
        (mask_by_token, SEVERAL, ("the masks do not cover exactly the completion tokens", "No setting mends this")),
        (scale, {}, ("the advantages are scaled: each counts 2 times", "No setting mends this")),
        (ignore("old_per_token_logps"), SEVERAL, ("it ignores old_per_token_logps", "averaging=0")),
    ],
    ids=[
        "shifted",
        "masked by pad, means of rows",
        "masked by pad",
        "masked by pad, two passes",
        "scaled",
        "ratio dropped",
    ],
)
def test_a_patch_that_is_wrong_stops_the_run(change, given, said, tmp_path, monkeypatch):
    patched(monkeypatch, change)
    assert_stops(tiny_trl.trainer(tmp_path, "grpo", **given), *said)


def test_a_patch_that_ignores_the_importance_weights_of_vllm_stops_the_run(tmp_path, monkeypatch):
    patched(monkeypatch, ignore("importance_sampling_ratio"))
    trainer = with_vllm(tiny_trl.trainer(tmp_path, "grpo"))
    assert_stops(trainer, "it ignores importance_sampling_ratio", "vllm_importance_sampling_correction=False")


def test_a_patch_that_reads_the_reference_at_other_tokens_stops_the_run(tmp_path, monkeypatch):
    tiny_trl.tiny_model().save_pretrained(tmp_path / "model")
    patched(monkeypatch, shift_reference)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_stops(tiny_trl.trainer(tmp_path, "grpo", model=model, beta=0.1), "These settings work: beta=0")


def test_a_patch_that_fails_for_stale_rows_stops_the_run_and_says_so(tmp_path, monkeypatch):
    """Fresh rows pass, so the run is resumed with stale ones: of them each token has its own advantage."""

    def refuse(trainer: Any, rows: Rows) -> Rows:
        if rows["advantages"].dim() != 1:
            raise ValueError("one advantage per row")
        return rows

    patched(monkeypatch, refuse)
    saved = {"save_strategy": "steps", "save_steps": 1}
    tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=1, **saved).train()
    resumed = tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=3, **saved)
    with pytest.raises(LossError, match=r"it raised ValueError: one advantage per row .*max_staleness=0"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 1


def test_a_wrong_patch_trains_where_the_user_says_so(tmp_path, monkeypatch):
    patched(monkeypatch, scale)
    trainer = tiny_trl.trainer(tmp_path, "grpo", max_steps=1, driver={"check_loss": False})
    trainer.train()
    assert trainer.state.global_step == 1


STOCK = {
    "two passes": ("grpo", SEVERAL),
    "averaging": ("grpo", {"driver": {"averaging": 32}}),
    "accumulation": ("grpo", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}),
    "several steps": (
        "grpo",
        {"per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 1},
    ),
    "by sequences": ("grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence"} | SEVERAL),
    "entropies": ("grpo", {"top_entropy_quantile": 0.5}),
    "one each": ("reinforce", {}),
} | {
    loss_type: ("grpo", {"loss_type": loss_type} | SEVERAL)
    for loss_type in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo")
}


@pytest.mark.parametrize(("recipe", "given"), STOCK.values(), ids=STOCK.keys())
def test_trls_own_loss_passes_the_check(recipe, given, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, recipe, max_steps=1, **{"per_device_train_batch_size": 16} | given)
    trainer.train()
    assert trainer.state.global_step == 1
    assert not trainer._loss_check._due


def test_the_loss_check_passes_in_half_precision(tmp_path):
    model = tiny_trl.tiny_model().to(torch.bfloat16)
    trainer = tiny_trl.trainer(tmp_path, "grpo", model=model, max_steps=1, bf16=True, **SEVERAL)
    trainer.train()
    assert trainer.state.global_step == 1


def test_the_check_changes_nothing(tmp_path):
    """Weights, metrics and random numbers, with dropout and several steps a batch."""

    def run(check: bool) -> Any:
        torch.manual_seed(0)
        model = tiny_trl.tiny_model()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        driver = {"check_loss": check, "averaging": 32}
        trainer = tiny_trl.trainer(tmp_path, "pilot_commit", model=model, max_steps=3, driver=driver, **SEVERAL)
        trainer.train()
        timed = ("step_time", "runtime", "per_second")
        logged = [
            {name: value for name, value in line.items() if not any(part in name for part in timed)}
            for line in trainer.state.log_history
        ]
        return flat(trainer), logged, torch.rand(1)

    (weights, logged, number), (others, theirs, other) = run(True), run(False)
    assert torch.equal(weights, others)
    assert str(logged) == str(theirs)  # NaN is not equal to itself
    assert torch.equal(number, other)


def test_rows_that_are_all_padding_leave_the_check_due(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo", reward=lambda completions, **_: [1.0] * len(completions), max_steps=1)
    trainer.train()
    assert trainer._loss_check._due


def test_a_loss_that_is_unknown_is_not_checked_and_the_log_says_so(tmp_path, caplog):
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    trainer.loss_type = "next year's"
    trainer._loss_check.begin()
    assert 'loss_type="next year\'s" is new to rollalloc' in caplog.text
    assert not trainer._loss_check._due


def test_what_patched_the_trainer_is_named(tmp_path, monkeypatch):
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    assert origin(trainer).startswith("No class of the trainer is patched")
    trainer.args.use_liger_kernel = True
    assert "Liger's kernels" in origin(trainer)

    class Other(type(trainer)):
        pass

    trainer.__class__ = Other
    assert "class Other of module" in origin(trainer)
