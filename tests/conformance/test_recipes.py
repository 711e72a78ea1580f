"""Every recipe through the conformance kit, and the kit through its mutants."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from rollalloc import PromptTable, recipes
from rollalloc.rules import prompts, rows
from rollalloc.testing import ConformanceError, check_recipe, trace

PC = recipes.pilot_commit(4, 4, 4, 12)
RECIPES = {
    "grpo": recipes.grpo(4, 4),
    "dapo": recipes.dapo(4, 4, 12),
    "dapo_carry": recipes.dapo(4, 4, 12, "carry"),
    "dapo_max_candidates": recipes.dapo(4, 4, 12, max_candidates=16),
    "pilot_commit": PC,
    "pilot_commit_random": recipes.pilot_commit(4, 4, 4, 12, promote="random"),
    "pilot_commit_oldest": recipes.pilot_commit(4, 4, 4, 12, promote="oldest", max_candidates=24),
    "pilot_commit_fresh": recipes.pilot_commit(4, 4, 4, 12, max_staleness=0),
    "pilot_commit_fresh_random": recipes.pilot_commit(4, 4, 4, 12, max_staleness=0, promote="random"),
    "pilot_commit_one_step_old": recipes.pilot_commit(4, 4, 4, 12, max_staleness=1),
    "pilot_commit_reprobe": recipes.pilot_commit(4, 4, 4, 8, reprobe_every=2),
    "pods": recipes.pods(4, 8, 4),
    "pods_max_reward": replace(recipes.pods(4, 8, 4), rows=rows.MaxReward(4)),
    "pods_random": replace(recipes.pods(4, 8, 4), rows=rows.Random(4)),
    "pods_percentile": replace(recipes.pods(4, 8, 4), rows=rows.Percentile(4)),
    "darts_exact": recipes.darts(4, 3, 1),
    "darts_sampled": recipes.darts(4, 3, 1, tail="sampled"),
    "darts_none": recipes.darts(4, 3, 1, tail="none"),
    "pilot_commit_and_pods": recipes.mix(PC, recipes.pods(4, 8, 4)),
    "dapo_and_darts": recipes.mix(recipes.dapo(4, 4, 12), recipes.darts(4, 3, 1)),
    "dapo_and_darts_sampled": recipes.mix(recipes.dapo(4, 4, 12), recipes.darts(4, 3, 1, tail="sampled")),
    "racing": recipes.racing(4, (4, 8, 16), 12),
    "racing_stale": recipes.racing(4, (4, 8, 16), 12, 4),
    "posterior_and_pilot_commit": replace(PC, prompts=prompts.Posterior()),
    "offered": replace(recipes.grpo(4, 4), prompts=prompts.AsOffered()),
    "offered_pilot_commit": replace(PC, prompts=prompts.AsOffered()),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_law_holds(name):
    check_recipe(RECIPES[name])


TRACED = ("grpo", "dapo_carry", "pilot_commit_random", "darts_sampled", "racing_stale", "posterior_and_pilot_commit")


def test_law_6_the_same_actions_under_any_hash_seed():
    """And in every process: nothing depends on the order of a set, an address, or the clock."""
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_recipes import RECIPES, TRACED\n"
        "from rollalloc.testing import trace\n"
        "print([trace(RECIPES[name], 64, 3) for name in TRACED])"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert digests == {f"{[trace(RECIPES[name], 64, 3) for name in TRACED]}\n"}


def test_another_seed_gives_other_actions():
    assert len({trace(RECIPES["grpo"], 64, seed) for seed in range(4)}) == 4


def test_mix_takes_the_rows_and_the_advantage_of_the_second():
    mixed, pods = RECIPES["pilot_commit_and_pods"], RECIPES["pods"]
    assert (mixed.rows, mixed.advantage, mixed.stages, mixed.max_staleness) == (pods.rows, pods.advantage, PC.stages, 4)


def test_a_prompt_table_with_sources_and_priors_is_no_obstacle():
    table = PromptTable([f"p{i}" for i in range(96)], source_N=[i % 2 for i in range(96)], prior_N=[0.5] * 96)
    for rule in (prompts.Shuffled((3.0, 1.0)), prompts.Posterior()):
        assert trace(replace(PC, prompts=rule), table, 0) == trace(replace(PC, prompts=rule), table, 0)
