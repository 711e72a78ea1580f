"""Bad input: a clear error before training."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_trl
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model

from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.drivers.trl.checks import (
    check_data,
    check_processes,
    check_settings,
    check_sizes,
    check_stops,
    check_turns,
    in_shape_of,
)
from rollalloc.named import RECIPES
from rollalloc.recipes.mopps import Posterior
from rollalloc.rules import promote
from rollalloc.rules.advantages import OverChosen, OverGroup, dr_grpo

CHAT = Dataset.from_dict({"prompt": [[{"role": "user", "content": "k1"}]] * 8})


def short(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) < 5) for text in completions]


WRONG: dict[str, dict[str, Any]] = {
    "num_generations=8 does not fit the recipe, which trains on 4 rows per group (stages: pilot: Fixed(n=2)": {
        "recipe": "pilot_commit",
        "num_generations": 8,
    },
    "the recipe trains on 4 groups of 4 rows per batch, but TRL's generation batch has 32 rows": {
        "recipe": "pilot_commit",
        "per_device_train_batch_size": 32,
    },
    "not a multiple of gradient_accumulation_steps=2": {
        "recipe": "grpo",
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
    "scale_rewards and multi_objective_aggregation must not be set, got 'none'": {
        "recipe": "grpo",
        "scale_rewards": "none",
    },
    "rollalloc's sampler does not support cache_implementation": {
        "recipe": "grpo",
        "cache_implementation": "static",
        "driver": {"use_sampler": True},
    },
    "loss_type='luspo' does not support an importance weight": {"recipe": "pilot_commit", "loss_type": "luspo"},
    "call model.save_pretrained(folder)": {"recipe": "grpo", "beta": 0.1},
    "the tokenizer has no chat template": {"recipe": "grpo", "dataset": CHAT},
    "metric must name one of the reward functions starts_right, got 'accuracy'": {
        "recipe": "grpo",
        "driver": {"metric": "accuracy"},
    },
    "rollalloc's sampler does not support min_p": {"recipe": "grpo", "min_p": 0.1, "driver": {"use_sampler": True}},
    "the recipe trains on 4 groups per batch but there are only 3 prompts": {
        "recipe": "grpo",
        "dataset": tiny_trl.prompts(3),
    },
    "prompts with images are not supported": {
        "recipe": "grpo",
        "dataset": Dataset.from_dict({"prompt": ["k1 ="] * 8, "image": ["file.png"] * 8}),
    },
    "the metric is the whole reward, 1 · starts_right + 1 · short; set metric to the name of the reward function "
    "(starts_right, short) that returns 1 for right and 0 for wrong": {
        "recipe": "pilot_commit",
        "reward": [tiny_trl.starts_right, short],
    },
    "the metric is the whole reward, 2 · starts_right; set metric to": {
        "recipe": "pilot_commit",
        "reward_weights": [2.0],
    },
    "key='name' is no column of the data set; it has prompt, answer, number": {
        "recipe": "grpo",
        "driver": {"key": "name"},
    },
    "shuffle_dataset=False, but the recipe draws the prompts by Posterior(": {
        "recipe": replace(tiny_trl.RECIPES["grpo"], prompts=Posterior()),
        "shuffle_dataset": False,
    },
    "got question, answer, number; rename the column with the prompts, dataset.rename_column('question', 'prompt')": {
        "recipe": "grpo",
        "dataset": tiny_trl.prompts().rename_column("prompt", "question"),
    },
    "row 2 of train_dataset has the prompt None; expected text or messages": {
        "recipe": "grpo",
        "dataset": Dataset.from_dict({"prompt": ["k1 =", "k2 =", None] * 2}),
    },
    "row 0 of train_dataset has the prompt []; expected text or messages": {
        "recipe": "grpo",
        "dataset": Dataset.from_dict({"prompt": [[], [{"role": "user", "content": "k1"}]] * 2}),
    },
    "row 1 of eval_dataset has the prompt None; expected text or messages": {
        "recipe": "grpo",
        "more": {"eval_dataset": Dataset.from_dict({"prompt": ["k1 =", None], "answer": ["a1", "a1"]})},
    },
    "rollout_func is not supported under a recipe": {"recipe": "grpo", "more": {"rollout_func": print}},
    "num_generations=4, but the recipe trains on one row per prompt. TRL does not accept 1: set num_generations=2": {
        "recipe": "foresight",
        "num_generations": 4,
    },
    "set num_generations=3, the smallest divisor above 1 of a batch of 9 rows": {
        "recipe": recipes.foresight(9),
        "num_generations": 9,
        "per_device_train_batch_size": 9,
    },
    "the recipe trains on one row per batch, but TRL needs at least 2": {
        "recipe": recipes.raft(1),
        "num_generations": 2,
    },
    "loss_type='luspo' does not support an importance weight for each token": {
        "recipe": "foresight_replay",
        "loss_type": "luspo",
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_setting_that_cannot_work_is_refused_when_the_trainer_is_made(message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_trl.trainer(tmp_path, **WRONG[message])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_steps": 3}, "save_steps=3; make it a multiple of 2"),
        ({"save_steps": 2, "max_steps": 5}, "max_steps=5; make it a multiple of 2"),
    ],
)
def test_saving_off_a_batchs_boundary_is_refused_before_training(changes, message, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo", num_iterations=2, save_strategy="steps", **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("recipe", "given", "said"),
    [
        (
            "raft",
            {"max_steps": -1},
            "passes over the data 2 times in each epoch, 6 times in all; for 3 passes set max_steps=8",
        ),
        ("raft", {"max_steps": -1, "num_train_epochs": 0.5}, "1 times in all; for 0.5 passes set max_steps=1"),
        ("raft", {"max_steps": 4}, None),
        ("grpo", {"max_steps": -1}, None),
    ],
)
def test_epochs_that_pass_over_the_data_twice_are_said(recipe, given, said, tmp_path, caplog):
    trainer = tiny_trl.trainer(tmp_path, recipe, **given)
    assert ("passes over the data" in caplog.text) == (said is not None)
    assert said is None or said in caplog.text
    if given == {"max_steps": -1, "num_train_epochs": 0.5}:
        trainer.train()
        assert trainer.state.log_history[-2]["rollalloc/epoch"] == 1


def test_without_shuffling_the_prompts_come_in_the_data_sets_order(tmp_path):
    seen: list[int] = []

    def reward(completions: list[str], number: list[int], **_: Any) -> list[float]:
        seen.extend(dict.fromkeys(number))
        return [1.0] * len(completions)

    trainer = tiny_trl.trainer(tmp_path, "grpo", reward=reward, shuffle_dataset=False, max_steps=12)
    trainer.train()
    assert seen == [*range(40), *range(8)]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_that_was_loaded_without_training_it_is_refused(beta, tmp_path):
    """TRL's own trainer runs to its end with such an adapter if beta is above 0, and changes nothing (its issue 6700)."""
    get_peft_model(tiny_trl.tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_trl.tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="is_trainable=True"):
        tiny_trl.trainer(tmp_path / "run", "grpo", model=model, beta=beta).train()


def test_a_data_set_that_streams_is_refused(tmp_path):
    stream = tiny_trl.prompts().to_iterable_dataset()
    with pytest.raises(TypeError, match="train_dataset must be map-style"):
        tiny_trl.trainer(tmp_path, "grpo", dataset=stream)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("rows", "accumulated"), [(8, 1), (8, 4)])
def test_every_recipe_by_name_has_the_sizes_of_a_usual_config(tmp_path, name, rows, accumulated):
    args = tiny_trl.settings(
        tmp_path, per_device_train_batch_size=rows, num_generations=8, gradient_accumulation_steps=accumulated
    )
    made = in_shape_of(args, name, {})
    check_sizes(args, made)
    assert made.groups == accumulated


@pytest.mark.parametrize(
    ("recipe", "parameters"), [("pilot_commit", None), ("pilot_commit", {"promote": "random"}), ("reinforce", None)]
)
def test_a_recipe_by_name_trains_under_a_usual_config(tmp_path, recipe, parameters):
    args = tiny_trl.settings(tmp_path, per_device_train_batch_size=8, num_generations=8, max_steps=1)
    trainer = AllocatedGRPOTrainer(
        tiny_trl.tiny_model(), tiny_trl.starts_right, args=args, train_dataset=tiny_trl.prompts(),
        processing_class=tiny_trl.tiny_tokenizer(), recipe=recipe, parameters=parameters,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 1
    made = trainer.allocation.allocator.recipe
    assert made.groups == 1
    assert (made.stages[0].promote == promote.RandomOrder()) == (parameters is not None)


@pytest.mark.parametrize(
    ("recipe", "parameters", "groups", "said"),
    [
        ("reinforce", {}, 1, "num_generations=8 gives it 8 rollouts of each of 1 prompts in a batch. For one"),
        ("foresight", {}, 1, "foresight is meant for one rollout of each of many prompts"),
        ("reinforce", {"n": 8}, 1, None),
        ("reinforce", {"n": 1}, 8, None),
        ("rloo", {}, 1, None),
        ("grpo", {}, 1, None),
        ("pilot_commit", {"promote": "random"}, 1, None),
        ("pods", {}, 1, "generates up to 32 rollouts of each prompt, of which num_generations=8 are trained on"),
    ],
)
def test_what_a_recipe_makes_of_num_generations_is_said(tmp_path, caplog, recipe, parameters, groups, said):
    args = tiny_trl.settings(tmp_path, per_device_train_batch_size=8, num_generations=8)
    assert in_shape_of(args, recipe, parameters).groups == groups
    assert len(caplog.messages) == (said is not None)
    assert (said or "") in caplog.text


def test_a_method_of_one_rollout_per_prompt_has_one_where_num_generations_says_nothing_else(tmp_path, caplog):
    args = tiny_trl.settings(tmp_path, per_device_train_batch_size=8, num_generations=2)
    made = in_shape_of(args, "reinforce", {})
    check_sizes(args, made)
    assert (made.groups, made.stages[0].size.n) == (8, 1)
    assert not caplog.messages


def test_a_recipe_keeps_its_sizes_and_takes_no_parameters(tmp_path):
    args = tiny_trl.settings(tmp_path, per_device_train_batch_size=8, num_generations=8)
    recipe = recipes.pilot_commit(promote="random")
    assert in_shape_of(args, recipe, {}) is recipe
    with pytest.raises(ValueError, match=r"num_generations=8 does not fit .* recipe='pilot_commit', gets TRL's sizes"):
        check_sizes(args, recipe)
    with pytest.raises(ValueError, match="are for a recipe that is given by name"):
        in_shape_of(args, recipe, {"promote": "random"})


def test_a_parameter_that_the_recipe_does_not_have_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"pilot_commit has no parameter 'promot' .did you mean 'promote'"):
        AllocatedGRPOTrainer(
            "no such model", tiny_trl.starts_right, args=tiny_trl.settings(tmp_path), train_dataset=tiny_trl.prompts(),
            recipe="pilot_commit", parameters={"promot": "random"},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ("pilot_comit", ValueError, "unknown recipe 'pilot_comit' .did you mean 'pilot_commit'"),
        (recipes.pilot_commit, TypeError, r"recipe must be a rollalloc Recipe, .* call it: recipe=pilot_commit\(...\)"),
        ({"groups": 4}, TypeError, "recipe must be a rollalloc Recipe, .* of type dict"),
    ],
)
def test_what_is_no_recipe_is_refused_before_a_model_is_loaded(tmp_path, recipe, error, message):
    with pytest.raises(error, match=message):
        AllocatedGRPOTrainer("no/such-model", tiny_trl.starts_right, args=tiny_trl.settings(tmp_path), recipe=recipe)


def test_several_turns_are_refused_where_processes_would_wait_for_each_other():
    def trainer(processes: int, evaluation: str = "no", **on: Any) -> SimpleNamespace:
        off: dict[str, Any] = dict.fromkeys(("use_vllm", "is_fsdp_enabled", "is_deepspeed_enabled"), False)
        off |= {"vllm_mode": "server", "vllm_tensor_parallel_size": 1}
        args = SimpleNamespace(eval_strategy=evaluation)
        return SimpleNamespace(accelerator=SimpleNamespace(num_processes=processes), args=args, **off | on)

    for accepted in (trainer(1, "steps", use_vllm=True), trainer(2, "steps"), trainer(1, is_fsdp_enabled=True)):
        check_turns(accepted)
    check_turns(trainer(2, use_vllm=True))
    check_turns(trainer(2, "steps", use_vllm=True, vllm_mode="colocate"))  # each process has an engine of its own
    with pytest.raises(ValueError, match="with a sharded model on 4 processes"):
        check_turns(trainer(4, is_deepspeed_enabled=True))
    for shared in ({}, {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}):
        with pytest.raises(ValueError, match="set eval_strategy='no', use one process, or vllm_mode='colocate'"):
            check_turns(trainer(2, "steps", use_vllm=True, **shared))


@pytest.mark.parametrize("with_cpu_flag", ["True", "False"])
def test_a_lone_process_of_accelerate_launch_is_said(monkeypatch, caplog, with_cpu_flag):
    def run(processes: int, device: str) -> SimpleNamespace:
        return SimpleNamespace(world_size=processes, device=torch.device(device))

    with caplog.at_level(logging.WARNING):
        check_processes(run(1, "cpu"))
        monkeypatch.setenv("ACCELERATE_USE_CPU", with_cpu_flag)
        check_processes(run(2, "cpu"))
        check_processes(run(1, "cuda"))
        assert not caplog.messages
        check_processes(run(1, "cpu"))
    assert "torchrun --nproc_per_node N" in caplog.text


def test_another_correction_of_vllm_than_the_drivers_is_refused(tmp_path):
    args = tiny_trl.settings(tmp_path)
    args.use_vllm = True
    check_settings(args, recipes.grpo(4, 4))
    args.vllm_importance_sampling_mode = "other"
    with pytest.raises(ValueError, match="vllm_importance_sampling_mode='other': under a recipe"):
        check_settings(args, recipes.grpo(4, 4))


@pytest.mark.parametrize("tail", ["sampled", "none"])
def test_a_recipe_that_stops_rollouts_is_refused_with_vllm_and_only_there(tail, tmp_path, caplog):
    args = tiny_trl.settings(tmp_path)
    stops, whole = (recipes.darts(groups=4, shortest=3, longest=1, tail=each) for each in (tail, "exact"))
    check_stops(stops, args, can_stop=True)
    assert not caplog.messages
    check_stops(stops, args, can_stop=False)
    assert "every rollout is generated to its end" in caplog.text
    args.use_vllm = True
    with pytest.raises(ValueError, match=r"not possible with use_vllm=True.*such as darts with tail='exact'"):
        check_stops(stops, args, can_stop=False)
    check_stops(whole, args, can_stop=False)


@pytest.mark.parametrize("rule", [OverGroup, OverChosen])
def test_advantages_within_a_group_of_one_rollout_are_refused(rule, tmp_path):
    recipe = recipes.reinforce(groups=16).replace(advantage=rule(dr_grpo))
    with pytest.raises(ValueError, match=r"\(dr_grpo\) compares the rollouts of a prompt.*every advantage would be 0"):
        tiny_trl.trainer(tmp_path, recipe, num_generations=2)


@pytest.mark.parametrize("answered", [0, 3])
def test_prompts_that_the_model_continues_are_said(caplog, answered):
    asked = [[{"role": "user", "content": f"k{number}"}] for number in range(8)]
    rows = asked[:5] + [[*each, {"role": "assistant", "content": "a1"}] for each in asked[5 : 5 + answered]]
    check_data(Dataset.from_dict({"prompt": rows}), SimpleNamespace(chat_template="x"))
    said = "3 of 8 prompts of train_dataset end with an assistant's message, the first in row 5. The model continues it"
    assert [message.replace("this message", "it").partition(". If")[0] for message in caplog.messages] == [said] * bool(
        answered
    )


@pytest.mark.parametrize("key", [None, "id"])
def test_rows_with_the_same_prompt_are_said_and_how_a_resumed_run_tells_them_apart(caplog, key):
    check_data(Dataset.from_dict({"prompt": ["k1", "k2", "k1"]}), SimpleNamespace(chat_template=None), key=key)
    assert "1 of 3 rows of train_dataset have the prompt of an earlier row" in caplog.text
    assert ("by their order: before you reorder the data set, name a column of unique keys" in caplog.text) is (
        key is None
    )


def test_a_data_set_that_is_indexed_only_by_number_is_accepted():
    class Rows:
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return [{"prompt": "k1"}, {"prompt": "k2"}][number]

    check_data(Rows(), SimpleNamespace(chat_template=None))


def test_held_out_prompts_that_are_trained_on_are_said(tmp_path, caplog):
    more = {
        "eval_dataset": {
            "same": tiny_trl.prompts(8),
            "other": tiny_trl.prompts(8).map(lambda row: {"prompt": "k0 k0 ="}),
        }
    }
    tiny_trl.trainer(tmp_path, "grpo", more=more)
    assert "8 of 8 prompts of eval_dataset['same'] (100%) are in the training set too" in caplog.text
    assert "eval_dataset['other']" not in caplog.text


def test_a_trl_that_was_patched_after_the_driver_was_imported_is_refused(tmp_path, monkeypatch):
    """As by `import unsloth` in a later line: the driver's class is not of the patched one."""

    class UnslothGRPOTrainer(trl.GRPOTrainer):
        pass

    monkeypatch.setattr(trl, "GRPOTrainer", UnslothGRPOTrainer)
    with pytest.raises(ImportError, match=r"UnslothGRPOTrainer after .*import unsloth in the first line of the script"):
        tiny_trl.trainer(tmp_path, "grpo")
