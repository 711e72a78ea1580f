"""Row rules: which rollouts of a group are trained on."""

from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc.core.group import GroupView
from rollalloc.core.seeds import rng
from rollalloc.recipes.darts import ShortestAndLongest, longest_rows
from rollalloc.recipes.pilot_commit import SubsampledPilots
from rollalloc.rules import rows
from rollalloc.rules.rows import max_variance_subset

NO_VIEW = None  # none of these rules looks at the run


def choose(rule, group, seed=0):
    chosen_M, weights_M = rule(group, NO_VIEW, rng(seed, "rows", 0))
    return chosen_M.tolist(), weights_M.tolist()


def best_variance(rewards_G, m):
    return max(np.var(np.array(subset)) for subset in combinations(rewards_G, m))


@pytest.mark.parametrize(
    ("metrics", "pilots", "n", "kept"),
    [
        ([0, 0, 1, 0, 1, 0, 1, 1], 6, 2, [0, 4, 6, 7]),
        ([0, 0, 1, 0, 1, 0, 1, 1], 6, 3, [0, 1, 4, 6, 7]),  # of an odd number one wrong more
        ([1, 1, 1, 0, 0, 0], 4, 3, [0, 1, 3, 4, 5]),
        ([1, 1, 1, 0], 4, 2, [0, 3]),  # no commits yet, or all failed
        ([1, 0, 0], 2, 2, [0, 1, 2]),
        ([1, 0, 0], 1, 2, [0, 1, 2]),  # failures left one
        ([0, 0], 0, 2, [0, 1]),
        ([0.1, 0.5, 0.9, 0.4, 0.4], 3, 2, [0, 2, 3, 4]),
    ],
)
def test_subsampled_pilots_by_hand(metrics, pilots, n, kept):
    stages = [int(g >= pilots) for g in range(len(metrics))]
    rewards = [-metric for metric in metrics[::-1]]  # selection looks at metrics
    group = GroupView.of(metrics, rewards=rewards, stages=stages)
    assert choose(SubsampledPilots(n), group) == (kept, [1.0] * len(kept))


# ------------------------------------------------------------------------------------------------- max_variance_subset


@given(
    values=st.lists(st.floats(-100, 100), min_size=1, max_size=9),
    offset=st.sampled_from([0.0, 1e3, -1e6]),
    data=st.data(),
)
def test_max_variance_subset_is_optimal(values, offset, data):
    m = data.draw(st.integers(1, len(values)))
    rewards_G = np.array(values) + offset
    chosen_M = max_variance_subset(rewards_G, m)
    assert len(set(chosen_M.tolist())) == m
    assert chosen_M.tolist() == sorted(chosen_M.tolist())
    best = best_variance(rewards_G - offset, m)
    assert np.var(rewards_G[chosen_M] - offset) >= best - 1e-6 * max(1.0, best)


# ------------------------------------------------------------------------------------------------------ the other rules


@pytest.mark.parametrize(
    ("rule", "rewards", "expected"),
    [
        (rows.Everything(), [0, 1, 0], [0, 1, 2]),
        (rows.MaxVariance(2), [0, 3, 1, 2], [0, 1]),
        (rows.MaxReward(2), [0, 3, 1, 2], [1, 3]),
        (rows.MaxReward(2), [1, 1, 1, 0], [0, 1]),  # among equals the first ordered
        (rows.Percentile(2), [10, 40, 20, 30], [1, 2]),  # the quantiles 1/4 and 3/4
        (rows.Percentile(4), list(range(8)), [1, 3, 5, 7]),
        (rows.Percentile(1), [5, 1, 3], [2]),  # the median
        (rows.MaxVariance(4), [0, 1], [0, 1]),  # failures left fewer than m
        (rows.Random(4), [0, 1, 1], [0, 1, 2]),
    ],
)
def test_rows_by_hand(rule, rewards, expected):
    """By the reward: by the metric, the last rollout would be the best, and the others alike."""
    group = GroupView.of([*[0] * (len(rewards) - 1), 1], rewards=rewards)
    assert choose(rule, group) == (expected, [1.0] * len(expected))


def test_random_has_uniform_marginals():
    """4,000 draws of 2 of 6: each count is within 5 standard deviations of 4000/3 with probability above 1 - 1e-5."""
    group, draws = GroupView.of([0, 1, 0, 1, 0, 1]), 4000
    count_G = np.bincount([g for seed in range(draws) for g in choose(rows.Random(2), group, seed)[0]], minlength=6)
    assert count_G.sum() == 2 * draws
    assert (np.abs(count_G - draws / 3) < 5 * np.sqrt(draws * (1 / 3) * (2 / 3))).all()


@pytest.mark.parametrize(
    ("tokens", "truncated", "expected"),
    [
        ([50, 10, 40, 20, 30], None, [0, 1, 3]),  # 10, 20 and 50; not the last that finished
        ([50, 10, 40, 20, 30], [True, False, False, False, False], [1, 2, 3]),  # what was truncated is not the longest
        ([50, 10, 40], [True, True, False], [0, 1, 2]),  # truncated only where nothing else is left
        ([50, 10, 40, 60], [True, True, True, False], [1, 2, 3]),  # the shortest of the truncated first
        ([7, 7, 7, 7, 7], None, [0, 1, 4]),  # equal lengths: by rollout
        ([9, 8], None, [0, 1]),  # failures left fewer than K + L
    ],
)
def test_shortest_and_longest_by_hand(tokens, truncated, expected):
    group = GroupView.of([0] * len(tokens), tokens=tokens, truncated=truncated)
    assert choose(ShortestAndLongest(2, 1), group) == (expected, [1.0] * len(expected))


@pytest.mark.parametrize(
    ("shortest", "longest", "by_size"),
    [
        (7, 1, {8: 1, 9: 1, 13: 1, 14: 1, 15: 0, 16: 0, 24: 0}),  # the released min((16 - r) // 2, 1)
        (4, 4, {8: 4, 9: 3, 10: 3, 11: 2, 12: 2, 13: 1, 14: 1, 15: 0, 16: 0, 20: 0}),  # and max((16 - r) // 2, 0)
        (3, 0, {3: 0, 4: 0}),
        (1, 2, {3: 1, 4: 1, 5: 0}),
    ],
)
def test_a_group_of_more_rollouts_keeps_fewer_longest_rows(shortest, longest, by_size):
    rows = shortest + longest
    assert [longest_rows(longest, True, rows, size) for size in by_size] == list(by_size.values())
    assert {longest_rows(longest, False, rows, size) for size in by_size} == {longest}


@pytest.mark.parametrize(
    ("tokens", "kept", "truncated", "expected"),
    [
        # Two of five that ran were kept: each stands for 5/2, whichever is longer.
        ([10, 20, 40, 50], {2: 0.4, 3: 0.4}, (), {0: 1, 1: 1, 2: 2.5, 3: 2.5}),
        ([500, 600, 60], {2: 0.25}, (), {0: 1, 1: 1, 2: 4}),  # the late one is the shortest
        ([500, 60, 600], {1: 0.25}, (), {0: 1, 1: 4, 2: 1}),  # and was not ordered last
        ([500, 600, 700, 60], {3: 0.25}, (), {0: 1, 1: 1, 3: 4}),  # 700 had ended as well: neither K shortest nor late
        ([500, 600, 700, 60], {3: 0.25}, (0,), {1: 1, 2: 1, 3: 4}),  # one that had ended was truncated
        (
            [10, 20, 50],
            {2: 0.4, 9: 0.4},
            (),
            {0: 1, 1: 1, 2: 2.5},
        ),  # one of the two kept failed: the other's weight stays
        ([10, 20, 50, 90], {2: 0.4, 3: 0.4}, (3,), {0: 1, 1: 1, 2: 2.5}),  # or was truncated
        ([10, 20, 90], {2: 0.25}, (2,), {0: 1, 1: 1}),
        ([10, 20, 30, 90], {3: 0.25}, (3,), {0: 1, 1: 1}),  # nothing takes its place
        ([10, 20, 30], {2: 1.0}, (), {0: 1, 1: 1, 2: 1}),  # nothing was stopped
        ([30, 20, 40, 10], {3: 1.0}, (), {0: 1, 1: 1, 3: 1}),
        ([10, 20, 30, 40, 50], {}, (), {0: 1, 1: 1, 3: 1, 4: 1}),  # all ended at once: the L longest
    ],
)
def test_a_sampled_tail_stands_for_the_rollouts_that_were_stopped(tokens, kept, truncated, expected):
    group = GroupView.of(
        [0] * len(tokens), tokens=tokens, kept=kept, truncated=[g in truncated for g in range(len(tokens))]
    )
    chosen, weights = choose(ShortestAndLongest(2, 2), group)
    assert dict(zip(chosen, weights, strict=True)) == pytest.approx(expected)
    assert group.kept_G.tolist() == [kept.get(g, 1.0) for g in range(len(tokens))]


def released_pods(rewards, m):
    """How many of the highest rewards PODS's released loop takes: all m, or the first i from 0 on with a larger variance."""
    order = sorted(rewards, reverse=True)

    def variance(high):
        kept = order[:high] + order[len(order) - (m - high) :]
        return m * sum(Fraction(each) ** 2 for each in kept) - sum(map(Fraction, kept)) ** 2

    best = m
    for high in range(m):
        if variance(high) > variance(best):
            best = high
    return variance(best), sorted(order[:best] + order[len(order) - (m - best) :])


def test_the_subset_of_pods_is_that_of_its_released_loop_also_where_several_have_the_same_variance():
    """Of equal ones ours has the fewest right; theirs is the m highest, where these are among them, and else ours."""
    for right, wrong, m in product(range(7), range(7), range(2, 9)):
        rewards = [1.0] * right + [0.0] * wrong
        if m <= len(rewards):
            kept = sorted(rewards[g] for g in max_variance_subset(rewards, m))
            released = released_pods(rewards, m)[1]
            begins_with_the_highest = released == sorted(rewards)[-m:]
            assert kept == released or (begins_with_the_highest and sum(kept) == sum(released) - 1), (right, wrong, m)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=10), st.data())
def test_the_subset_of_pods_has_the_variance_of_its_released_loop(rewards, data):
    """Of graded rewards, subsets of the same variance may differ."""
    m = data.draw(st.integers(1, len(rewards)))
    kept = [Fraction(rewards[g]) for g in max_variance_subset(list(map(float, rewards)), m)]
    assert m * sum(each**2 for each in kept) - sum(kept) ** 2 == released_pods(rewards, m)[0]


@pytest.mark.parametrize(
    ("m", "metrics", "expected"),
    [
        (4, [1, 1, 1, 0, 0, 0], [0, 1, 3, 4]),  # the first ordered of each
        (4, [1, 1, 1, 1, 1, 0], [0, 1, 2, 5]),  # one failure: the rest are successes
        (4, [0, 0, 0, 0, 1, 0], [0, 1, 2, 4]),
        (4, [1, 1, 1, 1, 1], [0, 1, 2, 3]),
        (3, [1, 1, 0, 0], [0, 2, 3]),
        (4, [0.9, 0.7, 0.2, 1, 1], [0, 1, 2, 3]),  # a success is above 0.7
        (4, [1, 0, 1], [0, 1, 2]),
    ],
)
def test_balanced_by_hand(m, metrics, expected):
    group = GroupView.of(metrics, rewards=[-metric for metric in metrics])  # the reward counts for nothing
    assert choose(rows.Balanced(m), group) == (expected, [1.0] * len(expected))
