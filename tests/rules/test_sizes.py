"""Size rules: how many rollouts each group gets."""

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc import recipes
from rollalloc.core.group import GroupView
from rollalloc.core.lengths import LogLengths
from rollalloc.core.rule import View
from rollalloc.core.statistics import PromptStatistics
from rollalloc.rules.rows import LongestBySize
from rollalloc.rules.sizes import Fixed, Knapsack, Priced, Redundant, _Running, cost

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
    with pytest.raises(ValueError, match="price weighs seconds, which latency says; give latency"):
        recipes.darts(4, 7, 1, price=1.0)
    priced = recipes.darts(4, 7, 1, least=10, normalise=True, latency=((1, 1.0),), price=2)
    assert priced.stages[0].size == Priced(2.0, ((1, 1.0),), 2, 10, True)
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


def statistics_of(laws):
    """Of prompts of these means and deviations of the logarithm of lengths; NaN: never visited."""
    statistics = PromptStatistics(len(laws), laws=True)
    for prompt, (mean, std) in enumerate(laws):
        if not np.isnan(mean):
            statistics.believe(prompt, LogLengths(mean, std**2))
    return statistics


def priced(latency, laws, rows=4, longest=1, most=2.0):
    """Sizes for prompts of these means and deviations of the logarithm of lengths."""
    statistics = statistics_of(laws)
    statistics.length_std_N[:] = 1.0
    view = View.of(len(laws), statistics=statistics, rows=rows, longest=longest)
    return list(Priced(most, latency)([GroupView.of([], prompt=g, group=g) for g in range(len(laws))], view, {}))


WIDE, NARROW = (5.0, 0.9), (5.0, 0.01)
FLAT, STEEP = (
    ((1, 1.0), (100, 1.0)),
    ((1, 0.01), (100, 1.0)),
)  # a token costs the same beside others; or by their number


def test_what_runs_is_counted_by_hand():
    """Each of a group's rollouts is longer than two lengths with chance 1 and 1/2, and than a third never."""
    running = _Running(np.array([[1.0, 1 / 2, 0.0]]), 3)

    def of(*given):
        share_X, running_X = running(*given)
        return share_X.tolist(), (share_X * running_X).tolist()

    tiny = pytest.approx(0, abs=1e-9)
    # Two, and over when the first has ended: both run with chance 1/4.
    assert of([2], [0], 1) == ([1, 1 / 4, tiny], [2, 2 / 4, tiny])
    # Two, and all are waited for: any runs with chance 3/4, one on average.
    assert of([2], [0], 2) == ([1, 3 / 4, tiny], [2, 1, tiny])
    # Three, the first and a random one of the two others: all run with chance 1/8. One has ended with 3/8: another goes on.
    # Two have, with 3/8: what was kept is the one left in half of them. So (3 · 1 + 1 · 3 + 1/2 · 3) / 8 run.
    assert of([3], [1], 2) == ([1, (1 + 3 + 3 / 2) / 8, tiny], [3, pytest.approx(7.5 / 8), tiny])
    # The first and the two others: nothing is stopped.
    assert of([3], [2], 3) == ([1, 7 / 8, tiny], [3, 3 / 2, tiny])


def test_the_chance_that_any_runs_is_over_all_groups():
    running = _Running(np.array([[1 / 2], [1 / 4]]), 2)
    share_X, running_X = running([1, 2], [0, 0], 1)  # chances 1/2 and 1/16, 1/2 and 2/16 run
    assert share_X.tolist() == [pytest.approx(1 - 1 / 2 * 15 / 16)]
    assert running_X.tolist() == [pytest.approx((1 / 2 + 2 / 16) / share_X[0])]


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 6), st.floats(0.05, 0.95))
def test_what_runs_is_what_chance_has_run(shortest, longest, more, longer):
    """Against every way in which some have ended, and every choice of those that go on."""
    size, rows = shortest + longest + more, shortest + longest
    share = mean = 0.0
    for ended in range(size + 1):
        chance = comb(size, ended) * (1 - longer) ** ended * longer ** (size - ended)
        late, at = size - shortest, ended - shortest  # of the late ones so many have ended
        if ended < shortest:
            share, mean = share + chance, mean + chance * (size - ended)
            continue
        kept = list(combinations(range(late), min(longest, late)))
        left = [sum(each >= at for each in those) for those in kept]
        share += chance * sum(each > 0 for each in left) / len(kept)
        mean += chance * sum(left) / len(kept)
    share_X, running_X = _Running(np.array([[longer]]), size)([size], [longest], rows)
    assert share_X[0] == pytest.approx(share, abs=1e-9)
    assert share_X[0] * running_X[0] == pytest.approx(mean, abs=1e-9)


def test_seconds_are_those_of_the_curve_where_any_runs():
    rule = Priced(2.0, ((1, 1.0), (3, 2.0)))
    assert cost(rule.latency, _Running(np.array([[1.0, 1.0]]), 3), [3], [0], 1) == pytest.approx(2 * 2)
    assert cost(rule.latency, _Running(np.array([[1.0, 0.0]]), 2), [2], [0], 1) == pytest.approx(1.5)
    assert cost(rule.latency, _Running(np.array([[1.0]] * 2), 3), [3, 3], [0, 0], 1) == pytest.approx(
        4
    )  # two wait for each three


def test_where_more_rollouts_leave_no_longest_more_of_them_pay():
    """Four rows, 3 + 1 of up to 6, and 4 + 0 from 7 on: the tail goes, and its time, which 5 with one longest does not."""
    statistics = PromptStatistics(1, laws=True)
    statistics.believe(0, LogLengths(5.0, 0.81))
    statistics.length_std_N[:] = 1.0
    groups, price = [GroupView.of([], prompt=0)], Priced(2.0, ((1, 1.0), (32, 33.0)))
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
        priced(((1, 1.0), (32, 4.0)), [short, long, each], most=4.0)
        for each in ((NAN, NAN), between, (4.0, 0.9), (4.6, 0.7))
    )
    assert unknown == known
    assert unknown not in (wider, longer)


def test_prompts_that_are_drawn_for_the_first_time_have_the_law_of_those_drawn_before():
    """In a first pass over the prompts no batch has a law of its own: it is priced all the same."""
    statistics = statistics_of([(3.0, 0.6), (5.0, 0.8)] + [(NAN, NAN)] * 6)
    statistics.length_std_N[:2] = 1.0
    view = View.of(8, statistics=statistics, rows=4, longest=1)
    rule, groups = Priced(4.0, ((1, 1.0), (32, 4.0))), [GroupView.of([], prompt=g, group=g) for g in (5, 6, 7)]
    assert list(rule(groups, view, {})) == priced(rule.latency, [(4.0, np.sqrt(0.5))] * 3, most=4.0)
    assert sum(rule(groups, view, {})) != 3 * 10  # half of the redundancy, as where nothing is known


@pytest.mark.parametrize(
    "latency", [(), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 0.0),), ((1, 1.0), (1, 2.0)), "fast", 3]
)
def test_a_curve_is_refused_that_is_none(latency):
    with pytest.raises(ValueError, match="latency must be pairs of rollouts"):
        Priced(2.0, latency)
    with pytest.raises(ValueError, match="max_factor must be at least 1"):
        Priced(0.5, FLAT)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"price": 0}, "price must be a number above 0, or None, got 0"),
        ({"price": float("inf")}, "price must be"),
        ({"truncated": 1}, r"truncated must be a share in \[0, 1\), got 1"),
        ({"truncated": -0.1}, "truncated must be"),
        ({"least": 0}, "least must be a whole number of at least 1, got 0"),
        ({"latency": ((1, 0.2), (8, 0.1))}, "latency falls from 0.2 s for a token of 1 rollouts to 0.1 s of 8; a step"),
        ({"latency": ((1, 0.1), (8, float("inf")))}, "latency must be pairs"),
    ],
)
def test_what_no_price_can_be_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        Priced(**{"max_factor": 2.0, "latency": FLAT} | wrong)


def with_laws(laws):
    statistics = statistics_of(laws)
    statistics.length_std_N[:] = [std for _, std in laws]
    return View.of(len(laws), statistics=statistics, rows=8)


def test_a_price_takes_from_what_more_rollouts_are_worth():
    """The dearer seconds are, the fewer rollouts; dear without end, those that make the batch shortest."""
    view = with_laws([(5.0, 0.6)] * 4)
    groups = [GroupView.of([], prompt=g, group=g) for g in range(4)]
    curve = ((1, 1.0), (64, 6.0))
    free, *totals = (sum(Priced(2.0, curve, price)(groups, view, {})) for price in (None, 0.01, 0.3, 1.0, 3.0, 1e9))
    assert totals[0] == 64
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] == free < 64
    assert len(set(totals)) > 2


def test_what_a_price_weighs_is_as_published():
    """E - λ T / T_0 of all that may be tried, by brute force over two groups."""
    view, curve, price = with_laws([(5.0, 0.6), (5.0, 0.3)]), ((1, 1.0), (64, 20.0)), 1.5
    groups = [GroupView.of([], prompt=g, group=g) for g in range(2)]
    rule, std_G = Priced(2.0, curve, price), np.array([0.6, 0.3], np.float32)
    running = _Running(rule._longer(groups, view), 16)

    def worth(sizes):
        effect = 1 - (std_G / sizes).sum() / (std_G / 8).sum()
        return effect - price * cost(rule.latency, running, sizes, [0, 0], 8) / cost(
            rule.latency, running, [8, 8], [0, 0], 8
        )

    made = rule(groups, view, {})
    means = [
        Redundant(mean / 8, 2.0, least).spread(std_G, 8)
        for mean in range(8, 17)
        for least in (8, (8 + mean) // 2, mean)
    ]
    assert worth(made) == max(map(worth, means))
    assert sum(made) > 16


def test_a_floor_holds_for_priced_sizes_too():
    view = with_laws([NARROW] * 3)
    groups = [GroupView.of([], prompt=g, group=g) for g in range(3)]
    made = {least: Priced(2.0, STEEP, least=least)(groups, view, {}) for least in (1, 10, 99)}
    assert made[10] == [10] * 3
    assert made[99] == [16] * 3
    assert sum(made[1]) < 30
    assert Priced(2.0, STEEP, normalise=True)._of(1.5, 10) == Redundant(1.5, 2.0, 10, True)


def test_rollouts_that_run_to_the_limit_are_insured_against():
    """Short answers beside a long prompt's, but one in a hundred never ends, for which a group of its rows waits."""
    view = with_laws([(5.0, 0.05)] * 31 + [(6.0, 0.8)])
    groups = [GroupView.of([], prompt=g, group=g) for g in range(32)]
    totals = [
        sum(Priced(2.0, ((1, 1.0), (512, 2.0)), truncated=share)(groups, view, {})) for share in (0.0, 0.01, 0.05)
    ]
    assert totals[0] < totals[1] < totals[2]


def test_redundancy_is_bought_where_it_is_free():
    assert sum(priced(FLAT, [WIDE] * 4)) == 32  # as many as there may be: the K-th ends sooner, and nothing is dearer
    assert sum(priced(STEEP, [WIDE] * 4)) < 32
    assert sum(priced(STEEP, [NARROW] * 4)) == 16  # equal lengths: nothing ends sooner, each one more is dearer


def test_the_price_of_redundancy_is_monotone():
    totals = [sum(priced(((1, 1.0), (32, 1.0 + slope)), [WIDE] * 4)) for slope in (0.0, 0.5, 2.0, 8.0, 32.0)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]
