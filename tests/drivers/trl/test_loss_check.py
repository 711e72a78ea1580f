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

from rollalloc.drivers.trl.loss_check import LossError, origin

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


def fused_loss(
    _input: Tensor,
    lin_weight: Tensor,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
) -> Tensor:
    """GRPO's loss from hidden states, with the arguments that TRL gives Liger's `LigerFusedLinearGRPOLoss`."""
    logps = torch.nn.functional.linear(_input, lin_weight, bias).log_softmax(-1)
    logps = logps.gather(-1, selected_token_ids[..., None])[..., 0]
    ratio = (logps - (logps.detach() if old_per_token_logps is None else old_per_token_logps)).exp()
    of_tokens = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return ((of_tokens * attention_mask).sum(dim=1) / attention_mask.sum(dim=1).clamp(min=1)).mean()


def with_liger(
    monkeypatch: pytest.MonkeyPatch, trainer: Any, change: dict[str, Callable[[Tensor], Tensor | None]]
) -> Any:
    """Let the loss be Liger's, as in TRL before 1.14 with `use_liger_kernel=True`; `change` what it is given."""

    def compute_loss(self: Any, model: Any, inputs: Rows, *_: Any, **__: Any) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        hidden = model.model(input_ids=ids, attention_mask=seen).last_hidden_state
        given = {
            "_input": hidden[:, inputs["prompt_ids"].shape[1] - 1 : -1],
            "lin_weight": model.lm_head.weight,
            "selected_token_ids": inputs["completion_ids"],
            "attention_mask": inputs["completion_mask"],
            "advantages": inputs["advantages"],
            "old_per_token_logps": inputs.get("old_per_token_logps"),
        }
        changed = {name: change[name](given[name]) for name in change if given[name] is not None}
        return fused_loss(**given | changed) / self.current_gradient_accumulation_steps

    monkeypatch.setattr(GRPOTrainer, "compute_loss", compute_loss)
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda *_: None)  # its layers need a GPU
    trainer.args.use_liger_kernel = True
    return trainer


def test_ligers_loss_passes(tmp_path, monkeypatch):
    trainer = with_liger(monkeypatch, tiny_trl.trainer(tmp_path, "grpo", loss_type="grpo", max_steps=2, **SEVERAL), {})
    trainer.train()
    assert trainer.state.global_step == 2
    assert not trainer._loss_check.due


@pytest.mark.parametrize(
    ("name", "change", "given", "said"),
    [
        ("old_per_token_logps", lambda old: old.roll(1, dims=1), SEVERAL, "the importance ratio is"),
        ("attention_mask", lambda mask: mask.roll(1, dims=1), SEVERAL, "or counts other tokens"),
        ("attention_mask", lambda mask: mask.roll(1, dims=1), {}, "No setting mends this"),
        ("advantages", lambda advantages: 2 * advantages, {}, "the advantages are scaled: each counts 2 times"),
        ("old_per_token_logps", lambda old: None, SEVERAL, "it ignores old_per_token_logps"),
    ],
    ids=["shifted", "other tokens, two passes", "other tokens", "scaled", "ratio dropped"],
)
def test_a_loss_of_ligers_that_is_wrong_stops_the_run_and_is_named(name, change, given, said, tmp_path, monkeypatch):
    trainer = tiny_trl.trainer(tmp_path, "grpo", loss_type="grpo", **given)
    assert_stops(with_liger(monkeypatch, trainer, {name: change}), said, "Liger's kernels (use_liger_kernel=True)")


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
    assert not trainer._loss_check.due


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
    assert trainer._loss_check.due


def test_a_loss_that_is_unknown_is_not_checked_and_the_log_says_so(tmp_path, caplog):
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    trainer.loss_type = "next year's"
    trainer._loss_check.begin()
    assert 'loss_type="next year\'s" is new to rollalloc' in caplog.text
    assert not trainer._loss_check.due


def test_what_patched_the_trainer_is_named(tmp_path, monkeypatch):
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    assert origin(trainer).startswith("No class of the trainer is patched")
    trainer.args.use_liger_kernel = True
    assert "Liger's kernels" in origin(trainer)

    class Other(type(trainer)):
        pass

    trainer.__class__ = Other
    assert "class Other of module" in origin(trainer)
