"""What is trained on beside what was sampled: by hand, and what the recipes that leave something out show."""

import json
from random import Random
from types import SimpleNamespace

import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.events import Cancelled, Done, Updated
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


def biases(recipe, seed=0):
    """Of each batch, how much longer and how much harder its rows are than what was sampled."""
    found = list(batches(Allocator(recipe, 21, seed), seed))
    return [
        (each["tokens_trained"] - each["tokens_sampled"], each["difficulty_trained"] - each["difficulty_sampled"])
        for each in found
    ]


@pytest.mark.parametrize("recipe", [recipes.grpo(4, 4), recipes.reinforce(8), recipes.raft(8)], ids=repr)
def test_where_all_that_is_sampled_is_trained_on_nothing_shows(recipe):
    assert biases(recipe) == [(0, 0)] * BATCHES


def test_a_recipe_that_stops_long_rollouts_trains_on_shorter_ones():
    """Each batch: what was stopped had more tokens already than any of its group that ended."""
    assert all(longer < 0 for longer, _ in biases(recipes.darts(4, 3, 0, tail="none")))


def test_a_recipe_that_drops_easy_groups_trains_on_harder_ones():
    """DAPO among prompts that are nearly always solved: a group with a failure is harder than all groups together."""
    allocator = Allocator(recipes.dapo(4, 4, gen_groups=8), 21, 0)
    found = list(_of_easy(allocator, Random(0)))
    assert all(each["difficulty_trained"] > each["difficulty_sampled"] for each in found)


def _of_easy(allocator, random):
    """Every prompt succeeds nine times in ten: groups that are all right are dropped, and those with a failure kept."""
    for _ in range(BATCHES):
        while allocator.batch is None:
            for order in allocator.ask().generate:
                metrics = {rollout: float(random.random() < 0.9) for rollout in order.rollouts}
                allocator.tell([Done(each, won, won, 1, allocator.version) for each, won in metrics.items()])
        yield allocator.selection.figures()
        allocator.tell([Updated(allocator.version + 1)])


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


def test_a_prediction_stands_for_what_a_prompt_did(drive):
    """SPO's rule predicts a half of a prompt that it has not seen, whatever its one rollout came to."""
    driver = drive(recipes.spo(2), 4, default=(1.0,))
    driver.until_batch()
    found = driver.allocator.selection.figures()
    assert found["difficulty_sampled"] == found["difficulty_trained"] == 0.5


def test_a_rollout_that_was_stopped_counts_when_its_end_is_told_after_the_batch():
    allocator = Allocator(recipes.darts(1, 1, 0, tail="none"), 1, 0)
    [order] = allocator.ask().generate
    first, *others = order.rollouts
    allocator.tell([Done(first, 1.0, 1.0, 10, 0)])
    actions = allocator.ask(capacity=0)
    assert actions.batch
    assert set(actions.cancel) == set(others)
    assert allocator.selection.figures()["tokens_sampled"] == 10
    allocator.tell([Cancelled(each, 40) for each in others])
    assert allocator.selection.figures()["tokens_sampled"] == (10 + 40 * len(others)) / (1 + len(others))


def test_a_run_that_was_saved_within_a_batch_says_the_same():
    allocator = Allocator(recipes.dapo(4, 4, gen_groups=8), 21, 0)
    next(batches(allocator))
    copy = Allocator(recipes.dapo(4, 4, gen_groups=8), 21, 0)
    saved = json.loads(json.dumps(allocator.state_dict()))
    copy.load_state_dict(saved)
    assert copy.selection.figures() == allocator.selection.figures()
    saved["selection"]["trained"][1] = "many"
    with pytest.raises(ValueError, match=r"selection: .*expected a finite number or null, got 'many'"):
        copy.load_state_dict(saved)


def group_of(lengths, metrics=(), predicted=None):
    """A group that is over: the tokens of each rollout, those that were stopped included."""
    done = [SimpleNamespace(metric=metric) for metric in metrics]
    return SimpleNamespace(lengths=list(lengths), done=done, predicted=predicted)


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
