"""What an evaluation under TRL says of several completions, by hand."""

import pytest

from rollalloc.drivers.trl.callback import evaluated_figures
from rollalloc.drivers.trl.rewards import RewardFunctions

SCORES = [[1.0, 0.0], [1.0, 9.0], [None, None], [1.0, 0.0], [0.0, 9.0], [0.5, 0.0], [None, 0.0], [None, 0.0]]
COMPLETIONS = [[5], [6], [7], [5], [5], [6], [5], [6]]


@pytest.fixture
def rewards():
    return RewardFunctions([len, len], ["right", "style"], [1.0, 0.5], [None, None], metric="right")


def test_metrics_of_an_evaluation_by_hand(rewards):
    """Two prompts, four completions each; what the metric names counts, not the weighted reward."""
    found = evaluated_figures(rewards, SCORES, COMPLETIONS, 4)
    assert found["rollalloc/breadth/pass_at_k"] == pytest.approx((1 + 0.5) / 2)
    assert found["rollalloc/breadth/full_marks"] == pytest.approx((3 / 3 + 0) / 2)  # of those with a score
    assert found["rollalloc/breadth/distinct_right"] == pytest.approx((2 + 0) / 2)
    assert found["rollalloc/breadth/right_pairs_differ"] == pytest.approx(2 / 3)


def test_an_incomplete_evaluation_reports_scores_only(rewards):
    assert evaluated_figures(rewards, SCORES, COMPLETIONS[:4], 4).keys() == {
        "rollalloc/breadth/pass_at_k",
        "rollalloc/breadth/full_marks",
    }


@pytest.mark.parametrize("scores", [[], SCORES[:3], [[None, 1.0]] * 4], ids=["none", "no whole group", "no score"])
def test_an_unknown_metric_is_not_reported(rewards, scores):
    assert evaluated_figures(rewards, scores, COMPLETIONS[: len(scores)], 4) == {}


@pytest.mark.parametrize(("weights", "told"), [([1.0, 0.5], False), ([2.0, 0.0], False), ([1.0, 0.0], True)])
def test_a_weighted_sum_of_rewards_gives_no_accuracy(weights, told):
    rewards = RewardFunctions([len, len], ["right", "style"], weights, [None, None])
    assert bool(evaluated_figures(rewards, SCORES, COMPLETIONS, 4)) == told
