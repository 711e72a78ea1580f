"""Real training runs: what TRL trains on is what the core decided, and everything paid is accounted for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_async
import tiny_trl
import torch

from rollalloc import Budget
from rollalloc.drivers.trl.checks import rows_per_group
from rollalloc.generate.stream.settings import Streaming
from rollalloc.runs.metrics import undeclared

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", sorted(tiny_async.RECIPES))
def test_the_trainer_trains_on_the_cores_rows_with_its_advantages(name, model, tmp_path):
    trainer = tiny_async.trainer(tmp_path, name, model)
    seen = tiny_async.Seen(trainer)
    before = tiny_async.weights(trainer)
    trainer.train()
    core = trainer.allocation.allocator
    rows = [row for batch in seen.batches[: trainer.state.global_step] for row in batch.rows]
    assert trainer.state.global_step == core.version == 4
    assert [sample.advantage for sample in seen.real] == [row.advantage * row.weight for row in rows]
    assert [sample.group_id for sample in seen.real] == [row.group for row in rows]
    ages = [batch.version - row.version for batch in seen.batches[: trainer.state.global_step] for row in batch.rows]
    assert [age for age, sample in zip(seen.staleness, seen.samples, strict=True) if sample.group_id >= 0] == ages
    assert max(ages) <= core.recipe.max_staleness
    assert len(seen.samples) == 16 * 4, "each step has the rows of one batch, and no row of the next was read ahead"
    assert sum(core.accounts().values()) == core.paid > 0
    assert any(row.advantage for row in rows)
    assert any(not torch.equal(tensor, before[key]) for key, tensor in tiny_async.weights(trainer).items())
    line = next(line for line in trainer.state.log_history if line.get("step") == 4)
    assert line["rollalloc/rows"] == len(seen.batches[3].rows)
    assert line["rollalloc/staleness_max"] == max(ages[-len(seen.batches[3].rows) :])
    assert line["rollalloc/rollouts_paid"] <= core.paid
    assert not undeclared((name[len("rollalloc/") :] for name in line if name.startswith("rollalloc/")), "TRL")
    assert {"rollalloc/stopped", "frac_reward_zero_std", "rollalloc/accounts/trained"} <= line.keys()


def test_old_log_probabilities_are_those_of_the_policy_that_trains(model, tmp_path):
    """Of fresh rows the ratio is 1: the model that generates has the trainer's weights, and both compute alike."""
    trainer = tiny_async.trainer(tmp_path, "grpo", model, max_steps=6)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "ratio" in line]
    assert len(lines) == 6
    assert all(abs(line["ratio"] - 1) < 1e-5 and abs(line["kl"]) < 1e-6 for line in lines)
    theirs = tiny_async.weights(trainer)
    mine = trainer.rollout_worker._roller.policy.model.state_dict()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items()), "also after the last update"


def test_without_staleness_a_run_repeats_to_the_bit(model, tmp_path):
    made = []
    for _ in range(2):
        trainer = tiny_async.trainer(tmp_path, "grpo", model)
        trainer.train()
        accounts = trainer.allocation.allocator.accounts()
        made.append((tiny_async.weights(trainer), {name: count for name, count in accounts.items() if name != "open"}))
    (one, first), (other, second) = made
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert first == second


def test_a_recipe_that_ends_ends_the_training_with_a_short_batch(model, tmp_path):
    recipe = replace(tiny_async.RECIPES["grpo"], budget=Budget(run_rollouts=40))
    trainer = tiny_async.trainer(tmp_path, recipe, model, max_steps=50)
    seen = tiny_async.Seen(trainer)
    trainer.train()
    core = trainer.allocation.allocator
    assert trainer.state.global_step == core.version == 3
    assert "budget" in trainer.allocation.finished
    assert [len(batch.rows) for batch in seen.batches] == [16, 16, 8]
    assert len(seen.samples) == 48
    assert core.accounts()["open"] == 0
    assert sum(core.accounts().values()) == core.paid == 40


def test_rollouts_without_a_score_are_failed_and_their_rows_filled_up(model, tmp_path):
    def sometimes(completions, **columns):
        scores = tiny_trl.starts_right(completions, **columns)
        return [None if number % 5 == 0 else score for number, score in zip(columns["number"], scores, strict=True)]

    trainer = tiny_async.trainer(tmp_path, "grpo", model, reward=sometimes)
    seen = tiny_async.Seen(trainer)
    trainer.train()
    accounts = trainer.allocation.allocator.accounts()
    assert accounts["failed"] > 0
    assert sum(accounts.values()) == trainer.allocation.allocator.paid
    assert len(seen.samples) == 64


def test_lora_sends_merged_weights(model, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = tiny_async.trainer(tmp_path, "grpo", model, more={"peft_config": config}, learning_rate=0.1)
    before = tiny_async.weights(trainer)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "ratio" in line]
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in lines)
    assert any(not torch.equal(tensor, before[key]) for key, tensor in tiny_async.weights(trainer).items())


def test_what_is_over_is_kept_by_nobody_and_stopped_rollouts_are_no_failures(model, tmp_path):
    def scored(completions, log_metric, **columns):
        log_metric("calls", 1.0)
        return tiny_trl.starts_right(completions, **columns)

    recipe = replace(tiny_async.RECIPES["darts_none"], budget=Budget(run_rollouts=60))
    trainer = tiny_async.trainer(tmp_path, recipe, model, reward=scored, max_steps=50, max_completion_length=12)
    trainer.train()
    accounts, roller = trainer.allocation.allocator.accounts(), trainer.rollout_worker._roller
    assert accounts["cancelled"] > 0 == accounts["failed"]
    lines = [line for line in trainer.state.log_history if "rollalloc/failed" in line]
    assert {(line["rollalloc/failed"], line.get("calls")) for line in lines} == {(0, 1.0)}
    assert trainer.allocation.rollouts == roller._scored == roller._figures == {}


def test_generation_in_a_process_of_its_own(model, tmp_path):
    trainer = tiny_async.trainer(tmp_path, "pilot_commit", model, driver={"streaming": Streaming()})
    seen = tiny_async.Seen(trainer)
    trainer.train()
    assert trainer.state.global_step == 4
    assert max(seen.staleness) <= 4
    assert not trainer.rollout_worker.running


def test_rows_of_a_group_are_known_of_every_recipe_here():
    assert all(rows_per_group(recipe) for recipe in tiny_async.RECIPES.values())
