"""Stop rules: which rollouts are cancelled before they end."""

# pyright: reportAttributeAccessIssue=false

from collections import Counter

import numpy as np
import pytest

from rollalloc.core.group import GroupView
from rollalloc.core.rule import SampledStops, View
from rollalloc.core.seeds import rng
from rollalloc.recipes.darts import SampledTail


def made(group, shortest, longest, seed=0):
    return SampledTail(longest)(group, View.of(rows=shortest + longest), rng(seed, "stop"))


@pytest.mark.parametrize(
    ("group", "stopped", "kept"),
    [
        (GroupView.of([1, 0, 1], running=4), 3, [1 / 4]),  # K = 3 are there: one of four is kept
        (GroupView.of([1, 0], running=4), 0, None),  # not yet
        (GroupView.of([1, 0, 1], running=1), 0, [1]),  # no more run than are to be kept
        (
            GroupView.of([1, 0, 1], truncated=[True, False, False], running=2),
            0,
            None,
        ),  # truncated ones do not count
        (GroupView.of([1, 0, 1], running=2, kept={3: 1 / 3}), 0, None),  # sampled once, not again and again
        (GroupView.of([1, 0, 1], running=2, kept={2: 1 / 3}), 1, [1 / 2]),  # in a stage before
        (GroupView.of([1, 0, 1]), 0, None),
    ],
)
def test_sampled_tail_by_hand(group, stopped, kept):
    decided = made(group, 3, 1)
    if kept is None:
        assert decided == ()
        return
    assert isinstance(decided, SampledStops)
    assert len(decided.cancel) == len(set(decided.cancel)) == stopped
    assert list(decided.kept.values()) == kept
    assert {*decided.cancel, *decided.kept} == {*group.running}


def test_the_sample_is_uniform():
    """3,000 draws of one of four: each count within 5 standard deviations with probability above 1 - 1e-5."""
    group, draws = GroupView.of([1, 0], running=4), 3000
    kept = Counter(rollout for seed in range(draws) for rollout in made(group, 2, 1, seed).kept)
    assert sum(kept.values()) == draws
    assert all(abs(kept[r] - draws / 4) < 5 * np.sqrt(draws * 3 / 16) for r in group.running)


@pytest.mark.parametrize(
    ("ended", "running", "stopped", "kept"),
    [
        (3, 1, 0, 1),  # 4 of 4: two of the rows are the longest, and one is left
        (3, 2, 1, 1),  # 5 of 4 rows: one is, so that K = 3
        (2, 3, 0, None),
        (3, 4, 0, None),  # 7: none is, and four rows are to be there
        (4, 4, 4, 0),
        (2, 2, 0, 2),
    ],
)
def test_by_size_a_group_is_stopped_by_the_longest_that_its_size_leaves(ended, running, stopped, kept):
    decided = SampledTail(2, by_size=True)(GroupView.of([1] * ended, running=running), View.of(rows=4), rng(0, "stop"))
    if kept is None:
        assert decided == ()
        return
    assert (len(decided.cancel), len(decided.kept)) == (stopped, kept)


def visits(successes, attempts):
    """The one visit that a prompt has had, with so many right rollouts of so many."""
    return [[1] * successes + [0] * (attempts - successes)] if attempts else []


@pytest.mark.parametrize(
    ("successes", "attempts", "is_solved"), [(9, 10, True), (8, 10, False), (0, 0, False), (10, 10, True)]
)
@pytest.mark.parametrize("late", [3, 1])
def test_a_solved_prompt_has_a_tail_in_a_share_of_its_visits(successes, attempts, is_solved, late):
    """2,000 seeds, a share of 1/4: the count within 5 standard deviations with probability above 1 - 1e-5."""
    group = GroupView.of([1, 1], running=late, visits=visits(successes, attempts))
    view, rule, seeds = View.of(rows=3), SampledTail(1, solved=0.9, share=0.25), 2000
    made = [rule(group, view, rng(seed, "stop")) for seed in range(seeds)]
    tails = [sample for sample in made if sample.kept]
    expected = seeds * (0.25 if is_solved else 1)
    assert abs(len(tails) - expected) <= 5 * np.sqrt(seeds * 3 / 16) * is_solved
    assert {chance for sample in tails for chance in sample.kept.values()} == {0.25 / late if is_solved else 1 / late}
    assert {len(sample.cancel) for sample in tails} == {late - 1}
    assert all(sorted(sample.cancel) == sorted(group.running) for sample in made if not sample.kept)


@pytest.mark.parametrize(
    ("attempts", "successes", "predicted", "solved"),
    [
        (0, 0, None, False),
        (0, 0, 0.95, True),
        (0, 0, 0.9, True),
        (0, 0, 0.85, False),
        (4, 4, 0.1, True),
        (4, 1, 0.95, False),
    ],
)
def test_a_prompt_without_a_record_is_solved_where_that_is_expected_of_it(attempts, successes, predicted, solved):
    """Three are there, of five that run none goes on: but for one visit in ten."""
    group = GroupView.of([1, 1, 1], running=5, predicted=predicted, visits=visits(successes, attempts))
    view = View.of(rows=4)
    made = [SampledTail(1, solved=0.9)(group, view, rng(8200, "stop", at)) for at in range(200)]
    assert all(len(each.kept) in (0, 1) for each in made)
    tails = sum(bool(each.kept) for each in made)
    assert (tails == 200) != solved
    if solved:  # 20 are expected of 200: beyond 5 or 40 once in 10,000
        assert 5 < tails < 40
        assert {share for each in made for share in each.kept.values()} == {0.1 / 5}
