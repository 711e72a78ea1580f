"""Tests of replay (law 12): how often and how old, which rows, when they are released, and what a load keeps."""

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc import Allocator, Budget, PromptTable, recipes
from rollalloc.core.events import Done, EventError, Moved, Updated
from rollalloc.core.recipe import Gate, Replay, doubts
from rollalloc.testing import check_recipe

KEYS = tuple(f"prompt {index}" for index in range(6))


def replaying(recipe=None, **how):
    return replace(recipe or recipes.raft(2), replay=Replay(**({"rows": 9, "times": 9, "max_staleness": 9} | how)))


def batches(driver, count):
    """The fresh and the replayed rows of so many batches, and what each update releases."""
    made = []
    for _ in range(count):
        batch = driver.until_batch().batch
        driver.update()
        again = [row for row in batch.rows if row.replays]
        made.append(([row for row in batch.rows if not row.replays], again, set(driver.ask(0).release)))
    return made


def rollouts(rows):
    return [row.rollout for row in rows]


def copy_of(allocator, recipe=None, table=None, **how):
    copy = Allocator(recipe or allocator.recipe, table or allocator.table, allocator.seed)
    copy.load_state_dict(json.loads(json.dumps(allocator.state_dict())), **how)
    return copy


# ------------------------------------------------------------------------------------------------- how often, how old, what


def test_a_row_is_replayed_as_it_was_and_released_after_its_last_time(drive):
    """One success a batch, twice more: trained in batches 0, 1, 2, released after the third."""
    driver = drive(replaying(times=2), 6, default=(1.0, 0.0))
    driver.default = (1.0,)
    first, second, third, fourth = batches(driver, 4)
    assert first[1] == []
    assert second[1] == [row._replace(replays=1) for row in first[0]]
    assert third[1] == [row._replace(replays=2) for row in first[0]] + [row._replace(replays=1) for row in second[0]]
    assert fourth[1] == [row._replace(replays=2) for row in second[0]] + [row._replace(replays=1) for row in third[0]]
    assert [made[2] for made in (first, second)] == [set(), set()]
    assert third[2] == set(rollouts(first[0]))
    assert fourth[2] == set(rollouts(second[0]))
    assert driver.allocator.replayed == 0 + 2 + 4 + 4
    accounts = driver.allocator.accounts()
    assert (accounts["trained"], accounts["open"], sum(accounts.values())) == (8, 0, 8)  # each rollout once


def test_a_row_is_replayed_while_it_is_young_enough(drive):
    """Weights' versions 0, 1, 2: with `max_staleness` 1 a row of version 0 is in the batches of versions 0 and 1."""
    driver = drive(replaying(max_staleness=1), 6, default=(1.0,))
    first, second, third = batches(driver, 3)
    assert rollouts(second[1]) == rollouts(first[0])
    assert rollouts(third[1]) == rollouts(second[0])
    assert (first[2], second[2]) == (set(), set(rollouts(first[0])))


@pytest.mark.parametrize(
    ("above", "kept"), [(0.0, [1.0]), (-inf, [1.0, 0.0, -2.0]), (0.99, [1.0]), (1.0, []), (-2.0, [1.0, 0.0])]
)
def test_only_rows_of_an_advantage_above_the_threshold_are_kept(drive, above, kept):
    recipe = replaying(recipes.reinforce(1, 3), above=above)
    driver = drive(replace(recipe, over_batch=None), 6, default=(1.0, 0.0, -2.0))
    (fresh, _, freed), (_, again, _) = batches(driver, 2)
    assert [row.advantage for row in again] == kept
    assert freed == set(rollouts(fresh)) - set(rollouts(again))


def test_a_random_part_of_many_kept_rows_is_replayed_in_order_and_the_others_stay():
    """2 of 4 kept rows: each pair of the first replay as likely over 300 seeds, within 5 standard errors (1 - 1e-5)."""
    counts, seeds = Counter(), 300
    for seed in range(seeds):
        allocator = Allocator(replaying(recipes.raft(4), rows=2, times=1), 6, seed)
        for _ in range(2):
            allocator.tell([Done(r, 1, 1, 1, allocator.version) for o in allocator.ask().generate for r in o.rollouts])
            batch = allocator.ask().batch
            allocator.tell([Updated(allocator.version + 1)])
        again = rollouts(row for row in batch.rows if row.replays)
        assert again == sorted(again)
        assert [row.replays for row in batch.rows] == [0] * 4 + [1] * 2
        counts[tuple(again)] += 1
        assert len(allocator.state_dict()["kept"]) == 4 + 2
    assert len(counts) == 6
    assert all(abs(count - seeds / 6) < 5 * (seeds * 5 / 36) ** 0.5 for count in counts.values())


def test_each_batch_draws_anew_which_rows_it_replays(drive):
    """2 of the 4 rows of the batch before, by their place: eight times the same pair has a chance of 6^-7."""
    made = batches(drive(replaying(recipes.raft(4), rows=2, max_staleness=1), 6, default=(1.0,)), 9)
    fresh, again = ([rollouts(batch[part]) for batch in made] for part in (0, 1))
    pairs = {tuple(before.index(rollout) for rollout in now) for before, now in zip(fresh, again[1:], strict=False)}
    assert len(pairs) > 1


def test_replayed_rows_come_in_the_order_of_their_rollouts(drive):
    """Groups that were committed late have pilots and commits of another group between them."""
    recipe = replaying(recipes.pilot_commit(2, 2, 2, 2), above=-inf)
    (fresh, _, _), (_, again, _) = batches(drive(recipe, 6), 2)
    assert rollouts(fresh) != sorted(rollouts(fresh))
    assert rollouts(again) == sorted(rollouts(fresh))


def test_rows_that_the_loss_left_out_are_released_and_not_replayed(drive):
    """A new row at its first update, and a row that was kept before at the update whose loss leaves it out."""
    driver = drive(replaying(times=None), 6, default=(1.0,))
    first, second = driver.until_batch().batch.rows
    driver.allocator.tell([Updated(1, masked=(first.rollout,))])
    assert driver.ask(0).release == (first.rollout,)
    batch = driver.until_batch().batch
    assert [row.rollout for row in batch.rows if row.replays] == [second.rollout]
    driver.allocator.tell([Updated(2, masked=(second.rollout,))])
    assert driver.ask(0).release == (second.rollout,)
    assert [row.rollout for row in driver.until_batch().batch.rows if row.replays] == rollouts(batch.rows[:2])


def test_a_loss_can_leave_out_only_rows_of_the_batch(drive):
    driver = drive(replaying(), 6, default=(1.0,))
    driver.until_batch()
    before = json.dumps(driver.allocator.state_dict())
    with pytest.raises(EventError, match=r"masked names rollouts \[7, 9\], which are not in the batch"):
        driver.allocator.tell([Updated(1, masked=(0, 9, 7))])
    assert json.dumps(driver.allocator.state_dict()) == before


def test_a_short_batch_has_replays_too_and_they_make_none_by_themselves(drive):
    driver = drive(replace(replaying(recipes.raft(2)), budget=Budget(run_rollouts=3)), 6, default=(1.0,))
    first, second = batches(driver, 2)
    assert (len(first[0]), len(second[0]), len(second[1])) == (2, 1, 2)
    assert "is spent" in driver.ask().finished
    assert second[2] == set(rollouts(first[0] + second[0]))  # at the end
    assert driver.allocator.state_dict()["kept"] == []


# --------------------------------------------------------------------------------------------------------------- the gate

GATED = replaying(gate=Gate(most=0.25, pause=2))


def gated_batch(allocator, moved):
    """Make a batch, tell how far its replayed rows have moved, and train. Return its new rows and its replayed ones."""
    while (batch := allocator.batch) is None:
        actions = allocator.ask()
        allocator.tell([Done(r, 1, 1, 1, allocator.version) for o in actions.generate for r in o.rollouts])
    if any(row.replays for row in batch.rows):
        allocator.tell([Moved(moved)])
    trained = allocator.batch
    allocator.tell([Updated(allocator.version + 1)])
    return [[row for row in trained.rows if bool(row.replays) is again] for again in (False, True)]


def test_replayed_rows_that_moved_beyond_the_bound_are_left_out_and_replay_pauses():
    allocator = Allocator(GATED, 6, 0)
    made = [gated_batch(allocator, moved) for moved in (0, 0.25, 0.26, 0, 0, 0.1)]
    assert [len(fresh) for fresh, _ in made] == [2] * 6  # new rows are always trained on
    assert [len(again) for _, again in made] == [0, 2, 0, 0, 0, 9]
    assert (allocator.replayed, allocator.left_out) == (2 + 9, 4)
    assert {row.replays for row in made[5][1]} == {1, 2}  # those left out come back as they were


def test_without_a_pause_the_next_batch_asks_the_gate_again():
    allocator = Allocator(replaying(gate=Gate(most=0.25, pause=0)), 6, 0)
    assert [len(gated_batch(allocator, moved)[1]) for moved in (0, 1, 0)] == [0, 0, 4]


def test_a_gate_resumes_in_the_midst_of_a_pause():
    whole = Allocator(GATED, PromptTable(KEYS), 0)
    for moved in (0, 1):
        gated_batch(whole, moved)
    copy = copy_of(whole)
    for moved in (0, 0, 0.1, 1, 0, 0, 0.2):
        assert gated_batch(copy, moved) == gated_batch(whole, moved)
    assert (copy.replayed, copy.left_out) == (whole.replayed, whole.left_out)
    assert json.dumps(copy.state_dict()) == json.dumps(whole.state_dict())


@pytest.mark.parametrize("gate", [None, Gate(most=0.25, pause=1), Gate(most=0.5, pause=2)], ids=repr)
def test_a_pause_ends_with_the_gate_that_began_it(gate):
    """Under another budget it is the same gate, which still pauses."""
    whole = Allocator(GATED, PromptTable(KEYS), 0)
    for moved in (0, 1):
        gated_batch(whole, moved)
    other = copy_of(whole, replaying(gate=gate), accept_recipe=True)
    if gate is None:
        other.tell([Done(r, 1, 1, 1, other.version) for o in other.ask().generate for r in o.rollouts])
        again = [row for row in other.ask().batch.rows if row.replays]
    else:
        _, again = gated_batch(other, 0)
    assert len(again) == 4
    longer = copy_of(whole, replace(GATED, budget=Budget(run_rollouts=100)), accept_recipe=True)
    assert [len(gated_batch(longer, 0)[1]) for _ in range(3)] == [0, 0, 8]


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 1), st.integers(0, 4))
def test_rows_are_replayed_where_they_have_not_moved_and_no_pause_is_on(shares, most, pause):
    """As counted by hand: a batch asks the gate unless one of the last `pause` was left out."""
    allocator, asked_from, left_out = Allocator(replaying(gate=Gate(most=most, pause=pause)), 6, 0), 1, 0
    for version, share in enumerate(shares):
        _, again = gated_batch(allocator, share)
        asked = version >= asked_from
        assert bool(again) is (asked and share <= most)
        if asked and share > most:
            asked_from = version + 1 + pause
            left_out += min(9, 2 * version)
        assert allocator.left_out == left_out


def test_the_laws_hold_behind_a_gate():
    gate = Gate(most=0.5, pause=1)
    check_recipe(
        replace(recipes.reinforce(3, replay=4), replay=Replay(rows=4, max_staleness=3, gate=gate)), seeds=(0, 1)
    )


def test_a_gate_that_leaves_everything_out_says_so_and_again_each_time_it_has_doubled():
    allocator, said = Allocator(replaying(gate=Gate(most=0, pause=1)), 6, 0), []
    for _ in range(40):
        while (batch := allocator.batch) is None:
            actions = allocator.ask()
            allocator.tell([Done(r, 1, 1, 1, allocator.version) for o in actions.generate for r in o.rollouts])
        if any(row.replays for row in batch.rows):
            allocator.tell([Moved(1)])
        said += [line] if (line := allocator.shut_gate()) else []
        allocator.tell([Updated(allocator.version + 1)])
    assert [line.split(" batches")[0] for line in said] == [
        f"replay gives nothing: in each of the last {count}" for count in (8, 16)
    ]
    assert "replay=0" in said[0]


def test_one_batch_that_may_be_replayed_ends_the_count_of_those_that_may_not():
    allocator = Allocator(replaying(gate=Gate(most=0.5, pause=0)), 6, 0)
    for moved in (0, *[1] * 7, 0, *[1] * 7):
        gated_batch(allocator, moved)
    assert allocator.shut_gate() is None


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), None, "much"])
def test_a_share_that_is_none_is_refused(kept, share):
    allocator = copy_of(kept, GATED, accept_recipe=True)
    with pytest.raises(EventError, match=r"share must be a share of tokens in \[0, 1\]"):
        allocator.tell([Moved(share)])
    assert allocator.batch == kept.batch


def test_moved_is_refused_without_a_gate_or_without_replayed_rows(kept):
    with pytest.raises(EventError, match="has no gate"):
        kept.tell([Moved(0.5)])
    allocator = copy_of(kept, GATED, accept_recipe=True)
    allocator.tell([Moved(1)])
    with pytest.raises(EventError, match="no batch with replayed rows is out"):
        allocator.tell([Moved(0)])


def test_an_update_is_refused_before_the_gate_was_asked_and_the_batch_stays_out():
    """Otherwise a trainer that does not measure would replay everything, gate or not. Batches without replay need none."""
    allocator = Allocator(GATED, 6, 0)
    gated_batch(allocator, 0)
    while (batch := allocator.batch) is None:
        actions = allocator.ask()
        allocator.tell([Done(r, 1, 1, 1, allocator.version) for o in actions.generate for r in o.rollouts])
    before = json.dumps(allocator.state_dict())
    with pytest.raises(EventError, match="tell Moved before the batch is trained"):
        allocator.tell([Updated(allocator.version + 1)])
    assert json.dumps(allocator.state_dict()) == before
    allocator.tell([Moved(0), Updated(allocator.version + 1)])
    assert (allocator.replayed, allocator.batch) == (len([row for row in batch.rows if row.replays]), None)


def test_more_rows_than_can_be_kept_are_doubted():
    assert doubts(recipes.reinforce(4, replay=48)) == []
    assert "have 48 rows at most" in doubts(recipes.reinforce(4, replay=49))[0]


# -------------------------------------------------------------------------------------------------------- a save and a load


@pytest.fixture
def kept(drive):
    """An allocator with two rows kept of prompts 0 to 5, and a batch outstanding that replays them."""
    driver = drive(replaying(), PromptTable(KEYS), default=(1.0,))
    batches(driver, 1)
    driver.until_batch()
    return driver.allocator


def test_a_batch_outstanding_at_a_save_is_replayed_on_after_the_load(kept):
    copy = copy_of(kept)
    assert copy.outstanding().batch == kept.outstanding().batch
    for allocator in (kept, copy):
        allocator.tell([Updated(2)])
    assert json.dumps(copy.state_dict()["kept"]) == json.dumps(kept.state_dict()["kept"])
    assert sorted(row[6] for row in copy.state_dict()["kept"]) == [0, 0, 1, 1]
    assert copy.ask() == kept.ask()
    assert copy.replayed == kept.replayed == 2


def test_kept_rows_obey_the_limits_of_the_recipe_that_loads_them(kept):
    """Kept rows with replays 0 and 1, of versions 1 and 0, at version 2."""
    kept.tell([Updated(2)])
    kept.ask(0)
    for other, left in (
        (Replay(rows=9, times=1, max_staleness=9), {0}),
        (Replay(rows=9, times=9, max_staleness=1), {0}),
        (Replay(rows=9, times=9, max_staleness=9, above=1.0), set()),
        (Replay(rows=1, times=9, max_staleness=9), {0, 1}),
    ):
        copy = copy_of(kept, replace(kept.recipe, replay=other), accept_recipe=True)
        assert {row[6] for row in copy.state_dict()["kept"]} == left
        assert len(copy.ask(0).release) == 4 - len(copy.state_dict()["kept"])


@pytest.mark.parametrize("outstanding", [True, False])
def test_rows_of_prompts_that_are_gone_are_not_replayed(kept, outstanding):
    """The first is gone from the data: its row stays in the batch outstanding, and is released after its update, once."""
    batch = kept.outstanding().batch
    gone = batch.rows[-1]
    assert gone.replays
    if not outstanding:
        kept.tell([Updated(2)])
        kept.ask(0)
    keys = tuple(reversed([key for at, key in enumerate(KEYS) if at != gone.prompt]))
    copy = copy_of(kept, table=PromptTable(keys), remap="keys")
    if outstanding:
        assert rollouts(copy.outstanding().batch.rows) == rollouts(batch.rows)
        assert copy.ask(0).release == ()
        copy.tell([Updated(2)])
    # A prompt may have been in several rows: all of those are gone.
    lost = {row.rollout for row in batch.rows if row.prompt == gone.prompt}
    assert set(copy.ask(0).release) == lost
    left = {row[0]: row[1] for row in copy.state_dict()["kept"]}
    assert left == {row.rollout: keys.index(KEYS[row.prompt]) for row in batch.rows if row.rollout not in lost}
    copy.tell([Done(r, 1, 1, 1, 2) for o in copy.ask().generate for r in o.rollouts])
    again = [row for row in copy.ask().batch.rows if row.replays]
    assert {row.rollout: row.prompt for row in again} == left


def test_a_torn_state_is_refused_with_its_place(kept):
    kept.tell([Updated(2)])
    kept.ask(0)
    good = json.loads(json.dumps(kept.state_dict()))
    alive = next(iter(kept.ask().generate)).rollouts[0]
    in_flight = json.loads(json.dumps(kept.state_dict()))

    def refused(state, message, change):
        state = deepcopy(state)
        change(state["kept"])
        with pytest.raises(ValueError, match=rf"kept:? .*{message}|kept cannot be read.*{message}"):
            Allocator(kept.recipe, kept.table, 0).load_state_dict(state)

    refused(good, "twice", lambda rows: rows.append(rows[0]))
    refused(good, "a row of 7 entries", lambda rows: rows[0].append(1))
    refused(good, "advantage", lambda rows: rows[0].__setitem__(3, float("nan")))
    refused(good, "advantage", lambda rows: rows[0].__setitem__(3, None))
    refused(good, "weight", lambda rows: rows[0].__setitem__(4, "1"))
    refused(good, "a version above 2", lambda rows: rows[0].__setitem__(5, 3))
    refused(good, "replays", lambda rows: rows[0].__setitem__(6, -1))
    refused(good, "an unknown prompt", lambda rows: rows[0].__setitem__(1, 6))
    refused(good, "never ordered", lambda rows: rows[0].__setitem__(0, 10**6))
    refused(in_flight, "in flight", lambda rows: rows[0].__setitem__(0, alive))
    for name, value in (("replayed", -1), ("replayed", 1.5)):
        with pytest.raises(ValueError, match="replayed"):
            Allocator(kept.recipe, kept.table, 0).load_state_dict(good | {name: value})


# --------------------------------------------------------------------------------------------------------------- refusals


def test_replay_is_part_of_the_recipe_and_its_fingerprint(kept):
    with pytest.raises(ValueError, match=r"another recipe .*recipe.replay.times: saved 9, given 8"):
        copy_of(kept, replaying(times=8))
    mixed = recipes.mix(recipes.dapo(2, 2, 6), replaying())
    assert mixed.replay == kept.recipe.replay
    every = replaying(above=-inf)
    state = Allocator(every, 6, 0).state_dict()
    Allocator(every, 6, 0).load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
    with pytest.raises(ValueError, match=r"recipe.replay.above: saved '-inf', given 0.0"):
        Allocator(replaying(), 6, 0).load_state_dict(state)
