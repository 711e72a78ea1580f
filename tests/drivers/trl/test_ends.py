"""Tests of recipes that end before `max_steps`: TRL then evaluates and saves as after its last step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_trl
from transformers import TrainerCallback

from rollalloc import Budget


class Heard(TrainerCallback):
    """What the trainer did after its last step."""

    def __init__(self) -> None:
        self.last: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last.clear()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last.append("evaluated")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last.append("saved")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last.append("ended")


def run(out: Any, rollouts: int | None = None, resume: bool | None = None, **given: Any) -> tuple[Any, list[str]]:
    """A run that evaluates and saves after each tenth step, and its last events."""
    recipe, heard = tiny_trl.RECIPES["grpo"], Heard()
    evaluated = {"eval_strategy": "steps", "eval_steps": 10, "num_generations_eval": 2, "per_device_eval_batch_size": 2}
    trainer = tiny_trl.trainer(
        out,
        replace(recipe, budget=Budget(run_rollouts=rollouts)),
        more={"callbacks": [heard], "eval_dataset": tiny_trl.prompts(1)},
        driver={"accept_recipe": True},
        **({"max_steps": 40, "save_strategy": "steps", "save_steps": 10} | evaluated | given),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, heard.last


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
def test_a_recipe_that_ends_early_evaluates_and_saves_as_the_last_step_does(strategy, tmp_path):
    usual, expected = run(tmp_path / "usual", max_steps=3, save_strategy=strategy, eval_steps=9)
    early, heard = run(tmp_path / "early", rollouts=32, save_strategy=strategy, eval_steps=9)
    assert heard == expected
    assert heard == ["evaluated", *(["saved"] if strategy != "no" else []), "ended"]
    assert early.allocation.finished.startswith("the budget of 32 rollouts")
    assert usual.state.global_step == early.state.global_step == 3  # the third step has no rows
    made = [sorted(place.name for place in (tmp_path / name).glob("checkpoint-*")) for name in ("usual", "early")]
    assert made[0] == made[1] == ([] if strategy == "no" else ["checkpoint-3"])


def test_the_best_model_may_be_the_one_of_an_early_end(tmp_path):
    trainer, heard = run(tmp_path, rollouts=16, load_best_model_at_end=True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert heard == ["evaluated", "saved", "ended"]


def test_a_run_that_ended_early_goes_on_under_a_larger_budget(tmp_path):
    two_steps = {"num_iterations": 2, "eval_strategy": "no"}  # on each batch
    first, _ = run(tmp_path, rollouts=32, **two_steps)
    assert first.state.global_step == 6  # with both steps of the batch that has no rows
    again, _ = run(tmp_path, rollouts=64, resume=True, **two_steps)
    assert again.allocation.allocator.accounts()["open"] == 0
    assert again.allocation.allocator.paid == 64
    assert again.allocation.allocator.version == 4
    assert (tmp_path / f"checkpoint-{again.state.global_step}").is_dir()
