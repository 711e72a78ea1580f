"""Size rules: how many rollouts each group gets."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc import recipes
from rollalloc.core.group import GroupView
from rollalloc.core.rule import View
from rollalloc.core.statistics import PromptStatistics
from rollalloc.rules.rows import LongestBySize
from rollalloc.rules.sizes import Fixed, Knapsack, Priced, Redundant

NAN = float("nan")


def sizes(rule, stds, rows=None):
    statistics = PromptStatistics(len(stds))
    statistics.length_std_N[:] = stds
    view = View.of(len(stds), statistics=statistics, rows=rows)
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
        ([5.0, 5.0], [3, 3]),  # 2 rows, 1.5 rollouts per row on average
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


@pytest.mark.parametrize(
    ("stds", "least", "normalise", "expected"),
    [
        ([1.0, 3.0], 1, False, [9, 15]),  # 8 rows, 12 rollouts on average, at most 16
        ([1.0, 3.0], 10, False, [10, 14]),
        ([2.0, 3.0], 10, False, [11, 13]),
        ([2.0, 3.0], 10, True, [10, 14]),  # 0 and 1: the first gets no more than the floor
        ([2.0, 2.0], 10, True, [12, 12]),
        ([7.0], 10, True, [12]),
        ([1.0, 3.0], 13, False, [13, 13]),  # above the mean: the floor holds
        ([1.0, 3.0], 99, False, [16, 16]),  # and no more than may be
    ],
)
def test_no_group_gets_fewer_than_the_floor(stds, least, normalise, expected):
    assert sizes(Redundant(1.5, 2.0, least, normalise), stds, rows=8) == expected


def test_a_floor_of_darts_is_of_the_rows_and_below_the_mean():
    assert recipes.darts(4, 7, 1, least=10, normalise=True).stages[0].size == Redundant(1.5, 2.0, 10, True)
    for least, says in (
        (7, r"least must be a whole number of at least 8 \(8 rollouts of each group are trained on\), got 7"),
        (13, "least=13 is above the 12 rollouts that a group has on average"),
        (10.0, "least must be a whole number"),
    ):
        with pytest.raises(ValueError, match=says):
            recipes.darts(4, 7, 1, least=least)
    with pytest.raises(ValueError, match="leave them out, or latency"):
        recipes.darts(4, 7, 1, least=10, latency=((1, 1.0),))
    with pytest.raises(ValueError, match="least must be a whole number of at least 1, got 0"):
        Redundant(1.5, 2.0, 0)


def test_redundant_refuses():
    for mean, most in ((0.5, 2.0), (2.5, 2.0)):
        with pytest.raises(ValueError, match="expected 1 <= mean_factor <= max_factor"):
            Redundant(mean_factor=mean, max_factor=most)
    with pytest.raises(ValueError, match=r"the view does not say how many rows .*; give View.of\(rows=...\)"):
        sizes(Redundant(1.5, 2.0), [1.0, 2.0])


def test_the_statistics_length_deviation_is_a_running_mean_with_step_three_tenths():
    ledger = PromptStatistics(1)
    for lengths, expected in (([10, 30], 10.0), ([5], 10.0), ([7, 7], 7.0), ([], 7.0), ([0, 34], 10.0)):
        ledger.see_lengths(0, lengths, [])
        assert ledger.length_std_N[0] == np.float32(expected)


def test_the_recorded_length_deviation_is_a_running_mean_with_step_three_tenths():
    statistics = PromptStatistics(1)
    for lengths, expected in (([10, 30], 10.0), ([5], 10.0), ([7, 7], 7.0), ([], 7.0), ([0, 34], 10.0)):
        statistics.see_lengths(0, lengths, [])
        assert statistics.length_std_N[0] == np.float32(expected)


def knapsack(rule, predictions):
    groups = [GroupView.of([], prompt=g, group=g, predicted=predicted) for g, predicted in enumerate(predictions)]
    return list(rule(groups, View.of(len(predictions)), {}))


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        ([None, None, None], [4, 4, 4]),
        ([None], [4]),
        ([0.25], [4]),  # alone, it has them all
        ([1.0, 0.25], [2, 6]),
        ([1.0, 0.0], [2, 6]),  # nothing contested: all for the one that failed
        ([1.0, 1.0], [4, 4]),
        ([1.0, None], [4, 4]),
        (
            [0.5, 0.0],
            [5, 3],
        ),  # three more show both outcomes of a fair coin with probability 0.9; the failed one has the rest
        ([0.9, 0.1], [2, 6]),  # as likely to be mixed, and nine times as much to learn
        ([1.0, 1.0, 1.0, 0.1], [3, 3, 2, 8]),  # 8 at most
    ],
)
def test_knapsack_by_hand(predictions, expected):
    assert knapsack(Knapsack(4, most=8), predictions) == expected


@given(
    st.lists(st.sampled_from([0.05, 0.25, 0.5, 0.8, 0.95]), min_size=1, max_size=4),
    st.integers(2, 4),
    st.integers(0, 3),
)
def test_knapsack_finds_the_best_of_all_allocations(predictions, mean, more):
    """Where all are contested nothing is set aside: no other way to spend the same is worth more."""
    rule = Knapsack(mean, least=2, most=mean + more)

    def value(sizes_G):
        return sum((1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2 for p, n in zip(predictions, sizes_G, strict=True))

    ways = product(range(2, mean + more + 1), repeat=len(predictions))
    best = max(value(way) for way in ways if sum(way) == mean * len(predictions))
    made = knapsack(rule, predictions)
    assert sum(made) == mean * len(predictions)
    assert value(made) == pytest.approx(best)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mean_n": 1}, "mean_n must be a whole number of at least 2"),
        ({"mean_n": 4, "least": 0}, "least must be"),
        ({"mean_n": 4, "most": 3}, "most must be a whole number of at least 4"),
        ({"mean_n": 4, "sure": 1.0}, "sure must be in"),
    ],
)
def test_knapsack_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        Knapsack(**wrong)


def priced(latency, laws, rows=4, longest=1, most=2.0):
    """Sizes for prompts of these means and deviations of the logarithm of lengths."""
    statistics = PromptStatistics(len(laws), laws=True)
    statistics.log_length_2N[:] = np.array([(mean, std**2) for mean, std in laws]).T
    statistics.length_std_N[:] = 1.0
    view = View.of(len(laws), statistics=statistics, rows=rows, longest=longest)
    return list(Priced(most, latency)([GroupView.of([], prompt=g, group=g) for g in range(len(laws))], view, {}))


WIDE, NARROW = (5.0, 0.9), (5.0, 0.01)
FLAT, STEEP = (
    ((1, 1.0), (100, 1.0)),
    ((1, 0.01), (100, 1.0)),
)  # a token costs the same beside others; or by their number


def test_the_time_is_that_of_a_batch_told_out_by_hand():
    """Two lengths' worth of time: 3 rollouts of a group run, then, one having ended, the others but one are stopped."""
    longer_GX = np.array([[1.0, 2 / 3, 1 / 3, 0.0]])
    rule = Priced(2.0, ((1, 1.0), (3, 2.0)))
    # 3 running: 2 s; then 1 ended and K = 1: one of two goes on, 1 s; it still runs then with chance 1/2; then it does not
    assert rule.seconds(np.array([3]), np.array([1]), 2, longer_GX, 10.0) == pytest.approx(10 * (2 + 1 + 1 / 2))
    # without a tail: over when the first has ended
    assert rule.seconds(np.array([3]), np.array([0]), 1, longer_GX, 10.0) == pytest.approx(10 * 2)
    # beyond the last point they wait for each other
    assert rule.seconds(np.array([6]), np.array([0]), 9, longer_GX, 1.0) == pytest.approx(2 * 6 / 3 + 2 * 4 / 3 + 1.5)


def test_where_more_rollouts_leave_no_longest_more_of_them_pay():
    """Four rows, 3 + 1 of up to 6, and 4 + 0 from 7 on: the tail goes, and its time, which 5 with one longest does not."""
    statistics = PromptStatistics(1, laws=True)
    statistics.log_length_2N[:], statistics.length_std_N[:] = np.array([[5.0], [0.81]]), 1.0
    groups, price = [GroupView.of([], prompt=0)], Priced(2.0, ((1, 1.0), (32, 17.0)))
    rule = LongestBySize(3, 1)
    view = View.of(1, statistics=statistics, rows=4, longest=1)
    assert [list(price(groups, each, {})) for each in (view, view._replace(row_rule=rule))] == [[5], [7]]
    assert [rule.longest_of(groups, [n], view) for n in (4, 6, 7, 8)] == [[1], [1], [0], [0]]


def test_without_a_law_half_of_the_redundancy_is_given():
    assert sizes(Priced(2.0, FLAT), [NAN, NAN], rows=4) == [6, 6]
    assert priced(FLAT, [(NAN, NAN), (NAN, NAN)]) == [6, 6]
    assert sum(priced(STEEP, [(NAN, NAN), NARROW])) == 8  # the other's law


def test_a_prompt_without_a_law_has_the_mean_of_the_others():
    """Of the logarithm's mean, and of its variance."""
    short, long, between = (3.0, 0.6), (5.0, 0.8), (4.0, np.sqrt((0.6**2 + 0.8**2) / 2))
    unknown, known, wider, longer = (
        priced(((1, 1.0), (32, 3.0)), [short, long, each], most=4.0)
        for each in ((NAN, NAN), between, (4.0, 0.9), (4.6, 0.7))
    )
    assert unknown == known
    assert unknown not in (wider, longer)


@pytest.mark.parametrize(
    "latency", [(), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 0.0),), ((1, 1.0), (1, 2.0)), "fast", 3]
)
def test_a_curve_is_refused_that_is_none(latency):
    with pytest.raises(ValueError, match="latency must be pairs of rollouts"):
        Priced(2.0, latency)
    with pytest.raises(ValueError, match="max_factor must be at least 1"):
        Priced(0.5, FLAT)


def test_redundancy_is_bought_where_it_is_free():
    assert sum(priced(FLAT, [WIDE] * 4)) == 32  # as many as there may be: the K-th ends sooner, and nothing is dearer
    assert sum(priced(STEEP, [WIDE] * 4)) < 32
    assert sum(priced(STEEP, [NARROW] * 4)) == 16  # equal lengths: nothing ends sooner, each one more is dearer


def test_the_price_of_redundancy_is_monotone():
    totals = [sum(priced(((1, 1.0), (32, 1.0 + slope)), [WIDE] * 4)) for slope in (0.0, 0.5, 2.0, 8.0, 32.0)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]
