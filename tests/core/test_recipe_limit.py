"""Rollouts are stopped at a length that few right rollouts exceed, and some groups have no limit."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc import Allocator, Budget, EventError, Limit, recipes
from rollalloc.core.events import Cancelled, Done, Failed, Updated
from rollalloc.core.recipe import Retire, doubts
from rollalloc.named import make_recipe

QUICK = recipes.raft(4).replace(limit=Limit(share=0.5, every=3, last=16))


@pytest.mark.parametrize(
    ("share", "lengths", "limit"),
    [
        (0.8, range(1, 21), 16),  # sixteen of twenty fit; 0.8 · 20 is a little more than 16 for a float
        (0.8, range(1, 20), 16),  # fifteen of nineteen would be too few
        (1, range(1, 21), 20),
        (0.001, range(3, 23), 3),
        (0.5, [9] * 16, 9),
        (0.5, [0] * 16, 1),  # an engine generates at least one token
        (0.5, range(15), None),  # too few are known
    ],
)
def test_the_limit_is_a_quantile_of_right_lengths(share, lengths, limit):
    assert Limit(share=share).of([*lengths]) == limit
    assert Limit(share=share).of([*lengths][::-1]) == limit


@given(st.lists(st.integers(1, 50), min_size=16, max_size=64), st.floats(0.01, 1))
def test_at_least_the_share_of_right_rollouts_fits_and_a_shorter_limit_would_not_do(lengths, share):
    limit = Limit(share=share).of(lengths)
    fits = [sum(length <= most for length in lengths) / len(lengths) for most in (limit, limit - 1)]
    assert fits[0] >= share - 1e-12
    assert fits[1] < share + 1e-12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 0.0}, r"share must be a share of right rollouts in \(0, 1\], got 0.0"),
        ({"share": 1.1}, "share must be a share of right rollouts"),
        ({"share": float("nan")}, "share must be a share of right rollouts"),
        ({"every": 1}, r"every must be a whole number of at least 2 .*one has no limit.*got 1"),
        ({"last": 15}, "last must be a whole number of at least 16, got 15"),
    ],
)
def test_a_number_out_of_range_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Limit(**given)


def test_a_recipe_with_a_stop_rule_has_no_limit():
    with pytest.raises(
        ValueError, match=r"a limit \(limit_at\) or stops rollouts by a rule, not both: the stage .* has"
    ):
        recipes.darts(4, 3, 1, tail="sampled").replace(limit=Limit())


def played(allocator, batches, tokens=lambda rollout: 10 + rollout % 10, metric=lambda rollout: rollout % 2):
    """The limit of each order, batch by batch; a rollout that its limit stops is wrong."""
    made = []
    for _ in range(batches):
        limits = []
        while not (actions := allocator.ask()).batch:
            for order in actions.generate:
                limits.append(order.limit)
                for rollout in order.rollouts:
                    length = tokens(rollout)
                    cut = order.limit is not None and length > order.limit
                    right = 0 if cut else metric(rollout)
                    length = order.limit if cut else length
                    allocator.tell([Done(rollout, right, right, length, allocator.version, None, cut)])
        made.append(limits)
        allocator.tell([Updated(allocator.version + 1)])
    return made


def test_every_so_manieth_batch_has_no_limit_and_none_before_enough_is_known():
    """Right rollouts have 11, 13, … 19 tokens, two a batch: after eight batches without a limit 16 are known."""
    limits = played(Allocator(QUICK, 64, 0), 14)
    assert limits[:8] == [[None] * 4] * 8
    assert [made[0] for made in limits[8:]] == [15, None, 15, 15, None, 15]
    assert all(len(set(made)) == 1 for made in limits)


def test_the_limit_follows_right_answers_as_they_grow():
    """Only what has no limit says how long right answers are now; the newest sixteen count."""
    allocator = Allocator(QUICK, 64, 0)
    played(allocator, 8)
    assert allocator.limit == 15
    longer = played(allocator, 24, tokens=lambda rollout: 40)
    assert [made[0] for made in longer if made[0] is not None][-1] == 40
    assert allocator.limit == 40


def test_what_a_limit_let_through_does_not_lower_it():
    """Right rollouts have 11, 13, … 19 tokens throughout, and half of those within the limit have 13 at most."""
    recipe = recipes.raft(4).replace(limit=Limit(share=0.5, every=8, last=16))
    made = played(Allocator(recipe, 256, 0), 40, tokens=lambda rollout: 10 + 7 * rollout % 10)
    assert {limits[0] for limits in made} == {None, 15}


def test_wrong_failed_and_stopped_rollouts_do_not_count():
    allocator = Allocator(QUICK.replace(max_staleness=4), 64, 0)
    for _ in range(20):
        for order in allocator.ask(capacity=4).generate:
            rollout = order.rollouts[0]
            wrong = Done(rollout, 0.4, 0.4, 99, 0)
            allocator.tell([(wrong, Failed(rollout, "dead", 99), Cancelled(rollout, 99))[rollout % 3]])
    assert allocator.limit is None
    assert allocator.state_dict()["right_lengths"] == []


@pytest.mark.parametrize("event", [Done(0, 1, 1, 16, 0), Failed(0, "dead", 16), Cancelled(0, 16)])
def test_a_rollout_beyond_its_limit_is_refused_and_changes_nothing(event):
    """As from a loop that does not pass the limit on."""
    allocator = Allocator(QUICK, 64, 0)
    played(allocator, 8)
    order = allocator.ask().generate[0]
    assert order.limit == 15
    before = allocator.state_dict()
    wrong = type(event)(**{**{name: getattr(event, name) for name in event.__slots__}, "rollout": order.rollouts[0]})
    with pytest.raises(
        EventError, match=r"has 16 tokens, but its order has a limit of 15; give `Order\.limit` to the engine"
    ):
        allocator.tell([wrong])
    assert allocator.state_dict() == before


def test_a_group_keeps_its_limit_over_a_save():
    allocator = Allocator(QUICK, 64, 0)
    played(allocator, 8)
    orders = allocator.ask().generate
    again = Allocator(QUICK, 64, 0)
    again.load_state_dict(json.loads(json.dumps(allocator.state_dict())))
    assert again.outstanding().generate == orders
    assert again.limit == 15
    state = allocator.state_dict()
    for wrong, message in ((0, "at least 1"), (15.5, "a whole number"), (float("inf"), "a whole number")):
        state["groups"][0]["limit"] = wrong
        with pytest.raises(ValueError, match=rf"groups\[0\].*limit.*{message}"):
            again.load_state_dict(state)


def test_another_data_set_begins_without_a_limit():
    """Right answers to its prompts may be longer, and up to seven batches would be stopped at the old limit."""
    allocator = Allocator(QUICK, 64, 0)
    played(allocator, 8)
    again = Allocator(QUICK, 65, 0)
    again.load_state_dict(allocator.state_dict(), remap=[*range(64), -1])
    assert (allocator.limit, again.limit) == (15, None)
    played(again, 8)
    assert again.limit == 15


def test_a_run_resumes_with_the_limit_switched_on_off_or_changed():
    plain, lower = recipes.raft(4), QUICK.replace(limit=Limit(share=0.2, every=3, last=16))
    allocator = Allocator(QUICK, 64, 0)
    played(allocator, 8)
    for recipe, limit in ((lower, 11), (plain, None), (QUICK, None)):  # without a limit, no lengths are kept
        again = Allocator(recipe, 64, 0)
        again.load_state_dict(allocator.state_dict(), accept_recipe=True)
        assert again.limit == limit
        allocator = again
    played(allocator, 8)
    assert allocator.limit == 15


def test_without_a_limit_no_order_has_one_and_no_length_is_kept():
    allocator = Allocator(recipes.raft(4), 64, 0)
    assert {limit for made in played(allocator, 12) for limit in made} == {None}
    assert allocator.limit is None
    assert allocator.state_dict()["right_lengths"] == []


def test_every_recipe_takes_the_limit_by_name():
    assert make_recipe("pilot_commit+pods", {"limit_at": 0.9}).limit == Limit(share=0.9)
    assert make_recipe("grpo", {"limit_at": None}).limit is None
    assert make_recipe("grpo", {"limit_at": 1, "retire_at": 0.9}).retire is not None
    for share, message in (
        (0, r"limit_at=0: share must be"),
        ("x", "limit_at must be a share"),
        (True, "limit_at must"),
    ):
        with pytest.raises(ValueError, match=message):
            make_recipe("grpo", {"limit_at": share})
    with pytest.raises(ValueError, match=r"limit_at=0\.8: a recipe has a limit .* or stops rollouts by a rule"):
        make_recipe("darts", {"limit_at": 0.8, "tail": "sampled"})


@pytest.mark.parametrize(
    ("level", "every", "hardly"), [(0.9, 8, False), (0.93, 2, False), (0.93, 8, True), (0.97, 2, True)]
)
def test_a_level_of_retirement_that_no_prompt_reaches_under_the_limit_is_doubted(level, every, hardly):
    """A tenth of the right rollouts is stopped, in 7 of 8 batches or in every other one: .9125 or .95 seem right."""
    recipe = recipes.reinforce(4).replace(retire=Retire(level=level), limit=Limit(share=0.9, every=every))
    assert ["and is hardly ever retired" in line for line in doubts(recipe)] == [True] * hardly
    assert doubts(recipe.replace(limit=None)) == []


def test_a_budget_of_tokens_buys_more_rollouts_under_a_limit():
    """Wrong rollouts have 100 tokens and right ones 10."""
    paid = []
    for recipe in (recipes.raft(4), QUICK):
        allocator = Allocator(recipe.replace(budget=Budget(run_tokens=20_000)), 10_000, 0)
        while not (actions := allocator.ask()).finished:
            for order in actions.generate:
                for rollout in order.rollouts:
                    right = rollout % 2
                    length = min(10 if right else 100, order.limit or 100)
                    allocator.tell([Done(rollout, right, right, length, allocator.version)])
            if actions.batch:
                allocator.tell([Updated(allocator.version + 1)])
        paid.append(allocator.paid)
    assert paid[1] > 1.8 * paid[0]
