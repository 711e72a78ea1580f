"""Plans: what a leaderboard will run is known, checked and frozen before it runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rollalloc.tasks.presets import preset_of
from rollalloc_lab.bench.plan import PLAN, freeze, frozen_in, make_plan, refuse_another
from rollalloc_lab.bench.tiers import TIERS


@pytest.mark.parametrize("name", TIERS)
def test_the_plan_of_a_tier(name):
    plan, tier = make_plan(name), TIERS[name]
    assert [task.name for task in plan.tasks] == list(tier.tasks)
    for task in plan.tasks:
        assert task.target == preset_of(task.name)[1].target
        assert task.eval_every < task.budget
    assert {each.label for each in plan.contestants} == set(tier.methods or tier.recipes)
    assert len(plan.seeds) >= (8 if name == "full" else 2)


def test_what_a_plan_pays_by_hand():
    plan = make_plan("smoke")
    assert plan.runs == 2 * 2  # two methods with two seeds
    assert plan.rollouts == plan.runs * 128
    shapes = {each.label: each.parameters for each in plan.contestants}
    assert shapes == {"grpo": {"groups": 16, "n": 4}, "reinforce": {"groups": 32, "n": 1}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tier": "day"}, "unknown tier 'day'; there are smoke, ci, full, ladder"),
        ({"tasks": ["rg/sudoku"]}, "tier smoke has no task 'rg/sudoku'; there are sort"),
        ({"recipes": ["gropo", "grpo"]}, "unknown recipe 'gropo' .did you mean 'grpo'"),
        ({"recipes": ["dapo"]}, "grpo is the baseline of every ratio; add it: --recipes grpo,dapo"),
        ({"recipes": ["grpo", "grpo"]}, "named twice: grpo"),
        ({"recipes": ["grpo", "mine:mine"]}, "compare your own with `rollalloc compare`"),
    ],
)
def test_what_cannot_be_run_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        make_plan(**{"tier": "smoke", **options})


def test_a_frozen_plan_is_read_again_and_no_other_is_taken(tmp_path):
    plan = make_plan("smoke")
    freeze(plan, tmp_path)
    assert frozen_in(tmp_path)[0] == plan
    before = (tmp_path / PLAN).read_bytes()
    freeze(plan, tmp_path)
    assert (tmp_path / PLAN).read_bytes() == before
    [task] = plan.tasks
    for other in (
        replace(plan, tasks=(replace(task, target=0.5),)),
        replace(plan, seeds=(1, 2)),
        replace(plan, made_with=plan.made_with | {"torch": "1.0"}),
    ):
        for refuse in (freeze, refuse_another):
            with pytest.raises(ValueError, match="has another frozen plan: plan"):
                refuse(other, tmp_path)
    assert (tmp_path / PLAN).read_bytes() == before


def test_a_plan_that_is_damaged_or_of_another_version_is_refused(tmp_path):
    freeze(make_plan("smoke"), tmp_path)
    saved = json.loads((tmp_path / PLAN).read_text())
    for content, why in (("{}", "KeyError"), (json.dumps(saved | {"schema": 3}), "schema 3, expected 5")):
        (tmp_path / PLAN).write_text(content)
        with pytest.raises(ValueError, match=rf"is no plan of this version of rollalloc \(.*{why}"):
            frozen_in(tmp_path)
