"""Batches of another shape as the run begins: when it changes, who sees it, and what a save and a load leave of it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollalloc import Allocator, Recipe, Warm, recipes
from rollalloc.core.events import Done, Updated
from rollalloc.core.recipe import Replay, Stage
from rollalloc.rules import promote, sizes

GRPO = recipes.grpo(2, 3)


def shape(batch):
    """Groups, and rows of each."""
    rows = [row.group for row in batch.rows if not row.replays]
    return len(set(rows)), {rows.count(group) for group in rows}


def shapes(driver, batches):
    made = []
    for _ in range(batches):
        made.append(shape(driver.until_batch().batch))
        driver.update()
    return made


def copy_of(allocator, recipe=None, change=lambda state: state, **how):
    copy = Allocator(recipe or allocator.recipe, allocator.table, allocator.seed)
    copy.load_state_dict(change(json.loads(json.dumps(allocator.state_dict()))), **how)
    return copy


# ---------------------------------------------------------------------------------------------------- when it changes


@pytest.mark.parametrize(
    ("warm", "first", "batches"),
    [
        (Warm(groups=5, until=1), (5, {3}), 1),
        (Warm(groups=5, until=15), (5, {3}), 1),
        (Warm(groups=5, until=16), (5, {3}), 2),  # 15 were ordered when the second was begun
        (Warm(groups=5, until=30), (5, {3}), 2),
        (Warm(groups=5, n=1, until=10), (5, {1}), 2),
        (Warm(groups=1, n=7, until=21), (1, {7}), 3),
        (Warm(groups=2, until=13), (2, {3}), 3),
        (Warm(groups=1, until=2), (1, {3}), 1),
    ],
)
def test_the_first_batches_have_the_other_shape_until_so_many_rollouts_are_ordered(drive, warm, first, batches):
    driver = drive(replace(GRPO, warm=warm))
    assert shapes(driver, batches + 3) == [first] * batches + [(2, {3})] * 3


def test_rules_see_the_groups_that_hold_now(drive):
    seen = []

    class Sees(promote.Oldest):
        def __call__(self, held, k, view, rng):
            seen.append((k, view.groups, view.need))
            return super().__call__(held, k, view, rng)

    recipe = replace(GRPO, warm=Warm(groups=4, until=12))
    object.__setattr__(recipe, "stages", (replace(recipe.stages[0], promote=Sees()),))
    assert shapes(drive(recipe), 3) == [(4, {3}), (2, {3}), (2, {3})]
    assert seen == [(4, 4, 0), (2, 2, 0), (2, 2, 0)]


def test_what_was_begun_in_the_warm_up_is_trained_as_it_is_after_it(drive):
    """8 groups of 2 rollouts for a batch of 3: the 5 that are carried fill the batches of 2 that follow."""
    recipe = replace(recipes.dapo(2, 4, 8, "carry"), warm=Warm(groups=3, n=2, until=16), max_staleness=3)
    assert shapes(drive(recipe), 4) == [(3, {2}), (2, {2}), (2, {2}), (2, {2, 4})]


def test_a_size_rule_is_not_asked_while_the_warm_up_says_how_many(drive):
    asked = []

    class Asked(sizes.Fixed):
        def __call__(self, groups, view, memory):
            asked.append(len(groups))
            return super().__call__(groups, view, memory)

    recipe = replace(GRPO, warm=Warm(groups=4, n=1, until=4))
    object.__setattr__(recipe, "stages", (replace(recipe.stages[0], size=Asked(3)),))
    shapes(drive(recipe), 3)
    assert asked == [2, 2]


def test_a_short_batch_of_the_warm_up_says_how_many_it_lacks(drive):
    recipe = replace(recipes.dapo(2, 2, 2, max_candidates=4), warm=Warm(groups=3, until=9))
    driver = drive(recipe, 8, {prompt: [1.0] for prompt in range(7)})
    batch = driver.until_batch().batch
    assert shape(batch)[0] == 1
    assert batch.short_because == "max_candidates: 4 prompts tried, 1 of 3 groups ready"


def test_replayed_rows_come_beside_either_shape(drive):
    recipe = replace(recipes.raft(1), warm=Warm(groups=3, until=3), replay=Replay(rows=2, max_staleness=9))
    driver = drive(recipe, default=(1.0,))
    made = []
    for _ in range(3):
        batch = driver.until_batch().batch
        made.append((len(batch.rows), sum(row.replays > 0 for row in batch.rows)))
        driver.update()
    assert made == [(3, 0), (3, 2), (3, 2)]


# ---------------------------------------------------------------------------------------------------- a save and a load


@settings(max_examples=40, deadline=None)
@given(
    warm=st.builds(Warm, groups=st.integers(1, 5), n=st.none() | st.integers(1, 4), until=st.integers(1, 30)),
    recipe=st.sampled_from((GRPO, recipes.dapo(2, 2, 4, "carry"), recipes.spo(2, 2))),
    capacity=st.none() | st.integers(1, 5),
    at=st.integers(0, 14),
    seed=st.integers(0, 3),
)
def test_a_run_that_is_saved_and_loaded_anywhere_in_its_warm_up_goes_on_alike(warm, recipe, capacity, at, seed):
    allocator = Allocator(replace(recipe, warm=warm), 9, seed)
    twin = None
    for turn in range(16):
        if turn == at:
            twin = copy_of(allocator)
        actions = allocator.ask(capacity)
        assert twin is None or twin.ask(capacity) == actions
        events = [
            Done(rollout, reward := float((rollout * 5) % 3 > 0), reward, 3, allocator.version)
            for order in actions.generate
            for rollout in order.rollouts
        ]
        events += [Updated(allocator.version + 1)] if actions.batch else []
        for each in [allocator] if twin is None else [allocator, twin]:
            each.tell(events)


def test_a_state_of_before_there_was_a_warm_up_goes_on(drive):
    """Its recipe says nothing of one, which is what None says."""
    driver = drive(GRPO)
    shapes(driver, 2)

    def older(state):
        del state["recipe"]["warm"]
        return state

    copy = copy_of(driver.allocator, change=older)
    assert copy.ask() == driver.ask()


def test_a_run_that_had_ended_has_ended_in_a_state_of_before(drive):
    driver = drive(replace(GRPO, budget=replace(GRPO.budget, run_rollouts=6)))
    why = driver.until_end()

    def older(state):
        del state["recipe"]["warm"]
        return state

    assert copy_of(driver.allocator, change=older).outstanding().finished == why


@pytest.mark.parametrize(("name", "all_in"), [("batch_paid", "paid"), ("batch_tokens", "tokens")])
def test_a_state_in_which_a_batch_cost_more_than_the_run_is_refused(drive, name, all_in):
    """From which a warm-up would go on for longer than it may."""
    driver = drive(replace(GRPO, warm=Warm(groups=5, until=40)))
    shapes(driver, 1)

    def torn(state):
        state["purse"][name] = state["purse"][all_in] + 1
        return state

    with pytest.raises(ValueError, match=r"purse: more was paid for a batch than in all, .*; the state is torn"):
        copy_of(driver.allocator, change=torn)


def test_another_warm_up_is_another_recipe_and_holds_where_it_is_accepted(drive):
    driver = drive(replace(GRPO, warm=Warm(groups=5, until=40)))
    shapes(driver, 1)
    longer = replace(GRPO, warm=Warm(groups=4, until=20))
    with pytest.raises(ValueError, match=r"recipe\.warm\.groups: saved 5, given 4; recipe\.warm\.until: saved 40"):
        copy_of(driver.allocator, longer)
    with pytest.raises(ValueError, match=r"recipe\.warm: saved \{.*given None"):
        copy_of(driver.allocator, GRPO)
    shorter = replace(GRPO, warm=Warm(groups=4, until=15))
    for recipe, groups in ((longer, [4, 2]), (GRPO, [2, 2]), (shorter, [2, 2])):
        other = drive(recipe)
        other.allocator = copy_of(driver.allocator, recipe, accept_recipe=True)
        assert [made[0] for made in shapes(other, 2)] == groups


# ---------------------------------------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"groups": 0, "until": 1}, "warm: groups must be a whole number of at least 1, got 0"),
        ({"groups": 1, "until": 0}, "warm: until must be a whole number of at least 1, got 0"),
        ({"groups": 1, "until": 2.5}, "warm: until must be a whole number of at least 1, got 2.5"),
        ({"groups": 1, "n": 0, "until": 1}, "warm: n must be a whole number of at least 1, got 0"),
        ({"groups": True, "until": 1}, "warm: groups must be a whole number of at least 1, got True"),
    ],
)
def test_a_shape_that_is_none_is_refused(how, says):
    with pytest.raises(ValueError, match=says):
        Warm(**how)


def test_more_groups_than_prompts_are_refused_whichever_batch_has_them():
    with pytest.raises(ValueError, match="trains on 9 groups a batch of its warm-up but there are only 8 prompts"):
        Allocator(replace(GRPO, warm=Warm(groups=9, until=1)), 8, 0)
    with pytest.raises(ValueError, match="trains on 9 groups a batch but there are only 8 prompts"):
        Allocator(replace(GRPO, groups=9, warm=Warm(groups=2, until=1)), 8, 0)
    Allocator(replace(GRPO, warm=Warm(groups=8, until=1)), 8, 0)


def test_rollouts_of_a_warm_up_are_refused_where_several_stages_say_them():
    warm = Warm(groups=9, n=4, until=100)
    with pytest.raises(
        ValueError, match=r"warm: n=4 rollouts a group, but .* several stages, pilot, commit; leave n out"
    ):
        recipes.pilot_commit(4, 4, 4, 12, warm=warm)
    with pytest.raises(ValueError, match="several stages, pilot, commit"):
        recipes.mix(recipes.pilot_commit(4, 4, 4, 12), recipes.foresight(4, warm=warm))


@pytest.mark.parametrize("recipe", [recipes.pods(2, 8, 4), recipes.darts(2, 3, 1)])
def test_fewer_rollouts_than_rows_of_a_group_are_refused(recipe):
    with pytest.raises(ValueError, match=r"warm: n must be a whole number of at least 4 \(.* trains on that many"):
        replace(recipe, warm=Warm(groups=2, n=3, until=9))
    assert replace(recipe, warm=Warm(groups=2, n=4, until=9)).most_groups == 2


def test_a_mixture_takes_the_warm_up_of_the_one_that_has_one_and_refuses_two():
    few, many = Warm(groups=8, until=64), Warm(groups=9, until=64)
    pilots = recipes.pilot_commit(4, 4, 4, 12)
    assert recipes.mix(pilots, recipes.foresight(4, warm=few)).warm == few
    assert recipes.mix(replace(pilots, warm=few), recipes.foresight(4, warm=few)).warm == few
    two = replace(pilots, warm=few), recipes.foresight(4, warm=many)
    with pytest.raises(ValueError, match=r"both recipes change warm: .*groups=8.*groups=9"):
        recipes.mix(*two)
    assert recipes.mix(*two, take={"warm": "second"}).warm == many


def test_a_recipe_without_the_field_is_without_a_warm_up():
    stage = GRPO.stages[0]
    assert isinstance(stage, Stage)
    values = {
        name: value for name, value in vars(GRPO).items() if name in Recipe.__dataclass_fields__ and name != "warm"
    }
    assert Recipe(**values) == GRPO
