"""Presets can be made and have seeds of their own, and one number of optimizer steps for all."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from rollalloc.core.recipe import Recipe
from rollalloc.lab.bench import presets
from rollalloc.lab.bench.presets import PRESETS, preset_of, task_run, tuned_of
from rollalloc.lab.bench.rungs import RUNGS
from rollalloc.lab.bench.tasks import gym, skills, walks
from rollalloc.lab.bench.tasks.files import TaskFiles
from rollalloc.named import RECIPES, make_recipe
from rollalloc.train.defaults import matched


@pytest.fixture(autouse=True)
def no_files(monkeypatch, tmp_path):
    """Tasks that are said to be there: nothing here trains."""

    def prepared(folder, *pool, progress):
        return TaskFiles(tmp_path / "model", tmp_path / "train", tmp_path / "held", "module:function", 9, True)

    for task in (presets.skills, presets.walks, presets.sort, presets.gym, presets.ladder):
        monkeypatch.setattr(task, "prepare", prepared)


def test_there_is_a_preset_for_every_task_and_pool():
    pooled = {f"skills/{pool}" for pool in skills.POOLS} | {f"walks/{pool}" for pool in walks.POOLS}
    assert set(PRESETS) == pooled | {"sort"} | set(gym.LADDER) | {rung.task for rung in RUNGS.values()}
    for name, preset in PRESETS.items():
        assert preset.target is not None, name
        assert 0 < preset.target < 1, name
        assert 0 < preset.eval_every < preset.max_rollouts, name
        assert set(tuned_of(preset.tuned_on)) == set(RECIPES), name


@pytest.mark.parametrize("file", list((files("rollalloc.lab.bench") / "tuned").iterdir()), ids=lambda file: file.name)
def test_tuned_settings_say_how_they_were_found(file):
    found = json.loads(file.read_text())
    assert file.name == f"{found['task'].replace('/', '-')}.json"
    assert not set(found["seeds"]) & set(range(100))
    assert found["budget"] > 0
    assert found["date"] >= "2026-11-21"
    for recipe, one in found["recipes"].items():
        make_recipe(recipe, one["parameters"])
        assert one["learning_rate"] > 0
        assert one["settings_tried"] >= 0, recipe
        assert 0 < max(one.get("costs", [1])) <= one.get("budget", found["budget"]), recipe


@pytest.mark.parametrize(
    ("task", "recipe"), [*((task, "grpo") for task in PRESETS), *(("skills/late", recipe) for recipe in RECIPES)]
)
def test_every_presets_recipe_can_be_made_and_fits_its_task(tmp_path, task, recipe):
    run = task_run(task, recipe, 5, tmp_path)
    _, preset = preset_of(task)
    assert isinstance(make_recipe(run.recipe, run.parameters), Recipe)
    assert run.learning_rate == tuned_of(preset.tuned_on)[recipe].learning_rate > 0
    assert (run.seed, run.target, run.max_rollouts) == (5, preset.target, preset.max_rollouts)
    assert (run.sampling.max_new_tokens, run.optimizer_steps_per_batch) == (9, 1)
    assert run.single_answer
    assert run.task == task


def test_a_task_without_a_pool_is_the_late_one_and_an_unknown_one_is_refused():
    assert preset_of("skills") == preset_of("skills/late")
    with pytest.raises(
        ValueError, match=r"unknown task 'skils' \(did you mean 'skills/late'\?\); there are skills/balanced.*rg/gcd"
    ):
        preset_of("skils")


@pytest.mark.parametrize("recipe", RECIPES)
def test_matched_shapes_have_the_same_groups_and_rollouts_a_group(recipe):
    made = make_recipe(recipe, matched(recipe, 6, 8))
    chosen = recipe in ("darts", "reinforce_ada")  # of more rollouts than are trained on
    each = "mean_n" if recipe == "knapsack" else "n"
    sizes = [made.group_rows] if chosen else [getattr(stage.size, each) for stage in made.stages]
    alone = recipe in ("reinforce", "raft", "spo", "foresight")  # as many rollouts, each of a prompt of its own
    assert (made.groups, sum(sizes)) == ((48, 1) if alone else (6, 8))


def test_what_has_no_matched_shape_or_no_tuned_settings_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"even and at least 4, .* got 7"):
        matched("grpo", 6, 7)
    with pytest.raises(
        ValueError, match=r"my:recipe has no matched shape; the recipes with a matched shape are grpo, .*foresight"
    ):
        matched("my:recipe", 6, 8)
    with pytest.raises(ValueError, match="my:recipe has no tuned settings for sort"):
        task_run("sort", "my:recipe", 0, tmp_path)
