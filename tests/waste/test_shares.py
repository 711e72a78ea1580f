"""Shares by cause: hand-made groups, the laws of an estimator, and how often its interval covers the truth."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logged import Group, columns

from rollalloc.waste import shares
from rollalloc.waste.shares import CAUSES, LEAST_PROMPTS

NAN = float("nan")


def group(*rewards, prompt="a", step=0, truncated=None):
    return Group(prompt, step, rewards, truncated)


def shares_of(groups):
    return shares.shares_of(columns(groups))


def drift(groups):
    return shares.drift(columns(groups))


@pytest.mark.parametrize(
    ("rewards", "truncated", "expected"),
    [
        ((0, 1, 1), 0, {"taught": 3}),
        ((1, 1, 1), 3, {"all_right": 3}),
        ((0, 0, 0), 2, {"all_wrong": 3}),
        ((0, 0, 0), 3, {"all_truncated": 3}),
        ((0, 0, 0), None, {"all_wrong": 3}),
        ((0.5, 0.5), 0, {"all_alike": 2}),
        ((1, NAN, NAN), 0, {"single": 1, "unscored": 2}),
        ((NAN, NAN), 0, {"unscored": 2}),
        ((0, 1, NAN), 0, {"taught": 2, "unscored": 1}),
        ((NAN, NAN, 0, 0), 2, {"all_wrong": 2, "unscored": 2}),  # those that reached the limit have no score
    ],
)
def test_a_group_is_booked_by_what_its_rewards_were(rewards, truncated, expected):
    extremes = [group(0, 1, prompt=str(number)) for number in range(2)]  # so that 0 is wrong and 1 is right
    found = shares_of([*extremes, group(*rewards, truncated=truncated)])
    expected = {**dict.fromkeys(CAUSES, 0), **expected}
    expected["taught"] += 4
    assert found.rollouts == expected


@pytest.mark.parametrize(("reward", "cause"), [(0, "all_wrong"), (1, "all_right"), (-1, "all_wrong")])
def test_where_all_rewards_are_the_same_those_above_0_are_right(reward, cause):
    assert shares_of([group(reward, reward)]).rollouts[cause] == 2


def test_a_threshold_turns_graded_rewards_into_right_and_wrong():
    graded = [group(0.01, 0.05, 0.0), group(1.0, 0.6, NAN)]
    assert shares_of(graded).rollouts["taught"] == 5
    told = shares.shares_of(columns(graded).judged(0.5))
    assert (told.rollouts["all_wrong"], told.rollouts["all_right"], told.rollouts["unscored"]) == (3, 2, 1)


rewards = st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=1, max_size=6)
logs = st.lists(st.tuples(st.sampled_from("abcdefghijklmn"), rewards), min_size=1, max_size=30)


@given(logs)
def test_every_rollout_has_one_cause_and_the_shares_sum_to_one(log):
    found = shares_of([group(*rewards, prompt=prompt) for prompt, rewards in log])
    assert sum(found.rollouts.values()) == sum(len(rewards) for _, rewards in log)
    assert sum(share.value for share in found.shares.values()) == pytest.approx(1)
    assert found.wasted.value == pytest.approx(1 - found.shares["taught"].value)
    for share in found.shares.values():
        assert (share.interval is None) == (found.prompts < LEAST_PROMPTS)
        assert share.interval is None or 0 <= share.interval[0] <= share.interval[1] <= 1


@given(logs, st.randoms())
def test_neither_the_order_of_groups_nor_of_rollouts_matters(log, random):
    mixed_up = [(prompt, random.sample(rewards, len(rewards))) for prompt, rewards in random.sample(log, len(log))]
    first, second = (shares_of([group(*rewards, prompt=prompt) for prompt, rewards in one]) for one in (log, mixed_up))
    assert first == second


def test_a_share_of_zero_has_the_exact_upper_limit():
    found = shares_of([group(0, 1, prompt=str(number)) for number in range(50)])
    assert found.wasted.interval == pytest.approx((0, 1 - 0.025 ** (1 / 50)))


def test_drift_compares_the_first_and_the_last_third_of_the_steps():
    log = [group(0, int(step < 4), prompt=str(number), step=step) for step in range(9) for number in range(12)]
    early, late = drift(log)
    assert (early.value, late.value) == (0, 1)
    assert drift(log[:24]) is None


@given(logs, st.integers(0, 3))
def test_rollouts_of_the_first_order_are_the_first_of_each_group(log, first):
    groups = columns(Group(prompt, 0, rewards, None, first) for prompt, rewards in log)
    some = [Group(prompt, 0, rewards[:first]) for prompt, rewards in log if first]
    found = groups.first()
    assert found.size_V.tolist() == [len(group.rewards) for group in some] == found.first_V.tolist()
    assert np.array_equal(found.rewards_R, np.concatenate([[], *(group.rewards for group in some)]), equal_nan=True)
