"""The shape of a method has one owner, its module: every door that takes a method by name makes the same of it."""

import importlib
from types import SimpleNamespace

import pytest

from rollalloc.cli.options import RunOptions, parameters_by_label
from rollalloc.cli.sources import run_of
from rollalloc.drivers.trl.checks import check_sizes, in_shape_of
from rollalloc.drivers.verl.settings import read_settings
from rollalloc.named import RECIPES, defaults_of, make_recipe, sizes_of

ALONE = ("reinforce", "raft", "spo", "foresight")


def shape(recipe):
    return recipe.groups, [(stage.name, stage.size) for stage in recipe.stages], recipe.rows, recipe.intake


def generated(sizes):
    """Rollouts of a prompt, as verl's `rollout.n` counts them."""
    if "n" in sizes:
        return sizes["n"]
    return sizes.get("n_pilot", 0) + sizes.get("n_commit", 0) or sizes.get("sizes_S", [sum(_rows(sizes))])[-1]


def _rows(sizes):
    return sizes.get("shortest", 0), sizes.get("longest", 0)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("rows", "n"), [(64, 4), (16, 8), (96, 6)])
def test_every_door_makes_the_same_shape_of_the_same_rows(name, rows, n):
    assert_one_shape(name, rows, n)


def test_a_method_that_is_added_as_contributing_says_has_one_shape_at_every_door(files_of, monkeypatch, tmp_path):
    files_of("CONTRIBUTING.md")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(RECIPES, "brief", importlib.import_module("brief").brief)
    assert_one_shape("brief", 64, 4)
    assert_one_default("brief")


def assert_one_shape(name, rows, n):
    sizes = sizes_of(name, {}, rows, n)
    owned = shape(make_recipe(name, sizes))
    compared = parameters_by_label(None, f"groups={rows // n},n={n}", {"label": name})["label"]
    verl = read_settings({"recipe": name}, sizes["groups"], generated(sizes)).recipe
    args = SimpleNamespace(
        generation_batch_size=rows, num_generations=2 if name in ALONE else n, steps_per_generation=1,
        num_iterations=1, gradient_accumulation_steps=1,
    )  # fmt: skip
    trl = in_shape_of(args, name, {})
    check_sizes(args, trl)
    assert shape(make_recipe(name, compared)) == shape(verl) == shape(trl) == owned


@pytest.mark.parametrize("name", RECIPES)
def test_the_defaults_are_the_same_everywhere(name):
    assert_one_default(name)


def assert_one_default(name):
    """In Python, in a run from the command line, and on the page that explains the method."""
    owned = make_recipe(name, sizes_of(name, {}))
    run = run_of(RunOptions(task="sort", max_rollouts=10_000), name, {}, 0)
    assert make_recipe(run.recipe, run.parameters) == owned
    assert {key: defaults_of(name)[key] for key in sizes_of(name, {})} == sizes_of(name, {})
    if "+" not in name:
        assert RECIPES[name]() == owned


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"groups": 16, "n": 4}),
        ("reinforce", {"groups": 32, "n": 1}),
        ("pilot_commit", {"groups": 16, "n_pilot": 2, "n_commit": 2}),
        ("pods", {"groups": 16, "n": 16, "m": 4}),
        ("reinforce_ada", {"groups": 16, "n": 4, "round_n": 8}),
        ("racing", {"groups": 16, "sizes_S": (2, 4)}),
        ("dapo+pods", {"groups": 16, "n": 16, "m": 4}),
        ("pilot_commit+foresight", {"groups": 16, "n_pilot": 2, "n_commit": 2}),
    ],
)
def test_default_shapes_by_hand(name, expected):
    assert sizes_of(name, {}) == expected


@pytest.mark.parametrize(
    ("name", "group_rows", "expected"),
    [
        ("pilot_commit", 16, {"n_pilot": 4, "n_commit": 12}),  # published
        ("pods", 16, {"n": 64, "m": 16}),  # published
        ("cgrpo", 32, {"sizes_S": (2, 4, 8, 16, 32)}),  # published
        ("cgrpo", 3, {"sizes_S": (1, 3)}),
        ("racing", 16, {"sizes_S": (4, 8, 16)}),
        ("darts", 8, {"shortest": 7, "longest": 1}),
        ("darts", 1, {"shortest": 1, "longest": 0}),
        ("racing+pods", 4, {"sizes_S": (4, 8, 16), "m": 4}),
        ("pilot_commit+pods", 4, {"n_pilot": 4, "n_commit": 12, "m": 4}),
    ],
)
def test_shapes_of_larger_groups_by_hand(name, group_rows, expected):
    assert sizes_of(name, {}, 2 * group_rows, group_rows) == {"groups": 2, **expected}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("pilot_commit", {"n_pilot": 3}, {"groups": 8, "n_pilot": 3, "n_commit": 5}),
        ("pilot_commit", {"n_commit": 2, "groups": 5}, {"groups": 5, "n_pilot": 6, "n_commit": 2}),
        ("darts", {"longest": 0}, {"groups": 8, "shortest": 8, "longest": 0}),
        ("darts", {"shortest": 5}, {"groups": 8, "shortest": 5, "longest": 3}),
        ("pods", {"m": 2}, {"groups": 8, "n": 8, "m": 2}),
        ("pods", {"n": 16}, {"groups": 8, "n": 16, "m": 4}),
        ("racing", {"sizes_S": [2, 8]}, {"groups": 8, "sizes_S": [2, 8]}),
        ("reinforce", {"n": 2}, {"groups": 64, "n": 2}),
    ],
)
def test_the_other_sizes_follow_those_that_the_user_set(name, given, expected):
    assert sizes_of(name, given, 64, 8) == expected


@pytest.mark.parametrize(("rows", "group_rows"), [(0, 4), (4, 0), ("4", 4)])
def test_a_shape_of_nothing_is_refused(rows, group_rows):
    with pytest.raises(ValueError, match=r"(rows|group_rows) must be a whole number of at least 1"):
        RECIPES["grpo"].shape(rows, group_rows)


def test_a_recipe_of_ones_own_without_a_shape_takes_groups_and_n(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from rollalloc import recipes\n"
        "def one(n, groups=4): return recipes.grpo(groups, n)\n"
        "whole = recipes.grpo(2, 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert sizes_of("mine:one", {}) == {}
    assert sizes_of("mine:one", {}, 64, 8) == {"groups": 8, "n": 8}
    assert sizes_of("mine:whole", {}, 64, 8) == {}
