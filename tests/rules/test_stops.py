"""Stop rules: which rollouts are cancelled before they end."""

from collections import Counter

import numpy as np
import pytest

from rollalloc.core.group import GroupView
from rollalloc.core.seeds import rng
from rollalloc.rules.stops import SampledTail


def stopped(rule, group, seed=0):
    return list(rule(group, None, rng(seed, "stop")))


@pytest.mark.parametrize(
    ("group", "count"),
    [
        (GroupView.of([1, 0, 1], running=[9, 9, 9, 9]), 3),  # K = 3 are there: one of four is kept
        (GroupView.of([1, 0], running=[9, 9, 9, 9]), 0),  # not yet
        (GroupView.of([1, 0, 1], running=[9]), 0),  # no more run than are to be kept
        (GroupView.of([1, 0, 1], truncated=[True, False, False], running=[9, 9]), 0),  # truncated ones do not count
        (GroupView.of([1, 0, 1], running=[9, 9], cancelled=1), 0),  # sampled once, not again and again
        (GroupView.of([1, 0, 1]), 0),
    ],
)
def test_sampled_tail_by_hand(group, count):
    named = stopped(SampledTail(3, 1), group)
    assert len(named) == len(set(named)) == count
    assert set(named) <= group.running.keys()


def test_without_a_tail_all_are_stopped_at_once():
    assert stopped(SampledTail(2, 0), GroupView.of([1, 0], running=[5, 7])) == [2, 3]


def test_the_sample_is_uniform():
    """3,000 draws of one of four: each count within 5 standard deviations with probability above 1 - 1e-5."""
    group, draws = GroupView.of([1, 0], running=[1, 2, 3, 4]), 3000
    kept = Counter(
        rollout
        for seed in range(draws)
        for rollout in group.running.keys() - set(stopped(SampledTail(2, 1), group, seed))
    )
    assert sum(kept.values()) == draws
    assert all(abs(kept[r] - draws / 4) < 5 * np.sqrt(draws * 3 / 16) for r in group.running)


def test_sampled_tail_refuses():
    with pytest.raises(ValueError, match="enough"):
        SampledTail(0, 1)
    with pytest.raises(ValueError, match="tail"):
        SampledTail(1, -1)
