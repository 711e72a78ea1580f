"""A run that was stopped and resumed is the run that was not."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_trl
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_trl import DISTINCT
from transformers import trainer as trainer_module
from trl import GRPOTrainer

from rollalloc import recipes
from rollalloc.drivers.trl.callback import load, read
from rollalloc.drivers.trl.checkpoints import newest_whole, numbered
from rollalloc.drivers.trl.generation import steps_per_batch

pytestmark = pytest.mark.e2e

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
def test_a_run_stopped_at_step_10_and_resumed_equals_the_unbroken_one(given, tmp_path):
    whole = tiny_trl.trainer(tmp_path / "whole", "pilot_commit", max_steps=20, **given)
    whole.train()
    resumed = stopped_and_resumed(tmp_path / "parts", "pilot_commit", **given)
    assert_same_run(whole, resumed)
    assert whole.allocation.allocator.version == 20 // steps_per_batch(whole.args)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda place: shutil.rmtree(place / "rollalloc"), "no state of rollalloc"),
        (lambda place: (place / "trainer_state.json").unlink(), "no trainer_state.json"),
        (lambda place: (place / "trainer_state.json").write_text('{"epoch": 1.'), "no trainer_state.json"),
    ],
)
def test_a_run_killed_while_a_checkpoint_was_written_resumes_from_the_one_before(spoil, said, tmp_path, caplog):
    whole = tiny_trl.trainer(tmp_path / "whole", "pilot_commit", max_steps=8)
    whole.train()
    tiny_trl.trainer(tmp_path / "a", "pilot_commit", max_steps=6, save_strategy="steps", save_steps=3).train()
    last = tmp_path / "a" / "checkpoint-6"
    spoil(last)
    resumed = tiny_trl.trainer(tmp_path / "a", "pilot_commit", max_steps=8)
    lacks = "has no state of rollalloc" if "no state" in said else "is incomplete: the run was killed while saving it"
    with pytest.raises(FileNotFoundError, match=f"checkpoint-6 {lacks}"):
        resumed.train(resume_from_checkpoint=str(last))
    resumed.train(resume_from_checkpoint=True)
    assert f"checkpoint-6 is incomplete ({said})" in caplog.text
    assert_same_run(whole, resumed)


def test_a_run_killed_within_its_first_checkpoint_starts_afresh(tmp_path, caplog, monkeypatch):
    """Whatever file was being written: a whole run's checkpoint stands in the folder, and then a run is killed there."""
    whole = tiny_trl.trainer(tmp_path / "whole", "pilot_commit", max_steps=4)
    whole.train()
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    for number, name in enumerate(("_save_optimizer_and_scheduler", "save_model", "_save_rng_state")):
        folder = tmp_path / str(number)
        if number:
            tiny_trl.trainer(folder, "grpo", **given).train()
        killed = tiny_trl.trainer(folder, "pilot_commit", **given)
        monkeypatch.setattr(killed, name, lambda *_, **__: sys.exit(1))
        with pytest.raises(SystemExit):
            killed.train()
        if number:
            shutil.rmtree(folder / "checkpoint-4", ignore_errors=True)
        caplog.clear()
        resumed = tiny_trl.trainer(folder, "pilot_commit", max_steps=4)
        with pytest.raises(FileNotFoundError, match="checkpoint-3 is incomplete"):
            resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        resumed.train(resume_from_checkpoint=True)
        assert "was killed while it saved its first checkpoint" in caplog.text
        assert_same_run(whole, resumed)


def test_with_one_checkpoint_kept_a_kill_leaves_one_that_is_whole(tmp_path, monkeypatch):
    given = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 4}
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", **given)
    rotate, kept = trainer_module.rotate_checkpoints, []

    def watch(*given: Any, **named: Any) -> None:
        rotate(*given, **named)
        kept.append(newest_whole(numbered(tmp_path)).name)

    monkeypatch.setattr(trainer_module, "rotate_checkpoints", watch)
    trainer.train()
    assert kept == ["checkpoint-2", "checkpoint-4"]


def saved_at_3(out: Path, **given: Any) -> GRPOTrainer:
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    trainer = tiny_trl.trainer(out, "pilot_commit", dataset=DISTINCT, **saving, **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"recipe": replace(tiny_trl.RECIPES["pilot_commit"], max_staleness=2)},
            r"checkpoint-3 was saved under another recipe: recipe.max_staleness: saved 4, given 2.*accept_recipe=True",
        ),
        ({"seed": 4}, "checkpoint-3 was saved with seed 3, this run has seed 4"),
        (
            {"dataset": DISTINCT.select(range(2, 40))},
            "2 of the 40 prompts that .* saved with are not in this data set, 0 of its 38 are new .*accept_data=True",
        ),
        ({"driver": {"key": "number"}}, "40 of the 40 prompts .* identified by number"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_way_out(change, message, tmp_path):
    saved_at_3(tmp_path)
    other = {"recipe": "pilot_commit", "max_steps": 6, "dataset": DISTINCT} | change
    trainer = tiny_trl.trainer(tmp_path, **other)
    before = trainer.allocation.allocator.state_dict()
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.allocation.allocator.state_dict() == before
    assert not trainer.allocation.rollouts


def rows_changed(dataset: Dataset) -> Dataset:
    """Another order, another column, two rows more."""
    rows = dataset.shuffle(seed=1).to_list()
    new = [{"prompt": f"k{at} k{at} k{at} k{at} k{at} =", "answer": "a1", "number": 100 + at} for at in range(2)]
    return Dataset.from_list([row | {"source": "here"} for row in [new[0], *rows, new[1]]])


@pytest.mark.parametrize("key", [None, "number"])
def test_rows_may_be_added_reordered_and_widened(key, caplog, tmp_path):
    first = saved_at_3(tmp_path, driver={"key": key}).allocation
    changed = rows_changed(DISTINCT)
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", dataset=changed, driver={"key": key}, max_steps=6)
    here = trainer.allocation
    place = tmp_path / "checkpoint-3"
    load(here, read(place), place, accept_recipe=False, accept_data=False)
    assert "40 prompts found again, 0 missing, 2 new" in caplog.text
    known = {text: first.allocator.statistics.record(at) for at, text in enumerate(DISTINCT["prompt"])}
    for at, text in enumerate(changed["prompt"]):
        record = here.allocator.statistics.record(at)
        assert (record.attempts, record.tokens) == (
            (known[text].attempts, known[text].tokens) if text in known else (0, 0)
        )
    assert here.rollouts.keys() == first.rollouts.keys()
    for number, rollout in here.rollouts.items():
        assert changed[rollout.prompt]["prompt"] == DISTINCT[first.rollouts[number].prompt]["prompt"]
    trainer.train(resume_from_checkpoint=True)
    assert here.allocator.version == 6
    assert sum(here.allocator.accounts().values()) == here.allocator.paid > first.allocator.paid


def test_prompts_that_are_gone_take_their_rollouts_with_them_where_that_is_accepted(caplog, tmp_path):
    first = saved_at_3(tmp_path).allocation
    held = {rollout.prompt for rollout in first.rollouts.values()}
    kept = [row for row in range(40) if row not in held]
    trainer = tiny_trl.trainer(
        tmp_path, "pilot_commit", dataset=DISTINCT.select(kept), driver={"accept_data": True}, max_steps=6
    )
    trainer.train(resume_from_checkpoint=True)
    core = trainer.allocation.allocator
    assert f"{len(kept)} prompts found again, {len(held)} missing, 0 new" in caplog.text
    assert core.version == 6
    assert sum(core.accounts().values()) == core.paid
    trainer.allocation._ask(0)
    assert len(trainer.allocation.rollouts) == core.accounts()["open"]


PREDICTING = {
    "replayed rows": tiny_trl.ONE_EACH["foresight_replay"],
    "a gate in its pause": tiny_trl.ONE_EACH["reinforce_gated"],
    "a tracked rate": tiny_trl.ONE_EACH["spo"],
    "a running mean": tiny_trl.ONE_EACH["reinforce_running"],
    "held predictions": recipes.mix(tiny_trl.RECIPES["pilot_commit"], recipes.foresight(4, replay=4)),
}


@pytest.mark.parametrize("name", PREDICTING)
def test_predictions_and_replay_are_resumed(name, tmp_path):
    recipe = PREDICTING[name]
    whole = tiny_trl.trainer(tmp_path / "whole", recipe, max_steps=14)
    whole.train()
    resumed = stopped_and_resumed(tmp_path / "parts", recipe, stop=7, steps=14)
    assert_same_run(whole, resumed)
    one, other = (each.allocation.allocator.state_dict() for each in (whole, resumed))
    assert one == other
    if name == "held predictions":
        assert json.loads((tmp_path / "parts/checkpoint-7/rollalloc/checkpoints/7/state.json").read_text())["rollouts"]
    core = whole.allocation.allocator
    assert (core.replayed if recipe.gate is None else core.left_out) > 0 or recipe.replay is None


@pytest.mark.parametrize(
    ("most", "given"),
    [
        (0.0, {}),
        (1.0, {"num_iterations": 2}),
        (1.0, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}),
    ],
    ids=["shut", "open, two passes", "open, accumulated"],
)
def test_a_run_with_adapters_behind_a_gate_is_resumed(most, given, tmp_path):
    """At bound 0 the rows wait for the end of a pause, at bound 1 they are trained on. The dropout is the same, too."""
    recipe = recipes.reinforce(groups=16, neg=0.5, replay=8, replay_moved=most, replay_pause=1)
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    usual = given | {"more": {"peft_config": adapter}, "num_generations": 2}
    each = given.get("num_iterations", 1)
    torch.manual_seed(0)  # TRL's first versions leave the adapters to chance
    whole = tiny_trl.trainer(tmp_path / "whole", recipe, max_steps=8 * each, **usual)
    whole.train()
    torch.manual_seed(0)
    resumed = stopped_and_resumed(tmp_path / "parts", recipe, stop=4 * each, steps=8 * each, **usual)
    assert_same_run(whole, resumed)
    core = whole.allocation.allocator
    assert core.state_dict() == resumed.allocation.allocator.state_dict()
    assert (core.left_out > 0, core.replayed > 0) == (most == 0, most == 1)


def test_a_run_that_began_with_features_is_not_resumed_without(tmp_path):
    tiny_trl.trainer(tmp_path, "foresight", max_steps=3, save_strategy="steps", save_steps=3).train()
    with pytest.raises(ValueError, match="was saved with the features"):
        tiny_trl.trainer(tmp_path, "foresight", max_steps=6, driver={"features": None}).train(
            resume_from_checkpoint=True
        )
