"""Saving and loading: complete, exact, refused with the difference named, and moved to a data set that changed."""

import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from rollalloc import Allocator, Budget, PromptTable, recipes
from rollalloc.core.events import Cancelled, Done, Updated
from rollalloc.core.packing import pack, pack_tree, unpack, unpack_tree
from rollalloc.recipes.mopps import Posterior
from rollalloc.rules import prompts

PC = recipes.pilot_commit(2, 2, 2, 6, p_lower=0.0)
ALL = {
    "grpo": recipes.grpo(2, 3),
    "dapo": recipes.dapo(2, 3, 4),
    "carry": recipes.dapo(2, 3, 4, "carry"),
    "pilot_commit": PC,
    "reprobe": recipes.pilot_commit(2, 2, 2, 6, reprobe_every=1, promote="random"),
    "pods": recipes.pods(2, 4, 2),
    "darts": recipes.darts(2, 2, 1, tail="sampled"),
    "racing": recipes.racing(2, (2, 4, 6), 4, 2),
    "posterior": replace(PC, prompts=Posterior()),
}
KEYS = tuple(f"prompt {index}" for index in range(12))


def copy_of(allocator, recipe=None, prompts=None, **how):
    """A new allocator after a passage through JSON."""
    copy = Allocator(recipe or allocator.recipe, prompts or allocator.table, allocator.seed)
    copy.load_state_dict(json.loads(json.dumps(allocator.state_dict())), **how)
    return copy


def step(allocator, rng, capacity=7):
    """One turn of an asynchronous driver that answers some of what is outstanding; returns the actions."""
    actions = allocator.ask(capacity)
    running = [r for order in allocator.outstanding().generate for r in order.rollouts] + list(
        allocator.outstanding().cancel
    )
    ended = [r for r in sorted(running) if rng.random() < 0.6]
    allocator.tell([Done(r, (r * 7) % 3 / 2, float((r * 5) % 3 > 0), 3 + r % 11, allocator.version) for r in ended])
    if allocator.outstanding().batch and rng.random() < 0.7:
        allocator.tell([Updated(allocator.version + 1)])
    return actions


def run(allocator, steps, seed=0):
    rng = np.random.default_rng(seed)
    return [step(allocator, rng) for _ in range(steps)]


# ------------------------------------------------------------------------------------------------- complete and exact


def test_a_saved_state_does_not_change_with_what_is_told_later():
    """E.g. while another thread writes it to disk."""
    allocator = Allocator(recipes.darts(2, 2, 0, tail="none"), 6, 0)
    orders = allocator.ask().generate
    state = allocator.state_dict()
    before = json.dumps(state)
    allocator.tell([Cancelled(rollout, 1) for order in orders for rollout in order.rollouts])
    assert json.dumps(state) == before


def test_a_loaded_state_is_not_changed_by_the_run_that_goes_on():
    allocator = Allocator(PC, 12, 0)
    run(allocator, 5)
    state = json.loads(json.dumps(allocator.state_dict()))
    before = deepcopy(state)
    copy = Allocator(PC, 12, 0)
    copy.load_state_dict(state)
    run(copy, 10)
    assert state == before


@pytest.mark.parametrize(
    "array", [np.arange(3, dtype=np.int32), np.zeros((2, 0)), np.array(2.5), np.array([True, False]), np.arange(4)[::2]]
)
def test_pack_and_unpack_are_inverse(array):
    packed = json.loads(json.dumps(pack(array)))
    back = unpack(packed)
    assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
    assert back.flags.writeable
    assert unpack_tree(pack_tree({"a": [array]}))["a"][0].tolist() == array.tolist()


@pytest.mark.parametrize(("name", "most"), [("grpo", 69), ("pilot_commit", 75)])  # 6 more for evidence that evicts
def test_a_saved_state_takes_few_bytes_for_each_prompt(name, most):
    count = 100_000
    allocator = Allocator(ALL[name], PromptTable([str(index) for index in range(count)]), 0)
    allocator.ask()
    assert len(json.dumps(allocator.state_dict())) <= most * count


# ---------------------------------------------------------------------------------------------------------- refusals


def refuse(state, message, recipe=PC, prompts=12, seed=0, **how):
    """The state is refused, and the allocator is as it was."""
    allocator = Allocator(recipe, prompts, seed)
    run(allocator, 6)
    before = allocator.state_dict()
    with pytest.raises(ValueError, match=message):
        allocator.load_state_dict(state, **how)
    assert allocator.state_dict() == before
    run(allocator, 2)


@pytest.fixture
def saved():
    allocator = Allocator(PC, 12, 0)
    run(allocator, 5)
    return json.loads(json.dumps(allocator.state_dict()))


@pytest.mark.parametrize(
    "path", [(), ("statistics",), ("pool",), ("budgets",), ("accounts",), ("statistics", "attempts_N")], ids="/".join
)
def test_keys_are_exact_at_every_level(saved, path):
    for change in ("missing", "unknown"):
        state = deepcopy(saved)
        part = state
        for key in path:
            part = part[key]
        if change == "missing":
            named = next(iter(part))
            del part[named]
        else:
            named = "surprise"
            part[named] = 1
        refuse(state, rf"{change} keys \['{named}'\]")


def test_another_schema_or_seed_is_refused(saved):
    refuse(saved | {"schema": 99}, "expected schema 20, got 99; resume with the version of rollalloc that saved it$")
    refuse(saved, "saved with seed 0, got seed 5; construct the allocator with the saved seed", seed=5)


@pytest.mark.parametrize("keep", [8, 7, 5])
def test_a_torn_array_is_refused(saved, keep):
    corrupt = saved["statistics"]["successes_N"]
    corrupt["base64"] = corrupt["base64"][:keep]
    refuse(saved, "packed array of <f8 cannot be read, .*; the state is corrupt")
    corrupt["base64"] = pack(np.zeros(5))["base64"]
    refuse(saved, r"packed array has 5 entries for shape \[12\]; the state is corrupt")


def test_an_array_of_objects_is_refused(saved):
    saved["statistics"]["successes_N"]["dtype"] = "|O"
    refuse(saved, "a packed array must contain plain numbers")


@pytest.mark.parametrize(
    ("recipe", "path"),
    [
        (replace(PC, groups=3), "recipe.groups: saved 2, given 3"),
        (recipes.pilot_commit(2, 2, 3, 6, p_lower=0.0), r"recipe.stages\[1\].size.n: saved 2, given 3"),
        (recipes.pilot_commit(2, 2, 2, 6), r"recipe.stages\[0\].judge.p_lower: saved 0.0, given 0.125"),
        (replace(PC, budget=Budget(run_rollouts=9)), "recipe.budget.run_rollouts: saved None, given 9"),
        (recipes.grpo(2, 2), "recipe.stages: saved "),
    ],
)
def test_another_recipe_is_refused_and_the_field_named(saved, recipe, path):
    what = "budget" if "budget" in path else "recipe"
    refuse(saved, rf"another {what} \(accept_recipe=True continues with the new recipe\): .*{path}", recipe)


def test_another_data_set_is_refused(saved):
    refuse(saved, "the state was saved for 12 prompts, this data set has 13 or other keys; remap", prompts=13)
    refuse(saved, "the state was saved for 12 prompts, this data set has 12 or other keys", prompts=PromptTable(KEYS))


@pytest.mark.parametrize("remap", ["keys", "names", [0] * 12, [0, 1], list(range(1, 13))])
def test_an_invalid_remap_is_refused(saved, remap):
    refuse(saved, "remap must", remap=remap)


# ----------------------------------------------------------------------------------------------------- another recipe


def test_an_accepted_recipe_goes_on_from_the_state():
    allocator = Allocator(PC, 12, 0)
    run(allocator, 5)
    copy = copy_of(allocator, recipes.pilot_commit(2, 2, 4, 6), accept_recipe=True)
    assert copy.paid == allocator.paid
    assert {len(o.rollouts) for a in run(copy, 20) for o in a.generate if o.stage == 1} <= {1, 2, 3, 4}
    assert sum(copy.accounts().values()) == copy.paid


def test_a_recipe_with_less_staleness_drops_groups_that_are_too_old_for_it_and_fills_its_batch(drive):
    """One of the first three groups is trained on in each of two batches; at version 2, the third is too old."""
    old = drive(recipes.dapo(1, 2, 3, "carry").replace(max_staleness=3), 12)
    for _ in range(2):
        old.until_batch()
        old.update()
    less = drive(old.allocator.recipe.replace(max_staleness=1), 12)
    less.allocator.load_state_dict(old.allocator.state_dict(), accept_recipe=True)
    assert {row.version for row in less.until_batch().batch.rows} == {2}
    assert less.allocator.accounts()["stale"] == 2


def test_groups_in_flight_do_not_fit_a_recipe_with_other_stages(saved):
    refuse(
        saved,
        "groups are in flight under a recipe with 2 stages, but this recipe has 1; finish",
        recipes.grpo(2, 2),
        accept_recipe=True,
    )


@pytest.mark.parametrize(
    ("before", "after"), [(prompts.InOrder(), prompts.Shuffled()), (Posterior(), prompts.Shuffled())]
)
def test_a_prompt_rule_whose_memory_has_another_shape_begins_afresh(before, after):
    allocator = Allocator(replace(PC, prompts=before), 12, 0)
    run(allocator, 5)
    copy = copy_of(allocator, replace(PC, prompts=after), PromptTable(12), accept_recipe=True)
    run(copy, 20)
    assert sum(copy.accounts().values()) == copy.paid


# --------------------------------------------------------------------------------------------------- another data set


def in_flight(allocator):
    """Prompt of every group in flight, by what the allocator repeats."""
    return {order.group: order.prompt for order in allocator.outstanding().generate}


def test_remap_by_keys_moves_the_records_and_finds_new_and_lost_prompts():
    allocator = Allocator(PC, PromptTable(KEYS), 0)
    run(allocator, 12)
    keys = ("new", *KEYS[6:], *KEYS[:4], "also new")  # 4 and 5 are lost
    copy = copy_of(allocator, prompts=PromptTable(keys), remap="keys")
    for index, key in enumerate(keys):
        old = allocator.statistics.record(KEYS.index(key)) if key in KEYS else None
        new = copy.statistics.record(index)
        if old is None:
            assert (new.attempts, new.fate, new.version) == (0, "new", -1)
        else:
            assert repr(new) == repr(old)
    lost = [index for index, key in enumerate(KEYS) if key not in keys]
    assert lost == [4, 5]
    assert in_flight(copy) == {
        group: keys.index(KEYS[prompt]) for group, prompt in in_flight(allocator).items() if prompt not in lost
    }


@pytest.mark.parametrize("name", ALL)
def test_remap_keeps_the_counts_and_the_run_goes_on(name):
    allocator = Allocator(ALL[name], PromptTable(KEYS), 0)
    run(allocator, 9)
    lost = sorted(set(in_flight(allocator).values()))[:1]  # one that is surely in flight, if any is
    keys = (*reversed([key for index, key in enumerate(KEYS) if index not in lost]), "new")
    copy = copy_of(allocator, prompts=PromptTable(keys), remap="keys")
    assert copy.paid == allocator.paid == sum(copy.accounts().values())
    by_indices = Allocator(ALL[name], PromptTable(keys), 0)
    source_N = [KEYS.index(key) if key in KEYS else -1 for key in keys]
    by_indices.load_state_dict(allocator.state_dict(), remap=source_N)
    assert by_indices.state_dict() == copy.state_dict()
    actions = run(copy, 40)
    assert sum(copy.accounts().values()) == copy.paid
    assert any(a.batch for a in actions)
    assert {order.prompt for a in actions for order in a.generate} <= set(range(len(keys)))
    released = [rollout for a in actions for rollout in a.release]
    assert len(released) == len(set(released))


def test_groups_in_flight_of_lost_prompts_are_dropped_and_their_rollouts_cancelled():
    allocator = Allocator(recipes.grpo(2, 3), PromptTable(KEYS[:3]), 0)
    first, second = allocator.ask().generate
    allocator.tell([Done(first.rollouts[0], 1, 1, 5, 0)])
    kept = [key for index, key in enumerate(KEYS[:3]) if index != first.prompt]
    copy = copy_of(allocator, prompts=PromptTable(kept), remap="keys")
    assert [order.group for order in copy.outstanding().generate] == [second.group]
    actions = copy.ask()
    assert set(actions.cancel) == set(first.rollouts[1:])
    assert actions.release == first.rollouts[:1]
    copy.tell([Cancelled(rollout, 2) for rollout in actions.cancel])
    accounts = copy.accounts()
    assert (accounts["surplus"], accounts["cancelled"]) == (1, 2)
    assert sum(accounts.values()) == copy.paid


def test_a_run_that_had_used_up_its_prompts_goes_on_with_new_ones(drive):
    old = drive(recipes.grpo(1, 2), PromptTable(("a", "b")), default=(None,))
    assert old.until_end().startswith("prompts: none of 2 may be drawn, 0 are evicted and 2 quarantined")
    assert old.allocator.paid == 2 * 3 * 2  # three failed visits of each
    same = copy_of(old.allocator)
    assert same.ask().finished == old.allocator.ask().finished
    more = drive(recipes.grpo(1, 2), PromptTable(("a", "c", "b")))
    more.allocator.load_state_dict(old.allocator.state_dict(), remap="keys")
    assert {row.prompt for row in more.until_batch().batch.rows} == {1}


def test_a_run_that_was_given_up_goes_on_with_other_prompts(drive):
    old = drive(recipes.dapo(1, 2, 8), PromptTable(tuple(f"old {number}" for number in range(20))), default=(0.0,))
    assert old.until_end().startswith("barren")
    more = drive(recipes.dapo(1, 2, 8), PromptTable(tuple(f"new {number}" for number in range(20))))
    more.allocator.load_state_dict(old.allocator.state_dict(), remap="keys")
    assert more.until_batch().batch is not None


def test_a_smaller_budget_on_loading_withholds_what_was_decided_and_not_ordered():
    allocator = Allocator(recipes.grpo(2, 3), 12, 0)
    assert len(allocator.ask(2).generate[0].rollouts) == 2
    copy = copy_of(allocator, replace(recipes.grpo(2, 3), budget=Budget(run_rollouts=3)), accept_recipe=True)
    assert copy.ask().generate == ()
    copy.tell([Done(0, 1, 1, 1, 0), Done(1, 0, 0, 1, 0)])
    batch = copy.ask().batch
    assert [row.rollout for row in batch.rows] == [0, 1]
    assert batch.short_because.startswith("the budget of ")
    assert copy.paid == sum(copy.accounts().values()) == 2


# ------------------------------------------------------------------------------------------------- states of odd shape

JUNK = (None, True, -1, 3, 10**30, 1.5, float("nan"), "", "x", [], [1], [[1, 2]], {}, {"a": 1}, [None], "99")


def places(state, path=()):
    """The path of everything in a state."""
    yield path
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def put(state, path, value):
    """The state with another value at a path."""
    if not path:
        return value
    state = deepcopy(state)
    part = state
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return state


def test_a_state_of_odd_shape_is_refused_with_its_place_or_makes_a_sound_run(saved):
    """Whatever stands anywhere in a state, loading it says so in one error, or the run that it gives keeps its books."""
    rng = np.random.default_rng(0)
    everywhere = list(places(saved))
    refused = 0
    for path in (everywhere[at] for at in rng.integers(len(everywhere), size=400)):
        junk = JUNK[rng.integers(len(JUNK))]
        allocator = Allocator(PC, 12, 0)
        before = allocator.state_dict()
        try:
            allocator.load_state_dict(put(saved, path, junk))
        except ValueError as error:
            said = str(error)
            refused += 1
        else:
            said = None
            assert sum(allocator.accounts().values()) == allocator.paid
        assert said is None or said.startswith("allocator state"), path
        assert said is None or allocator.state_dict() == before, path
    assert refused > 300


@pytest.mark.parametrize(
    ("path", "junk", "message"),
    [
        ((), None, "allocator state: keys: expected a dictionary, got NoneType"),
        (("budgets", "paid"), "7", "allocator state: budgets, paid: expected a whole number of 0 or more, got '7'"),
        (
            ("budgets", "owed"),
            10**6,
            "rollouts were paid and 1000000 are owed, but .* are accounted for; the state is corrupt",
        ),
        (
            ("statistics", "tokens_N", "shape"),
            [1],
            r"statistics, tokens_N: packed array has 12 entries for shape \[1\]",
        ),
        (("statistics", "fates"), ["new"], "statistics, fate_N: index . of 1 fates"),
        (
            ("pool", "due_N"),
            pack(np.zeros(1, np.int32)),
            r"pool, due_N: expected int32 for 12 prompts, got .* \(1,\)",
        ),
        (("groups",), [{}], r"allocator state: groups\[0\]: group: missing keys"),
        (("groups", 0, "phase"), "asleep", r"allocator state: groups\[0\]: 'asleep' is not a valid Phase"),
        (("groups", 0, "stage"), 5, r"allocator state: groups\[0\]: .* got stage 5"),
        (("memory", "cursors"), pack(np.zeros(7)), "allocator state: memory: expected .* got .*; the state is corrupt"),
        (("touched",), [99], r"allocator state cannot be read \(KeyError: 99\)"),
    ],
)
def test_an_error_while_loading_names_its_place(saved, path, junk, message):
    refuse(put(saved, path, junk), message)


@pytest.mark.parametrize(
    ("recipe", "name", "corrupt"),
    [
        *((recipes.greso(2, 2, 4), name, corrupt)
          for name in ("cursor", "pass", "version", "solved", "failed", "mixed") for corrupt in ("x", None, -5, 0.5)),
        (recipes.greso(2, 2, 4), "cursor", 10**9),  # it would say that no prompt may be drawn
        *((recipes.greso(2, 2, 4), name, corrupt)
          for name in ("p_solved", "p_failed") for corrupt in ("x", None, float("nan"), 1.0, 0.01)),
        *((recipes.vcrl(2, 2), "bank", corrupt)
          for corrupt in ("x", None, {}, [3], [[0, 0.5]], [[12, 0.5, 1]], [[-1, 0.5, 1]], [[0, float("nan"), 1]],
                       [[0, 1.5, 1]], [[0, 0.5, -1]], [[0, 0.5, 1], [0, 0.4, 1]])),
        (recipes.vcrl(2, 2), "new", None),
        *((recipes.cgrpo(2, (1, 2)), "places", corrupt) for corrupt in ("x", None, 3, ["a"], [-1], [0.5])),
    ],
)  # fmt: skip
def test_an_impossible_memory_of_a_rule_is_refused_when_it_is_loaded(recipe, name, corrupt):
    """Not when it is used, batches later, nor drawn by."""
    allocator = Allocator(recipe, 12, 0)
    allocator.ask()
    state = allocator.state_dict()
    state["memory"][name] = corrupt
    with pytest.raises(ValueError, match="memory"):
        Allocator(recipe, 12, 0).load_state_dict(state)
