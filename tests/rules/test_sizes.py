"""Size rules: how many rollouts each group gets."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc.core.group import GroupView
from rollalloc.core.ledger import Ledger
from rollalloc.core.recipe import View
from rollalloc.rules.sizes import Fixed, Redundant

NAN = float("nan")


def sizes(rule, stds, rows=None):
    ledger = Ledger(len(stds))
    ledger.length_std_N[:] = stds
    view = View.of(len(stds), ledger=ledger, rows=rows)
    return list(rule([GroupView.of([], prompt=g, group=g) for g in range(len(stds))], view, {}))


def objective(stds, sizes_G):
    return sum(std / size for std, size in zip(stds, sizes_G, strict=True))


def test_fixed():
    assert sizes(Fixed(3), [1.0, 9.0]) == [3, 3]
    with pytest.raises(ValueError, match="n must be a whole number of at least 1, got 0"):
        Fixed(0)


@pytest.mark.parametrize(
    ("stds", "expected"),
    [
        ([5.0, 5.0], [3, 3]),  # 2 rows, 1.5 rollouts a row on average
        ([0.0, 5.0], [2, 4]),  # what varies gets the spare ones, up to twice the rows
        ([0.0, 0.0], [3, 3]),  # equal lengths: the spare ones go round
        ([NAN, NAN], [3, 3]),
        ([NAN, 1.0, 3.0], [3, 2, 4]),  # without a record: the mean, 2
        ([7.0], [3]),
    ],
)
def test_redundant_by_hand(stds, expected):
    assert sizes(Redundant(mean_factor=1.5, max_factor=2.0), stds, rows=2) == expected


@given(
    stds=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    mean=st.sampled_from([1.0, 1.25, 1.5, 2.0]),
)
def test_redundant_is_optimal_within_its_bounds(stds, rows, mean):
    sizes_G = sizes(Redundant(mean_factor=mean, max_factor=2.0), [float(std) for std in stds], rows)
    total = round(mean * rows * len(stds))
    assert sum(sizes_G) == total
    assert all(rows <= size <= 2 * rows for size in sizes_G)
    allowed = product(range(rows, 2 * rows + 1), repeat=len(stds))
    best = min(objective(stds, other) for other in allowed if sum(other) == total)
    assert objective(stds, sizes_G) == pytest.approx(best, rel=1e-9)


def test_the_most_is_what_the_factor_says():
    """1.15 * 100 is a little less than 115 in floating point."""
    assert sizes(Redundant(mean_factor=1.15, max_factor=1.15), [1.0], rows=100) == [115]


def test_redundant_refuses():
    for mean, most in ((0.5, 2.0), (2.5, 2.0)):
        with pytest.raises(ValueError, match="expected 1 <= mean_factor <= max_factor"):
            Redundant(mean_factor=mean, max_factor=most)
    with pytest.raises(ValueError, match=r"the view does not say how many rows .*; give View.of\(rows=...\)"):
        sizes(Redundant(1.5, 2.0), [1.0, 2.0])


def test_the_ledgers_length_deviation_is_a_running_mean_with_step_three_tenths():
    ledger = Ledger(1)
    for lengths, expected in (([10, 30], 10.0), ([5], 10.0), ([7, 7], 7.0), ([], 7.0), ([0, 34], 10.0)):
        ledger.see_lengths(0, lengths, [])
        assert ledger.length_std_N[0] == np.float32(expected)
