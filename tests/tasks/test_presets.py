"""Presets can be made and have seeds of their own, and one number of optimizer steps for all."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from rollalloc.core.recipe import Recipe
from rollalloc.named import RECIPES, make_recipe
from rollalloc.tasks import gym, presets, skills
from rollalloc.tasks.files import TaskFiles
from rollalloc.tasks.presets import families, preset_of, task_run, tuned_of

TASKS = {name: family.presets[name] for family in presets._OURS for name in family.presets}


@pytest.fixture(autouse=True)
def no_files(monkeypatch, tmp_path):
    """Tasks that are said to be there: nothing here trains."""

    def prepared(folder, *pool, progress):
        return TaskFiles(tmp_path / "model", tmp_path / "train", tmp_path / "held", "module:function", 9, True)

    for task in (presets.skills, presets.sort, presets.gym):
        monkeypatch.setattr(task, "prepare", prepared)


def test_there_is_a_preset_for_every_task_and_pool():
    assert set(TASKS) == {f"skills/{pool}" for pool in skills.POOLS} | {"sort"} | set(gym.LADDER)
    for name, preset in TASKS.items():
        assert preset.target is not None, name
        assert 0 < preset.target < 1, name
        assert 0 < preset.eval_every < preset.max_rollouts, name
        assert {"grpo", "reinforce"} <= set(tuned_of(preset.tuned_on)) <= set(RECIPES), name  # a new method has none


@pytest.mark.parametrize("file", list((files("rollalloc.tasks") / "tuned").iterdir()), ids=lambda file: file.name)
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
    ("task", "recipe"),
    [*((task, "grpo") for task in TASKS), *(("skills/late", recipe) for recipe in tuned_of("skills/late"))],
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


def test_what_has_no_tuned_settings_is_refused(tmp_path):
    with pytest.raises(ValueError, match="my:recipe has no tuned settings for sort"):
        task_run("sort", "my:recipe", 0, tmp_path)


def test_another_distribution_adds_tasks_by_an_entry_point_and_takes_no_name(monkeypatch, tmp_path):
    class Point:
        value = "theirs:families"

        def __init__(self, *families):
            self.load = lambda: lambda: families

    def prepared(name, folder, _):
        return TaskFiles(folder / name, tmp_path, tmp_path, "module:function", 9, True)

    theirs = presets.Family({"theirs/late": presets.Preset(0.5, 100, 10)}, prepared)
    monkeypatch.setattr(presets, "entry_points", lambda group: [Point(theirs)] if group == "rollalloc.tasks" else [])
    families.cache_clear()
    try:
        assert preset_of("theirs") == ("theirs/late", theirs.presets["theirs/late"])
        assert task_run("theirs", "grpo", 0, tmp_path).model == str(tmp_path / "theirs" / "late")
        taken = presets.Family({"sort": presets.Preset(0.5, 100, 10)}, prepared)
        monkeypatch.setattr(presets, "entry_points", lambda group: [Point(taken)])
        families.cache_clear()
        with pytest.raises(ValueError, match="theirs:families adds the task sort, which there is already"):
            families()

        def absent():
            raise ModuleNotFoundError("No module named 'theirs'")

        taken_away = Point()
        taken_away.load = absent
        monkeypatch.setattr(presets, "entry_points", lambda group: [taken_away])
        assert preset_of("sort") == ("sort", TASKS["sort"])  # the library's own need no other distribution
        with pytest.raises(ImportError, match=r"theirs:families, which adds tasks, cannot be imported .*; install"):
            preset_of("theirs")
    finally:
        families.cache_clear()
