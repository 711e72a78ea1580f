"""Where rollouts come from: TRL's generation for models that the sampler does not know, and TRL's settings of both."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import tiny_trl
import torch
from transformers import AutoModelForCausalLM, FalconMambaConfig, Lfm2Config, NemotronHConfig, PreTrainedModel
from trl import GRPOTrainer

from rollalloc.drivers.trl.tensors import training_inputs
from rollalloc.tasks.tiny import EOS_ID, PAD_ID

SIZES = {
    "vocab_size": len(tiny_trl.tiny_tokenizer()),
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
STATEFUL = {
    "lfm2": Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"], **SIZES),
    "falcon_mamba": FalconMambaConfig(num_hidden_layers=2, state_size=4, use_mambapy=False, **SIZES),
    "nemotron_h": NemotronHConfig(
        layers_block_type=["mamba", "attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        mamba_n_groups=1,
        ssm_state_size=4,
        use_mamba_kernels=False,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        **SIZES,
    ),
}


def stateful(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(STATEFUL[name])


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.e2e) for name in STATEFUL if name != "lfm2")]
)
def test_trl_generates_with_a_model_whose_cache_cannot_follow_rows(name, tmp_path, caplog):
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", model=stateful(name), max_steps=2)
    assert caplog.text.count("TRL generates, because rollalloc's sampler does not support") == 1
    before = tiny_trl.weights(trainer.model)
    trainer.train()
    assert any(not torch.equal(tensor, before[key]) for key, tensor in tiny_trl.weights(trainer.model).items())
    assert trainer.state.log_history[0]["rollalloc/entropy"] > 0  # log-probabilities are there, for rows that are held


@pytest.mark.parametrize("name", STATEFUL)
def test_a_completion_is_as_likely_in_any_company(name, tmp_path):
    """Rows padded on the left get the log-probabilities of a row alone."""
    generate = tiny_trl.trainer(tmp_path, "pilot_commit", model=stateful(name))._generator
    pairs = [((3, 4, 5, 2), (9, 10, 1)), ((3, 2), (11, 1)), ((5, 6, 2), (9, 9, 9))]
    for pair, together_T in zip(pairs, generate.logprobs(pairs), strict=True):
        assert together_T == pytest.approx(generate.logprobs([pair])[0], abs=1e-4)


def test_the_sampler_is_refused_for_such_a_model_where_it_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"use_sampler=True, but .* rows cannot be selected and repeated"):
        tiny_trl.trainer(tmp_path, "grpo", model=stateful("lfm2"), driver={"use_sampler": True})


def test_rows_are_padded_to_the_multiple_that_trl_is_told(tmp_path):
    def given(**changes: int) -> dict[str, torch.Tensor]:
        trainer = tiny_trl.trainer(tmp_path, "grpo", **changes)
        batch = trainer.allocation.next_batch(trainer, trainer._generator)
        return training_inputs(trainer, trainer._generator, batch, trainer.allocation.rollouts_of(batch.rows))

    plain, wide = given(), given(pad_to_multiple_of=8)
    for name, side in (("prompt_ids", "left"), ("prompt_mask", "left"), ("completion_ids", "right")):
        width = plain[name].shape[1]
        assert width % 8
        assert wide[name].shape[1] == 8
        inner = wide[name][:, 8 - width :] if side == "left" else wide[name][:, :width]
        assert torch.equal(inner, plain[name])
    assert wide["completion_mask"].sum() == plain["completion_mask"].sum()
    assert wide["num_items_in_batch"] == plain["num_items_in_batch"]


def test_continuous_batching_generates_where_trl_is_told_so(tmp_path):
    setting = "use_transformers_continuous_batching"
    if not hasattr(tiny_trl.settings(tmp_path), setting):
        setting = "use_transformers_paged"  # its first name
    trainer = tiny_trl.trainer(tmp_path, "grpo", max_steps=2, **{setting: True})
    asked = []

    def generate_batch(prompts: list[list[int]], **_: object) -> dict[int, SimpleNamespace]:
        asked.append(len(prompts))
        return {at: SimpleNamespace(generated_tokens=[9 + at % 4, 1, 0]) for at in range(len(prompts))}

    with patch.object(trainer.model, "generate_batch", generate_batch):
        trainer.train()
    assert asked == [16, 16]
    assert {rollout.made.tokens for rollout in trainer.allocation.generated} == {(9 + at, 1) for at in range(4)}


@pytest.mark.e2e
def test_padding_reaches_transformers_generate(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo", driver={"use_sampler": False}, pad_to_multiple_of=8, max_steps=1)
    widths = []
    generate = trainer.model.generate

    def watched(input_ids: torch.Tensor, **given: object) -> torch.Tensor:
        widths.append(input_ids.shape[1])
        return generate(input_ids=input_ids, **given)

    with patch.object(trainer.model, "generate", watched):
        trainer.train()
    assert set(widths) == {8}


def test_completions_that_continuous_batching_lost_are_said(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    lost = patch.object(GRPOTrainer, "_generate_single_turn", lambda self, prompts, *_: ([[9, 1]] * 3, None))
    with lost, pytest.raises(RuntimeError, match="expected 4 completions from TRL, got 3"):
        trainer._generator.complete([(3, 2)] * 4)
