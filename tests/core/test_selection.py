"""What is trained on beside what was sampled: by hand, and what the recipes that leave something out show."""

import json
from random import Random
from types import SimpleNamespace

import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.events import Cancelled, Done, Updated
from rollalloc.core.rule import Drawn
from rollalloc.core.selection import Selection

BATCHES = 6


def batches(allocator, seed=0, count=BATCHES):
    """A synchronous engine that decodes what is ordered together, shortest first, and stops what it is told to.

    Prompt p succeeds with probability p / 20; a rollout has 1 to 200 tokens. Yields the figures of each batch.
    """
    random = Random(seed)
    while count:
        actions = allocator.ask()
        length = {rollout: random.randint(1, 200) for order in actions.generate for rollout in order.rollouts}
        prompt_of = {rollout: order.prompt for order in actions.generate for rollout in order.rollouts}
        for rollout in sorted(length, key=length.__getitem__):
            if rollout not in length:
                continue
            now, metric = length.pop(rollout), float(random.random() < prompt_of[rollout] / 20)
            allocator.tell([Done(rollout, metric, metric, now, allocator.version)])
            if allocator.recipe.stopping and length:
                stopped = allocator.ask(capacity=0).cancel
                allocator.tell([Cancelled(each, now) for each in stopped])
                length = {each: tokens for each, tokens in length.items() if each not in stopped}
        if batch := allocator.batch:
            yield allocator.selection.figures()
            allocator.tell([Updated(batch.version + 1)])
            count -= 1


def test_by_hand(drive):
    """Two groups of two are sampled: 1, 0 is trained on, 1, 1 is not; every rollout has ten tokens."""
    driver = drive(recipes.dapo(1, 2, gen_groups=2), 2, {0: [1.0, 0.0], 1: [1.0, 1.0]})
    driver.until_batch()
    assert driver.allocator.selection.figures() == {
        "tokens_sampled": 10,
        "difficulty_sampled": pytest.approx(0.25),
        "tokens_trained": 10,
        "difficulty_trained": 0.5,
    }
    driver.update()
    assert set(driver.allocator.selection.figures().values()) == {None}


def test_a_run_that_was_saved_within_a_batch_says_the_same():
    allocator = Allocator(recipes.dapo(4, 4, gen_groups=8), 21, 0)
    next(batches(allocator))
    copy = Allocator(recipes.dapo(4, 4, gen_groups=8), 21, 0)
    saved = json.loads(json.dumps(allocator.state_dict()))
    copy.load_state_dict(saved)
    assert copy.selection.figures() == allocator.selection.figures()
    saved["selection"]["trained"][1] = "many"
    with pytest.raises(ValueError, match=r"selection: .*expected a number that is finite, got 'many'"):
        copy.load_state_dict(saved)


def group_of(lengths, metrics=(), predicted=None):
    """A group that is over: the tokens of each rollout, those that were stopped included."""
    done = [SimpleNamespace(metric=metric) for metric in metrics]
    return SimpleNamespace(lengths=list(lengths), done=done, drawn=Drawn(0, predicted))


def test_sums_by_hand():
    """What was stopped counts with the tokens it had; a prediction stands before what came; nothing scored has no rate."""
    selection = Selection()
    selection.end(group_of([10, 20, 60], metrics=[1.0, 0.0]))
    selection.end(group_of([30], metrics=[1.0], predicted=0.2))
    selection.end(group_of([40, 80]))
    assert selection.figures() == {
        "tokens_sampled": pytest.approx(240 / 6),
        "difficulty_sampled": pytest.approx((3 * 0.5 + 0.8) / 4),
        "tokens_trained": None,
        "difficulty_trained": None,
    }
    selection.end_late(group_of([10, 20], metrics=[1.0, 1.0]), 0)  # one that never began
    assert selection.figures()["tokens_sampled"] == pytest.approx(240 / 6)
    selection.end_late(group_of([10, 20], metrics=[1.0, 1.0]), 60)
    selection.train(group_of([10, 20], metrics=[1.0, 0.0]), [20])
    assert selection.figures()["tokens_sampled"] == pytest.approx(300 / 7)
    assert selection.figures()["difficulty_sampled"] == pytest.approx((3 * 0.5 + 0.8 + 0) / 5)
    assert (selection.figures()["tokens_trained"], selection.figures()["difficulty_trained"]) == (20, 0.5)
