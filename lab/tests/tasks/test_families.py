"""Every task of the laboratory has a preset, and its recipes can be made."""

import json

import pytest

from rollalloc.core.recipe import Recipe
from rollalloc.named import RECIPES, make_recipe
from rollalloc.tasks.files import TaskFiles
from rollalloc.tasks.presets import families, task_run, tuned_of
from rollalloc_lab.tasks import families as ours
from rollalloc_lab.tasks import twins, walks
from rollalloc_lab.tasks.rungs import RUNGS

TASKS = {name: preset for family in ours.families() for name, preset in family.presets.items()}


def test_there_is_a_preset_for_every_pool_and_rung():
    ladder = {rung.task for rung in RUNGS.values()} | {twins.name_of(rung) for rung in twins.TWINS}
    assert set(TASKS) == {f"walks/{pool}" for pool in walks.POOLS} | ladder
    for name, preset in TASKS.items():
        assert 0 < preset.target < 1, name
        assert 0 < preset.eval_every < preset.max_rollouts, name
        assert {"grpo", "reinforce"} <= set(tuned_of(preset.tuned_on)) <= set(RECIPES), name  # a new method has none


def test_tuned_settings_say_how_they_were_found():
    (file,) = families()["walks/mixed"].tuned.iterdir()
    found = json.loads(file.read_text())
    assert (file.name, found["task"]) == ("walks-mixed.json", "walks/mixed")
    for recipe, one in found["recipes"].items():
        make_recipe(recipe, one["parameters"])
        assert one["learning_rate"] > 0
        assert one["settings_tried"] >= 0, recipe


@pytest.mark.parametrize("task", TASKS)
def test_every_presets_recipe_can_be_made_and_its_files_are_those_of_its_family(monkeypatch, tmp_path, task):
    made = TaskFiles(tmp_path / "model", tmp_path / "train", tmp_path / "held", "module:function", 9, True)
    for family in (ours.walks, ours.ladder, ours.twins):
        monkeypatch.setattr(family, "prepare", lambda *_, progress: made)
    run = task_run(task, "grpo", 5, tmp_path)
    assert isinstance(make_recipe(run.recipe, run.parameters), Recipe)
    assert (run.task, run.model, run.max_rollouts) == (task, str(tmp_path / "model"), TASKS[task].max_rollouts)
