"""Stop rules: which rollouts are cancelled before they end."""

from collections import Counter

import numpy as np
import pytest

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Sample, View
from rollalloc.core.seeds import rng
from rollalloc.rules.stops import SampledTail


def made(group, shortest, longest, seed=0):
    return SampledTail()(group, View.of(rows=shortest + longest, longest=longest), rng(seed, "stop"))


@pytest.mark.parametrize(
    ("group", "stopped", "kept"),
    [
        (GroupView.of([1, 0, 1], running=[9, 9, 9, 9]), 3, [1 / 4]),  # K = 3 are there: one of four is kept
        (GroupView.of([1, 0], running=[9, 9, 9, 9]), 0, None),  # not yet
        (GroupView.of([1, 0, 1], running=[9]), 0, [1]),  # no more run than are to be kept
        (
            GroupView.of([1, 0, 1], truncated=[True, False, False], running=[9, 9]),
            0,
            None,
        ),  # truncated ones do not count
        (GroupView.of([1, 0, 1], running=[9, 9], kept={3: 1 / 3}), 0, None),  # sampled once, not again and again
        (GroupView.of([1, 0, 1], running=[9, 9], kept={2: 1 / 3}), 1, [1 / 2]),  # in a stage before
        (GroupView.of([1, 0, 1]), 0, None),
    ],
)
def test_sampled_tail_by_hand(group, stopped, kept):
    decided = made(group, 3, 1)
    if kept is None:
        assert decided == ()
        return
    assert isinstance(decided, Sample)
    assert len(decided.cancel) == len(set(decided.cancel)) == stopped
    assert list(decided.kept.values()) == kept
    assert {*decided.cancel, *decided.kept} == group.running.keys()


def test_without_a_tail_all_are_stopped_at_once():
    assert made(GroupView.of([1, 0], running=[5, 7]), 2, 0) == Sample([2, 3], {})


def test_the_sample_is_uniform():
    """3,000 draws of one of four: each count within 5 standard deviations with probability above 1 - 1e-5."""
    group, draws = GroupView.of([1, 0], running=[1, 2, 3, 4]), 3000
    kept = Counter(rollout for seed in range(draws) for rollout in made(group, 2, 1, seed).kept)
    assert sum(kept.values()) == draws
    assert all(abs(kept[r] - draws / 4) < 5 * np.sqrt(draws * 3 / 16) for r in group.running)


def test_it_is_asked_once_k_rollouts_are_there():
    assert SampledTail().least_scored(View.of(rows=8, longest=1)) == 7
