"""`AllocatedRollouts`: recipes through TRL's public `rollout_func`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import tiny_trl
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from arithmetic import assert_same_gradients, gradients_of, tokens_by_key
from rollalloc import Budget, recipes
from rollalloc.drivers.trl import AllocatedRollouts
from rollalloc.rules import advantages

# The tier `e2e` has those that differ in what the trainer's own tests look at.
FITTING = [
    *("dapo", "pods", "darts_none"),
    *(pytest.param(name, marks=pytest.mark.e2e) for name in ("grpo", "fresh_pilot_commit", "darts", "racing")),
]


@pytest.mark.parametrize("recipe", FITTING)
def test_it_trains_on_what_the_recipe_chose(recipe, tmp_path):
    """Both hooks, under the same advantages: those that TRL computes itself."""
    chosen = tiny_trl.RECIPES[recipe]
    seen, taken = [], []
    for with_hook in (True, False):
        as_trl = replace(chosen, advantage=type(chosen.advantage)(advantages.pods))
        trainer = tiny_trl.trainer(tmp_path, as_trl, with_hook=with_hook, learning_rate=1e-3, max_grad_norm=1e9)
        with tokens_by_key(), gradients_of(trainer.model) as gradients:
            trainer.train()
        seen.append(trainer.state.num_input_tokens_seen)
        taken.append(gradients)
    assert seen[0] == seen[1]
    assert_same_gradients(*taken)


REFUSED = {
    "max_staleness=4": tiny_trl.RECIPES["pilot_commit"],
    "stock TRL needs groups of equal size": tiny_trl.RECIPES["darts_sampled"],
    "stock TRL computes the advantages": replace(
        tiny_trl.RECIPES["grpo"], advantage=advantages.OverGroup(advantages.rloo)
    ),
    "over the rows it gets": replace(tiny_trl.RECIPES["pods"], advantage=advantages.OverGroup(advantages.grpo)),
    "by the sample's deviation": recipes.grpo(groups=4, n=4, deviation="population"),
    "stock TRL has no short batches": replace(tiny_trl.RECIPES["grpo"], budget=Budget(run_rollouts=100)),
    "max_candidates": recipes.dapo(groups=4, n=4, gen_groups=6, max_candidates=8),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_recipes_it_cannot_express_are_refused_with_the_way_out(reason):
    with pytest.raises(ValueError, match=f"{re.escape(reason)}.*AllocatedGRPOTrainer, which can"):
        AllocatedRollouts(REFUSED[reason], tiny_trl.prompts(), tiny_trl.starts_right)


def test_evaluation_generates_for_the_prompts_it_is_given(tmp_path):
    seen = []

    def reward(prompts: list[str], completions: list[str], number: list[int], **_: Any) -> list[float]:
        seen.append(sorted(number))
        return [float(text.startswith("a")) for text in completions]

    trainer = tiny_trl.trainer(
        tmp_path,
        "grpo",
        reward=reward,
        with_hook=True,
        more={"eval_dataset": tiny_trl.prompts(8)},
        per_device_eval_batch_size=16,
        num_generations_eval=2,
    )
    trainer.evaluate()
    found = trainer.state.log_history[-1]
    assert seen == [sorted(2 * list(range(8)))]
    assert 0 < found["eval_reward"] < 1
    assert found["eval_reward"] < found["eval_rollalloc/breadth/pass_at_k"] <= 2 * found["eval_reward"]
    assert trainer.rollout_func.allocation.allocator.paid == 0


def test_a_rollout_without_a_score_has_no_place_in_an_equal_group(tmp_path):
    trainer = tiny_trl.trainer(
        tmp_path,
        "grpo",
        reward=lambda completions, **_: [None if text.startswith("k") else 1.0 for text in completions],
        with_hook=True,
    )
    with pytest.raises(ValueError, match=r"stock TRL needs 16 rows in groups of 4, got .* some rollouts have no score"):
        trainer.train()


def test_it_must_hear_of_the_trainers_steps(tmp_path):
    rollouts = AllocatedRollouts(tiny_trl.RECIPES["grpo"], tiny_trl.prompts(), tiny_trl.starts_right)
    trainer = GRPOTrainer(
        tiny_trl.tiny_model(),
        rollouts.reward,
        tiny_trl.settings(tmp_path),
        tiny_trl.prompts(),
        processing_class=tiny_trl.tiny_tokenizer(),
        rollout_func=rollouts,
    )
    with pytest.raises(ValueError, match=r"pass callbacks=\[rollouts\]"):
        trainer.train()


def test_its_figures_are_logged(tmp_path):
    paid = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            paid.append(logs.get("rollalloc/rollouts_paid"))

    trainer = tiny_trl.trainer(tmp_path, "grpo", with_hook=True)
    trainer.add_callback(Watch())
    trainer.train()
    assert paid[:4] == [16, 32, 48, 64]


@pytest.mark.e2e
def test_the_table_of_completions_names_the_prompt_that_was_rolled_out(tmp_path):
    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [(len(prompt) + len(text.split())) % 2 for prompt, text in zip(prompts, completions, strict=True)]

    trainer = tiny_trl.trainer(tmp_path, "dapo", reward=reward, with_hook=True, log_completions=True)
    trainer.train()
    table = pd.read_parquet(sorted((tmp_path / "completions").iterdir())[-1])
    assert len(table) == 16
    for _, row in table.iterrows():
        assert row["reward"] == (len(row["rollalloc_prompt"]) + len(row["completion"].split())) % 2


@pytest.mark.e2e
def test_a_recipe_that_is_over_ends_the_run_and_the_last_step_moves_nothing(tmp_path):
    """Every prompt is solved at once, so that Pilot-Commit evicts it."""
    recipe = recipes.pilot_commit(groups=4, n_pilot=2, n_commit=2, gen_groups=8, max_staleness=0)
    trainer = tiny_trl.trainer(
        tmp_path, recipe, reward=lambda completions, **_: [1.0] * len(completions), with_hook=True, weight_decay=0.1
    )
    before = tiny_trl.weights(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny_trl.weights(trainer.model).items())
