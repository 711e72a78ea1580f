"""Promote rules: which of the groups that passed a stage go on."""

from collections import Counter

import numpy as np
import pytest

from rollalloc.core.group import GroupView
from rollalloc.core.rule import View
from rollalloc.core.seeds import rng
from rollalloc.rules.promote import MostRecent, Oldest, RandomOrder, TopVariance


def view(version=0, running=0, max_staleness=4):
    return View.of(version=version, need=4, held_S=(0, 0), running_S=(running, 0), max_staleness=max_staleness)


def promoted(rule, held, k, *, version=0, running=0, seed=0, max_staleness=4):
    return [group.group for group in rule(held, k, view(version, running, max_staleness), rng(seed, "promote"))]


def group(number, ones, count=4, version=0):
    """A group of so many right rollouts; their rewards, which count for nothing here, vary the more, the older it is."""
    metrics, rewards = [1] * ones + [0] * (count - ones), np.arange(count) / (1 + number)
    return GroupView.of(metrics, rewards=rewards, group=number, versions=[version] * count)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(1, 4), (2, 4), (4, 4), (3, 4)], [1, 3]),  # 1/4 and 3/4 have equal variance: the newer
        ([(2, 4), (2, 4), (1, 4), (2, 4)], [3, 1, 0]),
        ([(1, 10), (9, 10), (1, 10)], [2, 1, 0]),  # equal but for rounding
    ],
)
def test_top_variance_takes_the_highest_and_of_equals_the_newest(groups, expected):
    """Groups of so many right rollouts of so many."""
    held = [group(number, ones, count) for number, (ones, count) in enumerate(groups)]
    assert promoted(TopVariance(), held, len(expected)) == expected


def test_expiring_first_takes_groups_at_their_last_chance_before_all_others():
    held = [group(0, 1, version=1), group(1, 2, version=2), group(2, 2, version=5), group(3, 3, version=1)]
    rule = TopVariance(expiring_first=True)
    assert promoted(rule, held, 3, version=5) == [3, 0, 2]
    assert promoted(rule, held, 3, version=5, max_staleness=5) == [2, 1, 3]
    assert promoted(rule, [group(0, 1), group(1, 2)], 1, max_staleness=0) == [1]  # all are at their last chance
    assert promoted(TopVariance(), held, 3, version=5) == [2, 1, 3]  # nothing has priority for its age


def test_top_variance_waits_for_the_rounds_pilots():
    assert promoted(TopVariance(), [group(0, 2)], 1, running=1) == []
    assert promoted(TopVariance(), [group(0, 2)], 1) == [0]


def test_oldest_first_by_version_then_by_draw():
    held = [group(0, 2, version=3), group(1, 2, version=1), group(2, 2, version=1)]
    assert promoted(Oldest(), held, 2) == [1, 2]


def test_most_recent_by_version_then_by_draw():
    held = [group(0, 2, version=1), group(1, 2, version=3), group(2, 2, version=2), group(3, 2, version=3)]
    assert promoted(MostRecent(), held, 3) == [3, 1, 2]  # variances are equal, and would not matter
    assert promoted(MostRecent(), [group(0, 1), group(1, 2), group(2, 0)], 2) == [2, 1]
    assert promoted(Oldest(), held, 3) == [0, 2, 1]  # the other way round, which the released least_recent is not


def test_random_order_is_uniform_and_keyed():
    """3,000 draws of 2 of 5: each count within 5 standard deviations with probability above 1 - 1e-5."""
    held, draws = [group(number, 2) for number in range(5)], 3000
    count = Counter(g for seed in range(draws) for g in promoted(RandomOrder(), held, 2, seed=seed))
    assert sum(count.values()) == 2 * draws
    assert all(abs(count[g] - draws * 0.4) < 5 * np.sqrt(draws * 0.4 * 0.6) for g in range(5))
    assert promoted(RandomOrder(), held, 2, seed=7) == promoted(RandomOrder(), held, 2, seed=7)
    assert promoted(RandomOrder(), held, 9) == [0, 1, 2, 3, 4]
