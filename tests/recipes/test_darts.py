"""DARTS with as many longest rollouts of each prompt as it decides, from its sizes to its rows."""

import json
from dataclasses import replace

import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.errors import RuleError
from rollalloc.core.events import Done, Updated
from rollalloc.recipes.darts import LongestBySize
from rollalloc.rules.sizes import Fixed


def of_size(n, tail="exact", **changes):
    """Five rows, at most two of them the longest, and n rollouts of each group."""
    recipe = recipes.darts(2, 3, 2, tail=tail, longest_by="size")
    return replace(recipe.replace(size=Fixed(n)), **changes)


def told(allocator, order, ended):
    """The first so many rollouts of an order end, the k-th after 10 k tokens; what is stopped thereupon."""
    for at, rollout in enumerate(order.rollouts[:ended], 1):
        allocator.tell([Done(rollout, 1.0, 1.0, 10 * at, 0)])
    return allocator.ask(0).cancel


@pytest.mark.parametrize(
    ("n", "tail", "ended", "stopped"),
    [
        (9, "exact", 5, 4),  # 2 · 5 - 9 rollouts allow no longest: over once the five shortest are there
        (9, "exact", 4, 0),
        (8, "exact", 5, 0),  # one longest: whatever runs may become it
        (9, "sampled", 5, 4),
        (8, "sampled", 4, 3),  # four shortest are there, one of four is kept
        (8, "sampled", 3, 0),
        (6, "sampled", 3, 1),  # two of three
    ],
)
def test_a_group_is_stopped_by_the_longest_that_its_size_leaves(n, tail, ended, stopped):
    allocator = Allocator(of_size(n, tail), 9, 0)
    order = allocator.ask().generate[0]
    assert len(told(allocator, order, ended)) == stopped


def by_record(**changes):
    return replace(recipes.darts(2, 3, 1, tail="sampled", solved=0.9, longest_by="record"), **changes)


def visited(allocator, lengths):
    """Every prompt is visited once, solved, with such lengths; then the next batch is ordered."""
    orders = allocator.ask().generate
    for order, tokens in zip(orders, lengths, strict=True):
        last = [Done(each, 1.0, 1.0, many, 0) for each, many in zip(order.rollouts, tokens, strict=True)]
        allocator.tell(last)
    assert allocator.ask().batch
    allocator.tell([Updated(1)])
    return allocator.ask().generate


def test_a_group_keeps_what_it_decided_when_its_prompts_record_changes_and_over_a_load():
    """The wide one has no tail, nor after a load, nor once its record says that its lengths are those of all."""
    allocator = Allocator(by_record(), 2, 0)
    orders = visited(allocator, ([50] * 6, [10, 20, 30, 100, 200, 300]))
    wide = next(group for group in allocator._run.flight.groups.values() if group.longest == 0)
    assert sorted(group.longest for group in allocator._run.flight.groups.values()) == [0, 1]
    state = json.loads(json.dumps(allocator.state_dict()))
    allocator = Allocator(by_record(), 2, 0)
    allocator.load_state_dict(state)
    allocator.statistics.successes_N[:] = 0
    order = next(each for each in orders if each.group == wide.id)
    assert told(allocator, order, 3) == ()
    assert len(told(allocator, order._replace(rollouts=order.rollouts[3:]), 1)) == len(order.rollouts) - 4


def test_a_state_with_more_longest_than_there_are_is_corrupt():
    allocator = Allocator(of_size(6), 9, 0)
    allocator.ask()
    state = json.loads(json.dumps(allocator.state_dict()))
    state["groups"][0]["longest"] = 3
    with pytest.raises(ValueError, match="a group has more than 2 longest rows; the state is corrupt"):
        Allocator(of_size(6), 9, 0).load_state_dict(state)
    state["groups"][0]["longest"] = -1
    with pytest.raises(ValueError, match="longest"):
        Allocator(of_size(6), 9, 0).load_state_dict(state)


@pytest.mark.parametrize("made", [[3, 3], [-1, 0], [1]])
def test_a_rule_that_gives_more_longest_than_its_trait_is_refused_by_name(made):
    class Wrong(LongestBySize):
        def longest_of(self, groups, sizes, view):
            return made

    with pytest.raises(
        RuleError,
        match=r"longest_of must return for each of 2 groups a number from 0 to 2, its trait `longest`, got \[",
    ):
        Allocator(of_size(6, rows=Wrong(3, 2)), 9, 0).ask()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"longest_by": "size", "tail": "none"}, "longest_by='size' needs a recipe that trains on longest rollouts"),
        ({"longest_by": "record", "solved": 0.9, "longest": 0}, "longest_by='record' needs .* got longest=0"),
        ({"longest_by": "record"}, 'longest_by="record" needs solved, the success rate'),
        ({"longest_by": "length"}, "longest_by must be one of all, size, record, got 'length'"),
        ({"longest_by": "record", "solved": 1.5}, "solved must be a success rate in"),
        ({"longest_by": "size", "solved": 0.9}, 'solved needs tail="sampled"'),
    ],
)
def test_what_does_not_go_together_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        recipes.darts(**{"groups": 4, "shortest": 3, "longest": 1} | given)
