"""What `rollalloc advise` says to paste for TRL, executed up to the trainer that it builds."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_trl
import trl
from trl import GRPOTrainer

from rollalloc.advise.pasting import pasted
from rollalloc.advise.verdict import Choice
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from tiny_policy import tiny_model

TINY = {name: tiny_trl.USUAL[name] for name in ("use_cpu", "bf16", "report_to")}
SHAPES = (
    *(Choice(recipe, 64, 1) for recipe in ("reinforce", "raft", "foresight")),
    Choice("grpo", 16, 4),
    Choice("reinforce", 15, 1),
    Choice("grpo", 3, 5),
    Choice("foresight", 7, 1),
)


@pytest.fixture
def built(monkeypatch, tmp_path) -> Any:
    """choice → the trainer that the pasted text builds, for a tiny model on the CPU."""
    monkeypatch.chdir(tmp_path)
    configured = trl.GRPOConfig.__init__
    monkeypatch.setattr(trl.GRPOConfig, "__init__", lambda self, **how: configured(self, **how, **TINY))

    def made(choice: Choice) -> GRPOTrainer:
        model, dataset = tiny_model(), tiny_trl.prompts(80)
        model.save_pretrained(tmp_path / "model")
        tiny_trl.tiny_tokenizer().save_pretrained(tmp_path / "model")
        text, train = pasted(choice, "trl").removesuffix("\n").rsplit("\n", 1)
        assert train == "trainer.train()"
        names: dict[str, Any] = {"model": "model", "reward_funcs": tiny_trl.starts_right, "dataset": dataset}
        exec(compile(text, "pasted", "exec"), names)  # it is our own text
        return names["trainer"]

    return made


@pytest.mark.parametrize("choice", SHAPES, ids=lambda choice: f"{choice.name} {choice.groups}")
def test_trl_takes_what_is_pasted_and_a_batch_has_the_rows_of_the_choice(built, choice):
    trainer = built(choice)
    args, rows = trainer.args, choice.groups * choice.n
    assert args.generation_batch_size == rows
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == rows
    if choice.recipe == "grpo":
        assert type(trainer) is GRPOTrainer
        assert args.num_generations == choice.n
    else:
        assert type(trainer) is AllocatedGRPOTrainer
        recipe = trainer.allocation.allocator.recipe
        assert (recipe.groups, recipe.stages[0].size.n) == (choice.groups, choice.n)
