"""Presets can be made and are fair: equal grids, seeds of their own, one number of optimizer steps for all."""

from __future__ import annotations

import pytest

from rollalloc.bench import presets
from rollalloc.bench.presets import PRESETS, TUNING_SEEDS, Tuned, preset_of, task_run
from rollalloc.bench.sweep import GRID, LEARNING_RATES, candidates
from rollalloc.bench.tasks import skills
from rollalloc.bench.tasks.files import TaskFiles
from rollalloc.core.recipe import Recipe
from rollalloc.named import RECIPES, make_recipe


@pytest.fixture(autouse=True)
def no_files(monkeypatch, tmp_path):
    """Tasks that are said to be there: nothing here trains."""

    def prepared(folder, *pool):
        return TaskFiles(tmp_path / "model", tmp_path / "train", tmp_path / "held", "module:function", 9, True)

    monkeypatch.setattr(presets.skills, "prepare", prepared)
    monkeypatch.setattr(presets.sort, "prepare", prepared)


def test_there_is_a_preset_for_every_task_and_pool():
    assert set(PRESETS) == {f"skills/{pool}" for pool in skills.POOLS} | {"sort"}
    for name, preset in PRESETS.items():
        assert 0 < preset.target < 1, name
        assert 0 < preset.eval_every < preset.max_rollouts, name
        assert {"grpo", "dapo", "pilot_commit"} <= set(preset.tuned) <= set(RECIPES), name


@pytest.mark.parametrize(
    ("task", "pool", "recipe"),
    [(*name.split("/"), recipe) for name in PRESETS if "/" in name for recipe in PRESETS[name].tuned]
    + [("sort", "late", recipe) for recipe in PRESETS["sort"].tuned],
)
def test_every_presets_recipe_can_be_made_and_fits_its_task(tmp_path, task, pool, recipe):
    run = task_run(task, pool, recipe, 5, tmp_path)
    name, preset = preset_of(task, pool)
    made = make_recipe(run.recipe, run.parameters)
    assert isinstance(made, Recipe)
    assert made.groups <= 8192
    assert run.settings.learning_rate == preset.tuned[recipe].learning_rate > 0
    assert (run.settings.seed, run.settings.target, run.max_rollouts) == (5, preset.target, preset.max_rollouts)
    assert run.settings.sampling.max_new_tokens == 9
    assert run.source.single_answer
    assert name == (task if task == "sort" else f"{task}/{pool}")


def test_every_recipe_takes_as_many_optimizer_steps_a_batch(tmp_path):
    """The released Pilot-Commit takes six where its baselines take four; a comparison of ours must not."""
    steps = {
        recipe: task_run("skills", "late", recipe, 0, tmp_path).settings.optimizer_steps_per_batch
        for recipe in PRESETS["skills/late"].tuned
    }
    assert len(set(steps.values())) == 1


def test_what_is_given_goes_before_the_preset(tmp_path):
    tuned = Tuned({"groups": 3, "n": 5}, 1e-5)
    run = task_run("sort", "late", "grpo", 0, tmp_path, tuned=tuned, target=0.1, optimizer_steps_per_batch=7)
    assert (dict(run.parameters), run.settings.learning_rate) == ({"groups": 3, "n": 5}, 1e-5)
    assert (run.settings.target, run.settings.optimizer_steps_per_batch) == (0.1, 7)


def test_unknown_tasks_pools_and_recipes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown task 'skils'; there are skills/balanced"):
        preset_of("skils", "late")
    with pytest.raises(ValueError, match="unknown task 'skills/hard'"):
        preset_of("skills", "hard")
    with pytest.raises(ValueError, match="my:recipe has no tuned settings for sort"):
        task_run("sort", "late", "my:recipe", 0, tmp_path)


def test_the_sweep_gives_every_label_as_many_settings(tmp_path):
    assert {"grpo", "dapo", "pilot_commit"} <= set(GRID)
    assert len({len(shapes) for _, shapes in GRID.values()}) == 1
    for label, (recipe, shapes) in GRID.items():
        assert len({str(shape) for shape in shapes}) == len(shapes), label
        for shape in shapes:
            make_recipe(recipe, shape)
        grid = list(candidates("skills", "late", label, tmp_path))
        assert len(grid) == len(LEARNING_RATES) * len(shapes)
        names = [(run.name, run.settings.seed) for _, runs in grid for run in runs]
        assert len(set(names)) == len(names) == len(grid) * len(TUNING_SEEDS)
        assert {run.settings.seed for _, runs in grid for run in runs} == set(TUNING_SEEDS)
        assert len({run.max_rollouts for _, runs in grid for run in runs}) == 1


def test_tuning_seeds_are_not_a_comparisons():
    assert not set(TUNING_SEEDS) & set(range(100))
