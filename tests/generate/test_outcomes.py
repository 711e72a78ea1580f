"""How rollouts ended, as every engine and driver tells it."""

import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.allocator import MetricError
from rollalloc.core.events import Cancelled, Done, Failed, Order
from rollalloc.generate.outcomes import Outcomes, RolloutLog, RolloutResult, event_of, tell
from rollalloc.rewards.function import Scored, Unscored

SCORED = RolloutResult(rollout=0, outcome=Scored(0.5, 1.0), tokens=7, version=2, last_version=3, truncated=True)
FAILED = RolloutResult(rollout=1, outcome=Unscored("the reward took more than 5 s"), tokens=7, version=0)
STOPPED = RolloutResult(rollout=2, outcome=Scored(0.5, 1.0), tokens=4, version=0, cancelled=True)


@pytest.mark.parametrize(
    ("result", "event"),
    [
        (SCORED, Done(0, reward=0.5, metric=1.0, tokens=7, version=2, last_version=3, truncated=True)),
        (FAILED, Failed(1, "the reward took more than 5 s", tokens=7)),
        (STOPPED, Cancelled(2, tokens=4)),
    ],
)
def test_a_result_becomes_one_event(result, event):
    assert event_of(result) == event


def results_of(allocator, metric=1.0):
    """A scored, a failed and a stopped rollout of the first group."""
    first, second, third = allocator.ask().generate[0].rollouts
    return [
        RolloutResult(rollout=first, outcome=Scored(1.0, metric), tokens=7, version=0, truncated=True),
        RolloutResult(rollout=second, outcome=Unscored("no answer"), tokens=3, version=0),
        RolloutResult(rollout=third, outcome=Scored(1.0, 1.0), tokens=2, version=0, cancelled=True),
    ]


def test_the_core_is_told_each_outcome_and_outcomes_are_counted():
    """A stopped rollout is paid for, but it is neither scored nor failed, whatever score came with it."""
    allocator, outcomes = Allocator(recipes.grpo(1, 3), 1, seed=0), Outcomes()
    results = results_of(allocator)
    tell(allocator, results, outcomes=outcomes)
    assert [result.is_scored for result in results] == [True, False, False]
    assert (outcomes.ended, outcomes.truncated, outcomes.unscored) == (2, 1, {"no answer": 1})
    accounts = allocator.accounts()
    assert (accounts["open"], accounts["failed"], accounts["cancelled"]) == (1, 1, 1)


def test_a_metric_that_is_no_success_rate_says_what_to_do():
    allocator = Allocator(recipes.mopps(1, 3), 1, seed=0)
    with pytest.raises(MetricError, match=r"\. Return an accuracy$"):
        tell(allocator, results_of(allocator, metric=3.0), remedy="Return an accuracy")


@pytest.mark.parametrize(("limit", "logged"), [(None, False), (7, True), (8, False), (9, False)])
def test_the_log_has_a_limit_only_where_it_is_below_the_maximum_of_every_rollout(limit, logged):
    """With both at 8, nobody knows which of them stopped a rollout of 8 tokens."""
    log = RolloutLog(None, keep=1, most=8)
    log.add(SCORED, Order(0, 0, 0, (0,), limit), "key", "text")
    (line,) = log.taken()
    assert line.get("limit") == (limit if logged else None)
    assert ("limit" in line) == logged
