"""Tests of recipes with one rollout per prompt under TRL: advantages, replay, and features of the prompts."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import logging
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trl
import torch
from peft import LoraConfig
from tiny_trl import DISTINCT
from transformers import TrainerCallback

from rollalloc import recipes
from rollalloc.data.feature_blocks import own_features
from rollalloc.data.feature_file import write_features
from rollalloc.drivers.trl.allocation import Allocation
from rollalloc.drivers.trl.dataset import keyed
from rollalloc.drivers.trl.movement import moved_share
from rollalloc.drivers.trl.rollout import Rollout
from rollalloc.generate.sampler import Generation
from rollalloc.runs.trl_log import ROLLOUT


def test_replayed_rows_are_counted_and_released_at_the_end(tmp_path):
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


def test_trls_table_of_completions_has_all_rows_of_the_last_batch_and_replayed_ones_too(tmp_path):
    """TRL keeps as many as its generation batch has, 16; of more rows it would lose new ones, which come first."""
    trainer, tables = tiny_trl.trainer(tmp_path, "foresight_replay", max_steps=6), []

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if "rollalloc/rows" in state.log_history[-1]:
                logs = trainer._logs
                columns = [logs["prompt"], logs["completion"], logs["advantages"], *logs["rewards"].values()]
                assert {len(column) for column in columns} == {state.log_history[-1]["rollalloc/rows"]}
                tables.append([int(named.split("/")[1]) for named in logs["extra"][ROLLOUT]])

    trainer.add_callback(Watch())
    trainer.train()
    assert [sorted(rollouts)[-16:] for rollouts in tables] == [list(range(at, at + 16)) for at in range(0, 96, 16)]
    assert max(map(len, tables)) > 16


def test_rows_that_a_gate_leaves_out_are_not_trained_on(tmp_path):
    """At a bound of 0 all are left out, in every other batch, and the weights are those of a run without replay."""
    runs = {}
    for name, recipe in {"gated": "reinforce_gated", "without": "reinforce"}.items():
        runs[name] = tiny_trl.trainer(tmp_path / name, recipe, max_steps=8, learning_rate=1e-2)
        runs[name].train()
    lines = [line for line in runs["gated"].state.log_history if "rollalloc/rows" in line]
    assert {line["rollalloc/rows"] for line in lines} == {16}
    asked = [line["rollalloc/moved"] for line in lines if "rollalloc/moved" in line]
    assert len(asked) >= 2
    assert all(0 < moved <= 1 for moved in asked)
    assert lines[-1]["rollalloc/left_out"] == runs["gated"].allocation.allocator.left_out >= 2
    gated, without = (run.model.state_dict() for run in runs.values())
    assert all(torch.equal(gated[name], without[name]) for name in without)


def test_a_gate_that_leaves_everything_out_says_so_after_eight_batches(tmp_path, caplog):
    recipe = recipes.reinforce(groups=16, replay=16, replay_moved=0.0, replay_pause=0)
    tiny_trl.trainer(tmp_path, recipe, num_generations=2, max_steps=10, learning_rate=1e-2).train()
    said = [message.split(" that had")[0] for message in caplog.messages if "replay gives nothing" in message]
    assert said == ["replay gives nothing: in each of the last 8 batches"]


@pytest.mark.parametrize("masks", [True, False])
def test_rows_that_the_loss_leaves_out_as_truncated_are_not_replayed(masks, tmp_path):
    """The reward looks at the first word, so that without the mask many replayed rows are truncated."""
    recipe = recipes.reinforce(groups=16, neg=1, replay=8)
    changes = {"num_generations": 2, "mask_truncated_completions": masks, "max_steps": 6}
    trainer = tiny_trl.trainer(tmp_path, recipe, **changes)
    truncated, ask = [], trainer.allocation._ask

    def asking(*given: Any) -> Any:
        actions = ask(*given)
        again = [row for row in actions.batch.rows if row.replays] if actions.batch else []
        truncated.extend(each.made.truncated for each in trainer.allocation.rollouts_of(again))
        return actions

    trainer.allocation._ask = asking
    trainer.train()
    log = [line for line in trainer.state.log_history if "rollalloc/rows" in line]
    assert sum(line["rollalloc/replayed"] for line in log) == len(truncated) > 0
    assert any(truncated) is not masks
    if masks:
        assert sum(line["rollalloc/masked"] for line in log) > 0


def test_the_moved_share_under_adapters_is_that_of_the_merged_weights(tmp_path):
    """By hand it is 1/3 under the merged weights. The adapters' dropout is off, although the model is in training mode."""
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5)
    trainer = tiny_trl.trainer(tmp_path, "reinforce_gated", more={"peft_config": adapter})
    trainer.model.train()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    pairs = [((3, 4), (3, 4, 5)), ((5, 6), (6, 7, 2))]
    merged = tiny_trl.tiny_model().eval()
    merged.load_state_dict(deepcopy(trainer.model).merge_and_unload().state_dict())
    changes = [[0.0, 0.4, -0.1], [-0.5, 0.1, 0.05]]  # far from log 0.8 and log 1.28, where a token has moved
    rollouts = []
    for at, (prompt, tokens) in enumerate(pairs):
        with torch.no_grad():
            logits_TV = merged(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        now_T = (logits_TV / trainer.temperature).log_softmax(dim=-1)[range(len(tokens)), tokens]
        made = Generation(at, tokens, now_T.numpy() - np.array(changes[at], np.float32), truncated=False)
        rollouts.append(Rollout(prompt=at, prompt_tokens=prompt, made=made))
        (found_T,) = trainer._generator.logprobs([(prompt, tokens)])  # the share alone may be right by chance
        assert found_T == pytest.approx(now_T.numpy(), abs=1e-4)
    assert moved_share(trainer._generator, rollouts) == pytest.approx(1 / 3)
    with trainer.model.disable_adapter():
        assert moved_share(trainer._generator, rollouts) != pytest.approx(1 / 3)
    assert trainer.model.training


def test_a_recipe_that_forgets_by_divergence_is_told_the_divergence_of_each_update(monkeypatch, tmp_path):
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


@pytest.mark.parametrize("key", [None, "number"])
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
    with pytest.raises(ValueError, match=r"lacks the features of 40 prompts \(of 40\)"):
        tiny_trl.trainer(
            tmp_path, "foresight", **given | {"driver": given["driver"] | {"key": None if key else "number"}}
        )


def test_features_of_a_model_with_an_adapter_come_from_the_base_model(tmp_path):
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
