"""Recipes of one rollout per prompt: what is generated, what each row is credited with, and what the loss makes of it."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trl
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from rollalloc import recipes
from rollalloc.core.rule import Drawn
from rollalloc.data.feature_file import write_features
from rollalloc.data.features import own_features
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.drivers.trl.allocation import Allocation
from rollalloc.drivers.trl.keys import keyed
from rollalloc.rules import predictions

one_each = pytest.mark.parametrize("recipe", tiny_trl.ONE_EACH)


class Watched(AllocatedGRPOTrainer):
    """Keeps each batch, what it was made of and the tensors that TRL got."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seen: list[tuple[Any, list[Any], dict[str, torch.Tensor]]] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        batch = self.allocation.allocator.batch
        self.seen.append((batch, self.allocation.rollouts_of(batch.rows), made))
        return made


@pytest.fixture
def watched(monkeypatch) -> None:
    monkeypatch.setattr(tiny_trl, "AllocatedGRPOTrainer", Watched)


def rewards_of(rollouts: list[Any]) -> np.ndarray:
    return np.array([sum(rollout.scores_F) for rollout in rollouts])


@pytest.mark.parametrize("recipe", ["raft", "spo", "foresight_replay"])
def test_one_rollout_of_each_prompt_is_generated_and_trained_on(recipe, watched, tmp_path):
    asked: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], number: list[int], **columns: Any) -> list[float]:
        asked.append(number)
        return tiny_trl.starts_right(completions, columns["answer"])

    trainer = tiny_trl.trainer(tmp_path, recipe, reward=reward)
    trainer.train()
    assert [sorted(Counter(numbers).values()) for numbers in asked] == [[1] * 16] * 4  # each once in a batch
    for batch, _, made in trainer.seen:
        fresh = [row for row in batch.rows if not row.replays]
        assert len(fresh) == len({row.prompt for row in fresh}) == 16
        assert batch.short_because is None
        if len(fresh) == len(batch.rows):  # else they are weighted, see below
            given = [value for value in made["advantages"].tolist() if value]
            assert given == pytest.approx([row.advantage for row in batch.rows if row.advantage], abs=1e-6)


def against(over: np.ndarray, neg: float) -> np.ndarray:
    return np.where(over < 0, neg * over, over)


def credited(trainer: Any, at: int) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Rewards, advantages and rows of a batch, without what is replayed."""
    batch, rollouts, _ = trainer.seen[at]
    fresh = [at for at, row in enumerate(batch.rows) if not row.replays]
    rewards = rewards_of([rollouts[at] for at in fresh])
    rows = [batch.rows[at] for at in fresh]
    return rewards, np.array([row.advantage for row in rows]), rows


def others(rewards: np.ndarray) -> np.ndarray:
    return (rewards.sum() - rewards) / (len(rewards) - 1)


def test_reinforce_is_against_the_rest_of_the_batch_raft_by_what_is_rewarded_rloo_against_the_rest_of_the_group(
    watched, tmp_path
):
    def trained(recipe: str) -> Any:
        trainer = tiny_trl.trainer(tmp_path, recipe, max_steps=2)
        trainer.train()
        return trainer

    for at in range(2):
        rewards, advantages, _ = credited(trained("reinforce"), at)
        np.testing.assert_allclose(advantages, against(rewards - others(rewards), 0.5), atol=1e-12)
        rewards, advantages, _ = credited(trained("raft"), at)
        np.testing.assert_array_equal(advantages, np.maximum(rewards, 0))
        rewards, advantages, _ = credited(trained("rloo"), at)
        expected = [group - others(group) for group in rewards.reshape(4, 4)]
        np.testing.assert_allclose(advantages, np.concatenate(expected), atol=1e-12)


def shaped(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """From -1 to 2."""
    return [3.0 * text.startswith(right) - ("k" in text) for text, right in zip(completions, answer, strict=True)]


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.startswith(wanted)) for text, wanted in zip(completions, answer, strict=True)]


@pytest.mark.parametrize("recipe", ["foresight_uniform", "foresight_replay"])
def test_foresight_credits_each_row_against_what_was_predicted_and_shaped_rewards_against_their_own_line(
    recipe, watched, monkeypatch, tmp_path
):
    expected: dict[int, list[Drawn]] = {}
    pick = predictions.Foresight.pick

    def recorded(self: Any, memory: Any, k: int, *others: Any) -> Any:
        drawn = pick(self, memory, k, *others)
        for each in drawn:
            expected.setdefault(each.prompt, []).append(each)
        return drawn

    monkeypatch.setattr(predictions.Foresight, "pick", recorded)
    for reward, more in ((tiny_trl.starts_right, {}), ([shaped, right], {"metric": "right"})):
        expected.clear()
        weights = {"reward_weights": [1.0, 0.0]} if more else {}
        trainer = tiny_trl.trainer(tmp_path, recipe, reward=reward, driver=more, max_steps=6, **weights)
        trainer.train()
        drawn = {prompt: list(each) for prompt, each in expected.items()}
        for at in range(6):
            _, rollouts, _ = trainer.seen[at]
            _, advantages, rows = credited(trainer, at)
            for row, rollout, advantage in zip(rows, rollouts, advantages, strict=False):
                thought = drawn[row.prompt].pop(0)
                over = trainer.allocation.rewards.reward(rollout.scores_F) - thought.baseline
                assert advantage == pytest.approx(over if over > 0 else 0.1 * over, abs=1e-12)
        baselines = [each.baseline for every in expected.values() for each in every]
        assert np.ptp(baselines) > 0.01


def test_the_loss_of_a_batch_with_replayed_rows_is_the_one_made_by_hand(watched, tmp_path):
    """-Σ_b A_b Σ_t min(π_now / π_behaviour, 2) / Σ lengths, of which the ratio under TRL's loss is 1 in the first pass."""
    trainer = tiny_trl.trainer(tmp_path, "foresight_replay", max_steps=8, driver={"features": None})
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    replayed = 0
    for at, (batch, rollouts, made) in enumerate(trainer.seen):
        lengths = [len(rollout.made.tokens) for rollout in rollouts]
        if not any(row.replays for row in batch.rows):
            by_hand = -sum(row.advantage * length for row, length in zip(batch.rows, lengths, strict=True))
            assert losses[at] == pytest.approx(by_hand / sum(lengths), abs=2e-4)
            continue
        weights_BT = made["advantages"]  # with the ratios that the next test looks at
        assert weights_BT.shape == made["completion_mask"].shape
        total = -(weights_BT * made["completion_mask"]).sum() / sum(lengths)
        assert losses[at] == pytest.approx(float(total), abs=2e-4)
        replayed += sum(row.replays > 0 for row in batch.rows)
    assert replayed > 0


def test_a_replayed_row_weighs_its_truncated_ratio_of_the_weights_of_now_and_its_own(watched, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "foresight_replay", max_steps=4, driver={"features": None})
    trainer.train()
    batch = trainer.allocation.next_batch(trainer, trainer._generator)
    assert batch is not None
    again = [row for row in batch.rows if row.replays]
    assert again
    assert all(row.replays <= 3 and batch.version - row.version <= 3 and row.advantage > 0 for row in again)
    rollouts = trainer.allocation.rollouts_of(again)
    now = trainer._generator.logprobs([(each.prompt_tokens, each.made.tokens) for each in rollouts])
    made = trainer._generate_and_score_completions([])  # the batch that is outstanding
    read = [row.rollout for row in batch.rows if row.advantage]  # in this order
    for row, rollout, logprob_T in zip(again, rollouts, now, strict=True):
        weights, mask = (made[name][read.index(row.rollout)] for name in ("advantages", "completion_mask"))
        importance = np.minimum(np.exp(logprob_T - rollout.made.logprobs), 2)
        assert np.abs(importance - 1).max() > 1e-4
        np.testing.assert_allclose(weights[mask.bool()].numpy(), row.advantage * importance, rtol=2e-5)


def test_what_is_replayed_is_counted_and_let_go_in_the_end(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "foresight_replay", max_steps=12)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "rollalloc/rows" in line]
    assert sum(line["rollalloc/replayed"] for line in lines) == trainer.allocation.allocator.replayed > 8
    assert all(line["rollalloc/rows"] == 16 + line["rollalloc/replayed"] for line in lines)
    assert {line["rollalloc/groups"] for line in lines} == {16}
    trainer.allocation._ask(0)
    held = trainer.allocation.rollouts
    assert len(held) < 16 * 4  # of three batches at most
    assert min(held) >= 16 * 8


WRONG: dict[str, dict[str, Any]] = {
    "num_generations=4, but the recipe trains on one row per prompt. TRL takes no 1: set num_generations=2": {
        "recipe": "foresight",
        "num_generations": 4,
    },
    "set num_generations=3, the least that divides a batch of 9 rows": {
        "recipe": recipes.foresight(9),
        "num_generations": 9,
        "per_device_train_batch_size": 9,
    },
    "the recipe trains on one row per batch, and TRL takes no fewer than 2": {
        "recipe": recipes.raft(1),
        "num_generations": 2,
    },
    "the recipe trains on 16 groups of 1 rows per batch, but TRL's generation batch has 32 rows": {
        "recipe": "raft",
        "per_device_train_batch_size": 32,
    },
    "num_generations=2 cannot be made of the recipe's stages": {"recipe": "rloo", "num_generations": 2},
    "loss_type='luspo' cannot take the importance weight": {"recipe": "foresight_replay", "loss_type": "luspo"},
    "takes the metric for a success rate, but the metric is the whole reward": {
        "recipe": "foresight",
        "reward": [shaped, right],
    },
    "shuffle_dataset=False, but the recipe draws the prompts by Foresight(": {
        "recipe": "foresight",
        "shuffle_dataset": False,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused_when_the_trainer_is_made(message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_trl.trainer(tmp_path, **WRONG[message])


def test_how_far_a_batch_moved_the_weights_is_told_where_the_recipe_forgets_by_it(monkeypatch, tmp_path):
    """Against the log-probabilities before and after, of the first 16 rows, with either generator."""
    told: list[float | None] = []
    trained = Allocation.trained

    def watched(self: Any) -> None:
        before = self.allocator._run.kl_sum
        trained(self)
        told.append(self.allocator._run.kl_sum - before)

    monkeypatch.setattr(Allocation, "trained", watched)

    class Measured(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            core = trainer.allocation.allocator
            rollouts = trainer.allocation.rollouts_of(core.batch.rows)
            self.pairs = [(each.prompt_tokens, each.made.tokens) for each in rollouts]
            self.before = trainer._generator.logprobs(self.pairs)

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            after = trainer._generator.logprobs(self.pairs)
            drift = np.concatenate(after).astype(float) - np.concatenate(self.before)
            expected.append(float(np.mean(np.exp(drift) - drift - 1)))

    for use_sampler in (True, False):
        expected: list[float] = []
        told.clear()
        more = {"callbacks": [Measured()]}
        trainer = tiny_trl.trainer(tmp_path, "spo", more=more, driver={"use_sampler": use_sampler}, max_steps=3)
        trainer.train()
        assert told == pytest.approx(expected, rel=1e-3)
        assert min(told) > 1e-4
    trainer = tiny_trl.trainer(tmp_path, "foresight", max_steps=2)
    trainer.train()
    assert trainer.allocation.allocator._run.kl_sum == 0


def test_what_the_predictions_were_worth_is_logged(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "foresight", max_steps=8)
    trainer.train()
    last = [line for line in trainer.state.log_history if "rollalloc/rows" in line][-1]
    assert last["rollalloc/prediction/rollouts"] > 0
    assert np.isfinite(last["rollalloc/prediction/log_loss"])
    assert not any("weight/" in name for name in last)


# ------------------------------------------------------------------------------------------------------------ features


def features_in(trainer: Any) -> dict[str, tuple[int, ...]]:
    return {name: block.shape for name, block in trainer.allocation.allocator.table.features.items()}


def test_foresight_knows_features_of_the_model_that_training_begins_with(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="rollalloc")
    trainer = tiny_trl.trainer(tmp_path, "foresight", max_steps=2)
    assert not features_in(trainer)  # they are made when they are needed
    before = tiny_trl.weights(trainer.model)
    trainer.allocation.prepare()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_trl.weights(trainer.model).items())
    assert features_in(trainer) == {"hidden": (40, 32), "tokens": (40, 13), "length": (40, 1)}
    assert re.search(r"features of 40 prompts from the model: \d+ tokens forwarded, \d", caplog.text)
    made = trainer.allocation.made
    trainer.train()
    assert trainer.allocation.made is made  # once
    assert caplog.text.count("features of 40 prompts") == 1


DISTINCT = Dataset.from_dict(
    {
        "prompt": [f"k{at % 6} k{at // 6 % 6} k{at // 36} =" for at in range(40)],
        "answer": [f"a{at % 4}" for at in range(40)],
        "id": [f"math/{at}" for at in range(40)],
    }
)


@pytest.mark.parametrize("key", [None, "id"])
def test_a_file_of_features_is_read_by_key(key, tmp_path):
    values = np.random.default_rng(0).normal(size=(40, 3))
    keys = keyed(DISTINCT, key).keys
    order = np.random.default_rng(1).permutation(40)
    write_features(Path(tmp_path / "f.safetensors"), [keys[at] for at in order], own_features({"mine": values[order]}))
    given = {"driver": {"key": key, "features": tmp_path / "f.safetensors"}, "dataset": DISTINCT}
    trainer = tiny_trl.trainer(tmp_path, "foresight", **given)
    there = trainer.allocation.allocator.table.features["mine"]
    np.testing.assert_allclose(there, own_features({"mine": values}).blocks["mine"], atol=1e-5)
    trainer.train()
    assert trainer.allocation.made is None  # nothing to save: the file is the user's
    with pytest.raises(ValueError, match="has no features of 40 of 40 prompts"):
        tiny_trl.trainer(tmp_path, "foresight", **given | {"driver": given["driver"] | {"key": None if key else "id"}})


def test_features_of_a_sharded_model_are_refused_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr("rollalloc.drivers.trl.features._sharded", lambda trainer: True)
    with pytest.raises(ValueError, match="the whole model in each process, but it is sharded; make a file"):
        tiny_trl.trainer(tmp_path, "foresight")
    assert tiny_trl.trainer(tmp_path, "foresight", driver={"features": None})


@pytest.mark.parametrize("recipe", ["reinforce", pytest.param("spo", marks=pytest.mark.e2e)])
def test_a_rollout_without_a_score_costs_itself_and_another_prompt_takes_its_place(recipe, watched, tmp_path):
    def reward(completions: list[str], **columns: Any) -> list[float | None]:
        scores = tiny_trl.starts_right(completions, columns["answer"])
        return [None if text.endswith("k1") else score for text, score in zip(completions, scores, strict=True)]

    trainer = tiny_trl.trainer(tmp_path, recipe, reward=reward, max_steps=6)
    trainer.train()
    accounts = trainer.allocation.allocator.accounts()
    assert accounts["failed"] > 0
    assert sum(accounts.values()) == trainer.allocation.allocator.paid == 6 * 16 + accounts["failed"]
    assert all(len(batch.rows) == 16 for batch, _, _ in trainer.seen)


def test_in_half_precision_with_checkpointed_activations_under_an_adapter(tmp_path):
    trainer = tiny_trl.trainer(
        tmp_path,
        "foresight_replay",
        more={"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"], r=2)},
        bf16=True,
        gradient_checkpointing=True,
        max_steps=6,
    )
    trainer.train()
    assert trainer.allocation.made is not None
    assert trainer.allocation.allocator.replayed > 0


@pytest.mark.e2e
def test_a_running_mean_and_a_tracked_rate_are_baselines(watched, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "reinforce_running", max_steps=2)
    trainer.train()
    first, advantages, _ = credited(trainer, 0)
    np.testing.assert_allclose(advantages, first - others(first), atol=1e-12)  # nothing is known yet but the batch
    decay = 0.5 ** (1 / 500)
    total = count = 0.0
    for reward in first:
        total, count = decay * total + reward, decay * count + 1
    rewards, advantages, _ = credited(trainer, 1)
    np.testing.assert_allclose(advantages, rewards - total / count, atol=1e-9)

    trainer = tiny_trl.trainer(tmp_path, "spo", max_steps=1)
    trainer.train()
    rewards, advantages, _ = credited(trainer, 0)
    np.testing.assert_allclose(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-6), atol=1e-6)


def test_a_prompt_may_be_drawn_in_successive_batches_and_is_generated_anew(watched, tmp_path):
    recipe = replace(tiny_trl.ONE_EACH["foresight"], prompts=predictions.Foresight(exponent=1.0, warm=0))
    trainer = tiny_trl.trainer(tmp_path, recipe, dataset=tiny_trl.prompts(24), max_steps=6, num_generations=2)
    trainer.train()
    per_batch = [{row.prompt: row.rollout for row in batch.rows} for batch, _, _ in trainer.seen]
    again = [set(one) & set(other) for one, other in pairwise(per_batch)]
    assert all(again)
    ids = [rollout for rows in per_batch for rollout in rows.values()]
    assert len(ids) == len(set(ids)) == 16 * 6


def test_an_odd_batch_may_be_counted_by_its_least_divisor(tmp_path):
    trainer = tiny_trl.trainer(
        tmp_path, recipes.foresight(9), num_generations=3, per_device_train_batch_size=9, max_steps=2
    )
    trainer.train()
    assert trainer.allocation.allocator.paid == 18


def test_without_features_that_is_said(caplog, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "foresight", driver={"features": None}, max_steps=1)
    trainer.train()
    assert "no features: a prompt without a record" in caplog.text
    assert not features_in(trainer)


def test_a_recipe_that_predicts_nothing_makes_none(caplog, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "spo", max_steps=1)
    trainer.train()
    assert not features_in(trainer)
    assert "features" not in caplog.text


def test_with_an_adapter_they_are_those_of_the_model_under_it(tmp_path):
    plain = tiny_trl.trainer(tmp_path, "foresight")
    adapted = tiny_trl.trainer(tmp_path, "foresight", more={"peft_config": LoraConfig(target_modules=["q_proj"], r=2)})
    for trainer in (plain, adapted):
        trainer.allocation.prepare()
    for name, block in plain.allocation.made.items():
        np.testing.assert_allclose(adapted.allocation.made[name], block, atol=1e-5)
    adapted.train()
    assert adapted.state.global_step == 4


def test_a_file_that_is_not_there_is_said_when_the_trainer_is_made(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors: no such file"):
        tiny_trl.trainer(tmp_path, "foresight", driver={"features": str(tmp_path / "none.safetensors")})
    with pytest.raises(ValueError, match="key='name' is no column"):
        tiny_trl.trainer(tmp_path, "foresight", driver={"features": str(tmp_path / "none.safetensors"), "key": "name"})
