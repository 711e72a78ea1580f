"""SmolLM2-135M through the TRL driver for a few steps: `pytest tests/drivers/trl/test_real.py`, a few minutes of a core."""

from __future__ import annotations

import math

import pytest
import tiny_trl
import torch
from datasets import Dataset

import smollm2
from rollalloc import recipes
from rollalloc.data.prompts import load_prompts
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.models.policy import Policy
from rollalloc.tasks.chat import compute_score

pytestmark = pytest.mark.slow
STEPS, TOKENS = 2, 16


@pytest.mark.parametrize("name", ["pilot_commit", "foresight"])
def test_smollm2_trains_through_trl(name, tmp_path):
    recipe = {
        "pilot_commit": recipes.pilot_commit(groups=4, n_pilot=2, n_commit=2, gen_groups=4),
        "foresight": recipes.foresight(groups=16),
    }[name]
    model = smollm2.made("SMOLLM2", "runs/smollm2", "rollalloc model smollm2 runs/smollm2")
    found = load_prompts(smollm2.stories(tmp_path / "stories").train)
    rewards: list[float] = []

    def digits(completions, answer, **_):
        """A third of a point for any digit: of 16 short answers perhaps none is right, and then nothing would be trained."""
        said = [one[-1]["content"] for one in completions]
        right = [
            compute_score("stories", text, truth, {"number": True}) for text, truth in zip(said, answer, strict=True)
        ]
        made = [max(r, any(c.isdigit() for c in text) / 3) for r, text in zip(right, said, strict=True)]
        rewards.extend(made)
        return made

    policy = Policy.load(model, device="cpu")
    before = policy.model.lm_head.weight.detach().clone()
    rows = 4 if name == "pilot_commit" else 1
    trainer = AllocatedGRPOTrainer(
        policy.model,
        digits,
        tiny_trl.settings(
            tmp_path / "out",
            learning_rate=1e-5,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            num_generations=max(2, rows),
            max_completion_length=TOKENS,
        ),
        Dataset.from_dict({"prompt": list(found.prompts), "answer": [str(truth) for truth in found.ground_truths]}),
        processing_class=policy.tokenizer,
        recipe=recipe,
    )
    trainer.train()
    accounts = trainer.allocation.allocator.accounts()
    assert trainer.state.global_step == STEPS
    assert sum(accounts.values()) == len(rewards) > 0
    assert accounts["trained"] > 0
    assert all(math.isfinite(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line)
    assert not torch.equal(policy.model.lm_head.weight, before)
