"""Tests of `Selection`: means over trained rows and over all sampled rollouts, by hand and after a load."""

import json
from types import SimpleNamespace

import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.rule import Drawn
from rollalloc.core.teaching import Selection


def test_means_of_a_batch_by_hand_and_after_a_load(drive):
    """Two groups of two are sampled: 1, 0 is trained on, 1, 1 is not; every rollout has ten tokens."""
    driver = drive(recipes.dapo(1, 2, gen_groups=2), 2, {0: [1.0, 0.0], 1: [1.0, 1.0]})
    driver.until_batch()
    assert driver.allocator.selection.figures() == {
        "tokens_sampled": 10,
        "difficulty_sampled": pytest.approx(0.25),
        "tokens_trained": 10,
        "difficulty_trained": 0.5,
    }
    copy = Allocator(driver.allocator.recipe, 2, 0)
    saved = json.loads(json.dumps(driver.allocator.state_dict()))
    copy.load_state_dict(saved)
    assert copy.selection.figures() == driver.allocator.selection.figures()
    driver.update()
    assert set(driver.allocator.selection.figures().values()) == {None}
    saved["selection"]["trained"][1] = "many"
    with pytest.raises(ValueError, match=r"selection: .*expected a number that is finite, got 'many'"):
        copy.load_state_dict(saved)


def group_of(lengths, metrics=(), predicted=None):
    """A group that is over: the tokens of each rollout, those that were stopped included."""
    done = [SimpleNamespace(metric=metric) for metric in metrics]
    return SimpleNamespace(lengths=list(lengths), done=done, drawn=Drawn(0, predicted))


def test_sums_of_selection_by_hand():
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
