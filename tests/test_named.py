"""Recipes by name."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import inspect
from itertools import combinations, product

import pytest

from rollalloc import Allocator, recipes
from rollalloc.named import RECIPES, group_size, in_shape, make_recipe, parameters_of, sizes_of, standard

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
        "retire_at",
        "retire_for",
        "limit_at",
    )


@pytest.mark.parametrize("name", ["pilot_commit+pods", " pilot_commit + pods", "pods+pilot_commit"])
def test_where_stages_say_how_many_rollouts_there_are_n_may_be_left_out(name):
    mixed = recipes.mix(recipes.pilot_commit(**COMMIT, p_lower=0.1), recipes.pods(4, n=4, m=2))
    given = COMMIT | {"m": 2, "p_lower": 0.1}
    assert make_recipe(name, given) == make_recipe(name, given | {"n": 4}) == mixed
    assert RECIPES["pilot_commit+pods"](**given) == mixed
    assert standard(name) == "pilot_commit+pods"
    with pytest.raises(ValueError, match="its stages give a group 4 rollouts, but n is 5; leave n out"):
        make_recipe(name, given | {"n": 5})
    with pytest.raises(ValueError, match="n_pilot must be a whole number"):
        make_recipe(name, given | {"n_pilot": "2"})
    assert group_size("racing+pods", {"sizes_S": [2, 6]}) == 6
    assert group_size("grpo", {"n": 4}) is None


def test_joined_names_take_the_parameters_of_both_in_either_order():
    joined = 0
    for first, second in combinations([name for name in RECIPES if "+" not in name], 2):
        names = (f"{first}+{second}", f"{second}+{first}")
        both = {*parameters_of(first), *parameters_of(second)}
        assert [set(parameters_of(name)) for name in names] == [both, both], names
        given = sizes_of(first, {}, 16, 4) | sizes_of(second, {}, 16, 4) | {"groups": 4, "gen_groups": 12}
        given = {key: value for key, value in given.items() if key in both}
        if group_size(names[0], given) is not None:
            del given["n"]
        made = [made_or_not(name, given) for name in names]
        assert made[0] == made[1], names
        joined += made[0] is not None
    assert joined > 90  # of all pairs, most can be mixed


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("racing", {"sizes_S": 4}, r"racing: sizes_S must be a list of whole numbers, e.g. sizes_S=\[4,8\], got 4"),
        ("racing", {"sizes_S": None}, "sizes_S must be a list of whole numbers"),
        ("racing", {"sizes_S": [2, "4"]}, "sizes_S must be a list of whole numbers"),
        ("racing", {"sizes_S": [2, 4.5]}, "sizes_S must be a list of whole numbers"),
        ("racing", {"sizes_S": []}, "sizes_S must be increasing"),
        ("pilot_commit", {"n_pilot": 2, "n_commit": 2, "p_lower": "low"}, "p_lower must be a number, got 'low'"),
        ("pilot_commit", {"n_pilot": 2, "n_commit": 2, "p_solve": None}, "p_solve must be a number, got None"),
        ("pilot_commit", {"n_pilot": [2], "n_commit": 2}, "n_pilot must be a whole number"),
        ("cgrpo", {"delta": "x"}, "cgrpo: delta must be a number, or null, got 'x'"),
        ("cgrpo", {"delta": True}, "cgrpo: delta must be a number, or null, got True"),
        ("foresight", {"exponent": [2]}, r"foresight: exponent must be a number, or null, got \[2\]"),
        ("grpo", {"n": 2, "deviation": []}, r"deviation must be population, sample or None .*, got \[\]"),
        ("reinforce_ada", {"n": 2, "rounds": 10**30}, "rounds must be at most 1000, because each is a stage"),
        ("dapo", {"n": 2, "surplus": 3}, "surplus must be one of discard, carry, got 3"),
        ("darts", {"shortest": 2, "longest": 1, "max_redundancy": True}, "max_redundancy must be a number"),
    ],
)
def test_a_parameter_of_the_wrong_kind_is_said_by_name(name, parameters, message):
    takes = parameters_of(name)
    with pytest.raises(ValueError, match=message):
        make_recipe(name, {key: 4 for key in ("groups", "gen_groups") if key in takes} | parameters)


JUNK = ["four", "", [], {}, 2.5, True, float("nan")]


@pytest.mark.parametrize("name", [name for name in RECIPES if "+" not in name])
def test_a_parameter_of_any_recipe_that_makes_no_sense_is_a_clear_error_that_names_it(name):
    """By name, by name in a framework's shape, and called."""
    makers = (
        lambda given: make_recipe(name, given),
        lambda given: in_shape(name, given, 32, 8),
        lambda given: RECIPES[name](**given),
        lambda given: make_recipe(f"{name}+reinforce", given),
    )
    for key, value in product(inspect.signature(RECIPES[name]).parameters, JUNK):
        for make in makers:
            error = refusal(make, {key: value})
            assert error is not None or value in (2.5, True)
            assert error is None or key in error or "both recipes change" in error, (key, value, error)


def refusal(make, given):
    try:
        make(given)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("diversity_threshold_upper", "p_upper"),
        ("diversity_threshold_lower", "p_lower"),
        ("exclude_threshold_upper", "p_solve"),
        ("buffer_max_off_steps", "max_staleness"),
        ("buffer_sampling_method", "promote"),
        ("gen_batch_size", "gen_groups"),
        ("max_num_gen_batches", "max_candidates"),
    ],
)
def test_a_parameter_by_its_released_name_gets_ours(given, named):
    with pytest.raises(ValueError, match=rf"no parameter '{given}' \('{named}' is our name for it\)"):
        make_recipe("pilot_commit", {given: 1})
    with pytest.raises(ValueError, match=rf"no parameter 'algorithm.{given}' \('{named}' is our name for it\)"):
        make_recipe("pilot_commit", {f"algorithm.{given}": 1})


def made_or_not(name, parameters):
    try:
        return make_recipe(name, parameters)
    except ValueError:  # both change the same part of a recipe
        return None


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("grop", {}, r"unknown recipe 'grop' \(did you mean 'grpo'\?\); there are grpo, dr_grpo, reinforce"),
        ("zzz", {}, r"unknown recipe 'zzz'; there are .*module:object"),
        (
            "grpo",
            {"group": 3, "n": 2},
            r"grpo has no parameter 'group' \(did you mean 'groups'\?\); it takes groups, n",
        ),
        ("dapo+pods", {"mm": 4}, r"dapo\+pods has no parameter 'mm' .did you mean 'm'"),
        ("GRPO", {}, r"unknown recipe 'GRPO' .did you mean 'grpo'"),
        ("cgrpo", {"sizes_s": 4}, r"cgrpo has no parameter 'sizes_s' .did you mean 'sizes_S'"),
        ("dapo+podz", {}, r"unknown recipe 'podz' .did you mean 'pods'"),
        (":", {}, "expected package.module:object"),
        ("my_recipe.py:make", {}, "No module named 'my_recipe'; install it, or run from the folder that holds it"),
        ("a b:make", {}, "expected package.module:object"),
        ("os:nope", {}, "has no attribute 'nope'; check the name after the colon"),
        ("builtins:dict", {}, "expected a Recipe or a function that returns one"),
        ("grpo", {"groups": "many", "n": 2}, r"groups must be .*'many'"),
    ],
)
def test_recipes_that_cannot_be_made_say_why(name, parameters, message):
    with pytest.raises((ValueError, ImportError, AttributeError), match=message):
        make_recipe(name, parameters)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "recipes_of_mine.py").write_text(
        "from rollalloc import recipes\n"
        "plain = recipes.grpo(2, 2)\n"
        "number = 3\n"
        "def mine(n, groups=4): return recipes.grpo(groups, n)\n"
        "def wrong(): return 'grpo'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "recipes_of_mine"


def test_a_recipe_of_ones_own_is_module_and_object(module):
    assert make_recipe(f"{module}:plain", {}) == recipes.grpo(2, 2)
    assert make_recipe(f"{module}:mine", {"n": 3}) == recipes.grpo(4, 3)


@pytest.mark.parametrize(
    ("name", "parameters", "error", "message"),
    [
        ("plain", {"n": 3}, ValueError, "it is a recipe, which takes none"),
        ("mine", {}, ValueError, "needs n; it takes n, groups"),
        ("mine", {"m": 1}, ValueError, "has no parameter 'm'"),
        ("number", {}, ValueError, "must be a Recipe or a function that returns one, got 3"),
        ("wrong", {}, ValueError, "must return a Recipe, got 'grpo'"),
        ("nobody", {}, AttributeError, "nobody"),
    ],
)
def test_a_recipe_of_ones_own_that_is_none_says_why(module, name, parameters, error, message):
    with pytest.raises(error, match=message):
        make_recipe(f"{module}:{name}", parameters)


# ---------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("groups", "n"), [(1, 8), (4, 16), (3, 4)])
def test_a_recipe_by_name_takes_the_shape_of_a_frameworks_batch(name, groups, n):
    recipe = in_shape(name, {}, groups * n, n)
    alone = name in ("reinforce", "raft", "spo", "foresight")
    assert (recipe.groups, rows_of_a_group(recipe)) == ((groups * n, 1) if alone else (groups, n))


@pytest.mark.parametrize(("n", "pilots"), [(3, 2), (4, 2), (8, 2), (16, 4)])
def test_pilot_commit_has_two_pilots_at_least(n, pilots):
    """The mean of one pilot is 0 or 1, never in the window: nothing would be trained on."""
    pilot, commit = in_shape("pilot_commit", {}, 4 * n, n).stages
    assert (pilot.size.n, commit.size.n) == (pilots, n - pilots)


def test_pilot_commit_refuses_groups_too_small_for_two_pilots():
    with pytest.raises(ValueError, match="at least 3 rollouts in a group, two pilots and one more, got 2"):
        in_shape("pilot_commit", {}, 8, 2)


def rows_of_a_group(recipe):
    if recipe.group_rows is not None:
        return recipe.group_rows
    return sum(getattr(stage.size, "n", None) or stage.size.mean_n for stage in recipe.stages)  # Knapsack's is a mean


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            recipes.pilot_commit,
            r"recipe must be a rollalloc Recipe, .*function; call it: recipe=pilot_commit\(\.\.\.\)",
        ),
        (
            "pilot_commit",
            r"got 'pilot_commit' of type str; rollalloc.named.make_recipe\(name\) returns a recipe by its name",
        ),
        (None, "got None of type NoneType$"),
        ({"groups": 4}, "of type dict$"),
    ],
)
def test_a_value_that_is_no_recipe_is_refused(wrong, message):
    with pytest.raises(TypeError, match=message):
        Allocator(wrong, 20, 0)
