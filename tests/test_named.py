"""Recipes by name."""

import pytest

from rollalloc import recipes
from rollalloc.named import make_recipe, parameters_of

COMMIT = {"groups": 4, "n_pilot": 2, "n_commit": 2, "gen_groups": 12}


def test_names_joined_by_plus_are_mixed_and_each_takes_what_it_knows():
    mixed = make_recipe("dapo+pods", {"groups": 4, "n": 8, "gen_groups": 12, "m": 4})
    assert mixed == recipes.mix(recipes.dapo(4, 8, 12), recipes.pods(4, 8, 4))
    assert parameters_of("dapo+pods") == (
        "groups",
        "n",
        "gen_groups",
        "surplus",
        "max_candidates",
        "deviation",
        "m",
        "rule",
    )


@pytest.mark.parametrize("name", ["pilot_commit+pods", " pilot_commit + pods"])
def test_a_mixture_with_a_name_of_its_own_asks_for_less(name):
    assert make_recipe(name, COMMIT | {"m": 2}) == recipes.mix(
        recipes.pilot_commit(**COMMIT), recipes.pods(4, n=4, m=2)
    )


@pytest.mark.parametrize("rule", ["max_variance", "max_reward", "random", "percentile"])
def test_pods_rule_is_named_alone_and_in_a_mixture(rule):
    chosen = recipes.pods(4, 4, 2, rule)
    assert make_recipe("pods", {"groups": 4, "n": 4, "m": 2, "rule": rule}) == chosen
    mixed = make_recipe("pilot_commit+pods", COMMIT | {"m": 2, "rule": rule})
    assert mixed == recipes.mix(recipes.pilot_commit(**COMMIT), chosen)


def test_a_part_that_lacks_something_or_is_unknown_is_named():
    with pytest.raises(ValueError, match="pods needs m"):
        make_recipe("dapo+pods", {"groups": 4, "n": 8, "gen_groups": 12})
    with pytest.raises(ValueError, match=r"unknown recipe 'podz' .did you mean 'pods'"):
        make_recipe("dapo+podz", {})
