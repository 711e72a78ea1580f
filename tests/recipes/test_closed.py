"""Tests that a recipe is a closed value: replacing a field equals constructing the recipe with that parameter."""

# pyright: reportArgumentType=false

from dataclasses import fields, replace
from inspect import signature

import pytest

from rollalloc import recipes
from rollalloc.core.recipe import Recipe
from rollalloc.rules import judges
from rollalloc.rules.rows import Everything
from rollalloc.testing import trace

# Each recipe with every parameter, and another value for each.
MADE = {
    recipes.grpo: {
        "groups": (4, 3), "n": (4, 2), "deviation": (None, "sample"), "replay": (4, 2), "replay_staleness": (3, 20),
        "replay_moved": (0.2, None), "replay_pause": (4, 2),
    },
    recipes.reinforce: {
        "groups": (4, 3), "n": (2, 1), "baseline": ("batch", "running"), "neg": (1.0, 0.3), "replay": (4, 2),
        "replay_staleness": (3, 20), "replay_moved": (0.2, None), "replay_pause": (4, 2),
    },
    recipes.rloo: {"groups": (4, 3), "n": (4, 2)},
    recipes.dr_grpo: {"groups": (4, 3), "n": (4, 2)},
    recipes.raft: {"groups": (4, 3), "n": (2, 1)},
    recipes.mopps: {
        "groups": (4, 3), "n": (4, 2), "target": (0.5, 0.4), "decay": (0.5, 0.9), "pool": (8, 4),
    },
    recipes.spo: {
        "groups": (4, 3), "n": (2, 1), "half_way": (0.06, 0.1), "spread": (0.05, 0.1),
    },
    recipes.foresight: {
        "groups": (4, 3), "n": (2, 1), "exponent": (3.0, 1.0), "neg": (0.3, 1.0), "floor": (0.1, 0.2), "once": (False, True),
        "replay": (4, 2), "replay_staleness": (3, 20), "replay_moved": (0.2, None), "replay_pause": (4, 2),
    },
    recipes.dapo: {
        "groups": (4, 3), "n": (4, 2), "gen_groups": (12, 6), "surplus": ("discard", "carry"), "max_candidates": (None, 16),
        "deviation": (None, "sample"),
    },
    recipes.greso: {
        "groups": (4, 3), "n": (4, 2), "gen_groups": (12, 6), "zero_share": (0.25, 0.5), "max_candidates": (None, 16),
        "deviation": (None, "sample"),
    },
    recipes.knapsack: {
        "groups": (4, 3), "n": (5, 4), "least": (2, 1), "most": (16, 9), "deviation": (None, "sample"),
    },
    recipes.vcrl: {
        "groups": (4, 3), "n": (4, 2), "kappa": (0.7, 0.5), "kappa_first": (0.3, 0.2), "first": (2, 9), "replays": (2, 1),
        "max_candidates": (None, 24), "deviation": (None, "sample"),
    },
    recipes.cgrpo: {
        "groups": (4, 3), "sizes_S": ((2, 4, 8), (2, 6)), "delta": (None, 0.2), "visits": (9, 50),
        "deviation": (None, "sample"),
    },
    recipes.reinforce_ada: {
        "groups": (4, 3), "n": (4, 2), "round_n": (4, 2), "rounds": (3, 2), "stop": ("balanced", "positive"),
    },
    recipes.pilot_commit: {
        "groups": (4, 3), "n_pilot": (4, 2), "n_commit": (4, 2), "gen_groups": (12, 6), "p_lower": (0.125, 0.2),
        "p_upper": (0.25, 0.3), "p_solve": (0.95, 0.9), "max_staleness": (4, 0), "promote": ("top_variance", "oldest"),
        "pilots": ("as_needed", "every_round"), "n_effective": (2, 1),
        "effective": ("max_variance", "first"),
        "max_candidates": (None, 24), "reprobe_every": (None, 2), "confidence": (0.9, None),
        "deviation": (None, "sample"),
    },
    recipes.pods: {"groups": (4, 3), "n": (8, 6), "m": (4, 2), "rule": ("max_variance", "random")},
    recipes.darts: {
        "groups": (4, 3), "shortest": (3, 2), "longest": (1, 2), "max_redundancy": (2.0, 1.5), "tail": ("sampled", "exact"),
        "deviation": (None, "sample"), "latency": (((1, 0.5), (64, 1.0)), None), "solved": (None, 0.9), "share": (0.1, 0.5),
        "least": (None, 5), "normalise": (False, True), "longest_by": ("all", "size"),
        "lengths_of": ("all", "trained"), "unseen": ("batch", "recorded"),
    },
    recipes.racing: {
        "groups": (4, 3), "sizes_S": ((4, 8), (2, 8)), "gen_groups": (12, 6), "max_staleness": (0, 4),
        "deviation": (None, "sample"),
    },
}  # fmt: skip
# Not a number of the recipe, but which method it is: what it draws, its baseline and what is made of it belong together.
METHODS = {(recipes.reinforce, "baseline")}
OF_THREE_RULES = {(recipes.darts, "longest"), (recipes.darts, "longest_by")}  # the core knows no longest rows
WITHOUT_LATENCY = {(recipes.darts, "lengths_of"), (recipes.darts, "unseen")}  # the values here have one
CASES = [
    (make, name)
    for make, values in MADE.items()
    for name in values
    if (make, name) not in METHODS | OF_THREE_RULES | WITHOUT_LATENCY
]


def test_every_parameter_is_tried():
    for make, values in MADE.items():
        assert list(values) == list(signature(make).parameters), make


@pytest.mark.parametrize(("make", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_parameter_stands_in_one_field_and_replacing_it_is_constructing_the_recipe(make, name):
    before = {key: values[0] for key, values in MADE[make].items()}
    one, other = make(**before), make(**before | {name: MADE[make][name][1]})
    differ = [field.name for field in fields(Recipe) if getattr(one, field.name) != getattr(other, field.name)]
    assert len(differ) == 1
    replaced = replace(one, **{differ[0]: getattr(other, differ[0])})
    assert replaced == other
    assert replaced.description == other.description
    assert repr(replaced) == repr(other)


def test_the_rows_of_darts_say_how_many_are_ordered_and_stopped():
    one, other = (recipes.darts(4, shortest, 1, tail="sampled") for shortest in (3, 7))
    assert trace(replace(one, rows=other.rows), 64, 3) == trace(other, 64, 3) != trace(one, 64, 3)


@pytest.mark.parametrize("tail", ["exact", "sampled"])
def test_a_recipe_whose_rules_read_rows_that_none_says_is_refused(tail):
    with pytest.raises(
        ValueError,
        match=r"Redundant\(.* reads the number of rows per group, but Everything\(\) does not declare it; use",
    ):
        replace(recipes.darts(4, 3, 1, tail=tail), rows=Everything())


def test_a_rule_of_a_stage_is_replaced_by_its_name():
    plain, judge = recipes.dapo(groups=4, n=8, gen_groups=12), judges.Complete()
    assert plain.replace(judge=judge, groups=2) == replace(
        plain, groups=2, stages=(replace(plain.stages[0], judge=judge),)
    )
    staged = recipes.pilot_commit(groups=2, n_pilot=2, n_commit=2, gen_groups=4)
    assert staged.replace(stage="commit", judge=judge).stages == (
        staged.stages[0],
        replace(staged.stages[1], judge=judge),
    )
    assert staged.replace(max_staleness=0) == replace(staged, max_staleness=0)
    for wrong in ({"judge": judge}, {"judge": judge, "stage": "comit"}):
        with pytest.raises(ValueError, match="stage must be one of 'pilot', 'commit', got"):
            staged.replace(**wrong)
    with pytest.raises(
        TypeError, match=r"a recipe has no 'juge'; it has groups, .* its stages size, judge, stop, promote"
    ):
        plain.replace(juge=judge)
