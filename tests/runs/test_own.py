"""Tests of reading rollalloc's own runs: accounts, recipe, prompts' records and the shape of a batch, for every driver."""

import pytest

from recorded_run import Run
from rollalloc import recipes
from rollalloc.named import RECIPES, make_recipe, name_of
from rollalloc.rules.advantages import GRPO, settled
from rollalloc.runs.own import own_run

RUN = Run(recipes.dapo(groups=3, n=4, gen_groups=5)).train()


@pytest.mark.parametrize(
    ("written", "source"),
    [
        (lambda folder: RUN.trl(folder), "checkpoint-6"),
        (lambda folder: RUN.verl(folder), "global_step_6/rollalloc.json"),
        (lambda folder: RUN.native(folder, ended=True), "allocator.json"),
        (lambda folder: RUN.native(folder, ended=False), "checkpoints/6/state.json"),
    ],
)
def test_every_driver_s_state_has_accounts_recipe_and_records(tmp_path, written, source):
    own = own_run(written(tmp_path / "run"))
    assert (own.source, own.recipe) == (source, "dapo")
    assert {cause: count for cause, count in own.accounts.items() if count and cause != "open"} == RUN.ended
    assert own.paid == len(RUN.reward) == own.attempts_N.sum()
    assert own.successes_N.sum() == sum(RUN.reward.values())


def test_the_shape_of_a_batch_is_what_was_logged_of_it(tmp_path):
    own = own_run(Run(recipes.pods(groups=3, n=8, m=4)).train().trl(tmp_path / "run"))
    assert (own.groups, own.rows, own.each, own.rows_at) == (3, 12, 4, dict.fromkeys(range(1, 7), 12))


def test_the_newest_state_counts_and_one_that_is_broken_is_passed_over(tmp_path):
    folder = RUN.trl(tmp_path / "run")
    Run(recipes.dapo(groups=3, n=4, gen_groups=5)).train(4).trl_checkpoint(folder)
    broken = folder / "checkpoint-12" / "rollalloc" / "checkpoints" / "12"
    broken.mkdir(parents=True)
    (broken / "allocator.safetensors").write_bytes(b"\x00" * 9)
    assert own_run(folder).source == "checkpoint-6"
    assert own_run(tmp_path) is None


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_name_is_found_by_its_rules(name):
    recipe = make_recipe(name, {"groups": 5})
    under_trl = recipe.replace(advantage=settled(recipe.advantage, GRPO(ddof=1, eps=1e-4)))
    known = "dapo" if name == "dapo_carry" else name  # its rules are DAPO's
    assert (name_of(recipe.description), name_of(under_trl.description)) == (known, known)


@pytest.mark.parametrize("name", ["grpo", "reinforce", "foresight"])
def test_a_recipe_with_replay_has_the_name_of_the_recipe(name):
    for given in ({}, {"replay_moved": 0.1}):
        assert name_of(make_recipe(name, {"replay": 8, **given}).description) == name


def test_a_recipe_of_one_s_own_has_no_name():
    pods, dapo = recipes.pods(groups=4, n=8, m=4), recipes.dapo(groups=4, n=8)
    assert name_of(pods.replace(prompts=dapo.prompts, rows=dapo.rows).description) is None
