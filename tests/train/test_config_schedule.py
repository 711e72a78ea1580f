"""Learning rates step by step, against tables and against the schedules of transformers."""

import math

import pytest

from rollalloc.core.recipe import Budget
from rollalloc.train.config import Schedule, check_budget, share_spent

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (Schedule(), [1, 1, 1]),
        (Schedule(warmup=4), [0.25, 0.5, 0.75, 1, 1, 1]),
        (Schedule(shape="linear", steps=4, floor=0.0), [1, 0.75, 0.5, 0.25, 0, 0]),
        (Schedule(shape="linear", steps=4, floor=0.2), [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (Schedule(warmup=2, shape="linear", steps=4, floor=0.2), [0.5, 1, 1, 0.6, 0.2, 0.2]),
        (Schedule(shape="cosine", steps=4, floor=0.0), [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0]),
        (Schedule(warmup=1, shape="cosine", steps=3), [1, 1, 0.55, 0.1, 0.1]),
        (Schedule(shape="linear", steps=1), [1, 0.1, 0.1]),
    ],
)
def test_a_schedule_gives_each_step_its_share_of_the_rate(schedule, shares):
    assert [schedule.share(step) for step in range(1, len(shares) + 1)] == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (Schedule(shape="linear", floor=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (Schedule(shape="cosine", floor=0.0), [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0]),
        (Schedule(warmup=2, shape="linear", floor=0.2), [0.5, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_without_steps_the_rate_falls_over_the_budget(schedule, shares):
    assert schedule.over_budget
    assert [schedule.share(1 + at, at / 4) for at in range(5)] == pytest.approx(shares, abs=1e-12)
    check_budget(schedule, Budget(), 5)
    check_budget(schedule, Budget(run_tokens=5), None)
    with pytest.raises(ValueError, match=r"there is none; give --max-rollouts .*or --schedule-steps"):
        check_budget(schedule, Budget(), None)
    check_budget(Schedule(), Budget(), None)
    check_budget(Schedule(shape="linear", steps=5), Budget(), None)


@pytest.mark.parametrize(
    ("budget", "max_batches", "share"),
    [
        (Budget(), None, None),
        (Budget(run_rollouts=80), None, 0.25),
        (Budget(run_tokens=100), None, 0.6),
        (Budget(run_rollouts=80, run_tokens=100), 30, 0.6),
        (Budget(run_rollouts=80), 4, 0.75),
        (Budget(run_rollouts=10), None, 1.0),
    ],
)
def test_the_share_spent_is_that_of_the_limit_that_binds(budget, max_batches, share):
    assert share_spent(budget, max_batches, 3, {"rollouts_paid": 20, "tokens_paid": 60}) == share
