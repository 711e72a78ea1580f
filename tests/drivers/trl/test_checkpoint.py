"""A run that was stopped and resumed is the run that was not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny_trl
import torch
from trl import GRPOTrainer

from rollalloc.drivers.trl.checks import steps_per_batch

TIMES = ("runtime", "per_second", "step_time", "total_flos", "train_loss", "train_runtime")


def history(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not any(time in name for time in TIMES)}
        for line in trainer.state.log_history
    ]


def assert_same_run(one: GRPOTrainer, other: GRPOTrainer) -> None:
    theirs = tiny_trl.weights(other.model)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tiny_trl.weights(one.model).items())
    assert history(one) == history(other)


def allocation_of(trainer: GRPOTrainer) -> Any:
    return getattr(trainer, "allocation", None) or trainer.rollout_func.allocation


def stopped_and_resumed(
    out: Path, recipe: Any, *, stop: int = 10, steps: int = 20, where: Any = True, **given: Any
) -> GRPOTrainer:
    first = tiny_trl.trainer(out, recipe, max_steps=stop, save_strategy="steps", save_steps=stop, **given)
    first.train()
    second = tiny_trl.trainer(out, recipe, max_steps=steps, save_strategy="steps", save_steps=stop, **given)
    second.train(resume_from_checkpoint=where)
    return second


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"driver": {"use_sampler": False}},
        {"num_iterations": 2},
        {"steps_per_generation": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    ],
    ids=["sampler", "generate", "two passes", "two steps"],
)
def test_stopped_at_10_and_resumed_to_20_it_is_the_run_that_was_not(given, tmp_path):
    whole = tiny_trl.trainer(tmp_path / "whole", "pilot_commit", max_steps=20, **given)
    whole.train()
    resumed = stopped_and_resumed(tmp_path / "parts", "pilot_commit", **given)
    assert_same_run(whole, resumed)
    assert whole.allocation.allocator.version == 20 // steps_per_batch(whole.args)


def test_pilots_were_held_over_the_stop(tmp_path):
    first = tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=10, save_strategy="steps", save_steps=10)
    first.train()
    held = dict(first.allocation.rollouts)
    saved = json.loads(next((tmp_path / "checkpoint-10" / "rollalloc").glob("checkpoints/10/state.json")).read_text())
    assert len(saved["prompts"]) > 4
    second = tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=11)
    second.train(resume_from_checkpoint=True)
    batch_before = first.allocation.next_batch(first, first._generator)
    assert batch_before is not None
    older = [row for row in batch_before.rows if row.version < batch_before.version]
    assert older
    for row in older:
        made = held[row.rollout].made
        assert made.tokens == first.allocation.rollouts[row.rollout].made.tokens


def test_what_reward_functions_logged_of_held_pilots_is_there_again(tmp_path):
    def reward(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("text", completions)
        log_extra("length", np.array([len(text) for text in completions]))
        return tiny_trl.starts_right(completions, **columns)

    given = {"reward": reward, "log_completions": True, "logging_steps": 1}
    whole = tiny_trl.trainer(tmp_path / "whole", "pilot_commit", max_steps=11, **given)
    whole.train()
    resumed = stopped_and_resumed(tmp_path / "parts", "pilot_commit", steps=11, **given)
    tables = [
        pd.read_parquet(tmp_path / part / "completions" / "completions_00011.parquet") for part in ("whole", "parts")
    ]
    assert resumed.state.log_history[-2]["rollalloc/staleness_max"] > 0
    pd.testing.assert_frame_equal(*tables)


def test_a_run_killed_while_a_checkpoint_was_written_resumes_from_the_one_before(tmp_path, caplog):
    """The trainer's own part is there, ours is not yet."""
    whole = tiny_trl.trainer(tmp_path / "whole", "pilot_commit", max_steps=8)
    whole.train()
    tiny_trl.trainer(tmp_path / "a", "pilot_commit", max_steps=6, save_strategy="steps", save_steps=3).train()
    shutil.rmtree(tmp_path / "a" / "checkpoint-6" / "rollalloc")
    resumed = tiny_trl.trainer(tmp_path / "a", "pilot_commit", max_steps=8)
    resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-6 has no state of rollalloc" in caplog.text
    assert_same_run(whole, resumed)


def test_without_any_checkpoint_there_is_nothing_to_resume_from(tmp_path):
    (tmp_path / "checkpoint-best").mkdir()  # a user's own, which has no number
    with pytest.raises(ValueError, match="No valid checkpoint"):
        tiny_trl.trainer(tmp_path, "pilot_commit").train(resume_from_checkpoint=True)


@pytest.mark.parametrize("recipe", ["fresh_pilot_commit", "grpo"])
def test_the_hook_resumes_too(recipe, tmp_path):
    whole = tiny_trl.trainer(tmp_path / "whole", recipe, max_steps=6, with_hook=True)
    whole.train()
    resumed = stopped_and_resumed(tmp_path / "parts", recipe, stop=3, steps=6, with_hook=True)
    assert_same_run(whole, resumed)


def test_a_checkpoint_may_have_moved(tmp_path):
    whole = tiny_trl.trainer(tmp_path / "whole", "pilot_commit", max_steps=6)
    whole.train()
    tiny_trl.trainer(tmp_path / "a", "pilot_commit", max_steps=3, save_strategy="steps", save_steps=3).train()
    moved = (tmp_path / "a" / "checkpoint-3").rename(tmp_path / "moved")
    resumed = tiny_trl.trainer(tmp_path / "b", "pilot_commit", max_steps=6)
    resumed.train(resume_from_checkpoint=str(moved))
    assert_same_run(whole, resumed)


def test_nothing_is_pickled(tmp_path):
    tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=3, save_strategy="steps", save_steps=3).train()
    files = [path.suffix for path in (tmp_path / "checkpoint-3" / "rollalloc").rglob("*") if path.is_file()]
    assert sorted(files) == [".json", ".json", ".safetensors"]


def test_a_checkpoint_without_our_state_is_refused(tmp_path):
    stock = GRPOTrainer(
        tiny_trl.tiny_model(),
        tiny_trl.starts_right,
        tiny_trl.settings(tmp_path, save_strategy="steps", save_steps=4),
        tiny_trl.prompts(),
        processing_class=tiny_trl.tiny_tokenizer(),
    )
    stock.train()
    with pytest.raises(FileNotFoundError, match="checkpoint-4 has no state of rollalloc"):
        tiny_trl.trainer(tmp_path, "grpo", max_steps=8).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": replace(tiny_trl.RECIPES["pilot_commit"], max_staleness=2)}, "max_staleness"),
        ({"seed": 4}, "seed"),
        ({"dataset": tiny_trl.prompts(41)}, "40 prompts"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change, message, tmp_path):
    tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=3, save_strategy="steps", save_steps=3).train()
    other = {"recipe": "pilot_commit", "max_steps": 6} | change
    with pytest.raises(ValueError, match=message):
        tiny_trl.trainer(tmp_path, **other).train(resume_from_checkpoint=True)


def test_a_torn_checkpoint_is_refused(tmp_path):
    tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=3, save_strategy="steps", save_steps=3).train()
    file = next((tmp_path / "checkpoint-3" / "rollalloc").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="none of the checkpoints"):
        tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=6).train(resume_from_checkpoint=True)
