"""Size rules: how many rollouts each group gets."""

# pyright: reportArgumentType=false

from itertools import product
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc import recipes
from rollalloc.core.group import GroupView
from rollalloc.core.prompts import PromptTable
from rollalloc.core.rule import View
from rollalloc.recipes.darts import Priced, Redundant, ends, seconds
from rollalloc.recipes.knapsack import Knapsack

NAN = float("nan")


def sizes(rule, stds, rows=None):
    return list(rule(groups_of(len(stds)), View.of(len(stds), rows=rows), memory_of([(std, std) for std in stds])))


def objective(stds, sizes_G):
    return sum(std / size for std, size in zip(stds, sizes_G, strict=True))


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


def test_the_largest_size_survives_rounding():
    """1.15 * 100 is a little less than 115 in floating point."""
    assert sizes(Redundant(mean_factor=1.15, max_factor=1.15), [1.0], rows=100) == [115]


@pytest.mark.parametrize(
    ("stds", "least", "normalise", "expected"),
    [
        ([1.0, 3.0], 1, False, [9, 15]),  # 8 rows, 12 rollouts on average, at most 16
        ([1.0, 3.0], 10, False, [10, 14]),
        ([2.0, 3.0], 10, False, [11, 13]),
        ([2.0, 3.0], 10, True, [10, 14]),  # 1 and 2
        ([2.0, 2.5], 10, True, [11, 13]),  # 1 and 1.5: deviations that differ by less than a token are nearly alike
        ([2.0, 2.0], 10, True, [12, 12]),
        ([7.0], 10, True, [12]),
        ([1.0, 3.0], 13, False, [13, 13]),  # above the mean: the floor holds
        ([1.0, 3.0], 99, False, [16, 16]),  # and no more than may be
    ],
)
def test_no_group_gets_fewer_than_the_floor(stds, least, normalise, expected):
    assert sizes(Redundant(1.5, 2.0, least, normalise), stds, rows=8) == expected


def test_a_floor_of_darts_is_one_of_its_size_rule():
    assert recipes.darts(4, 7, 1, least=10, normalise=True).stages[0].size == Redundant(1.5, 2.0, 10, True)
    priced = recipes.darts(4, 7, 1, least=10, normalise=True, latency=((1, 1.0),))
    assert priced.stages[0].size == Priced(2.0, ((1, 1.0),), 1, False, 10, True)


def test_redundant_needs_a_number_of_rows():
    with pytest.raises(ValueError, match=r"the view does not say how many rows .*; give View.of\(rows=...\)"):
        sizes(Redundant(1.5, 2.0), [1.0, 2.0])


def test_the_recorded_length_deviation_is_a_running_mean_with_step_three_tenths():
    rule = Redundant(1.5, 2.0)
    memory = rule.init(PromptTable(2))
    for lengths, expected in (([10, 30], 10.0), ([5], 10.0), ([7, 7], 7.0), ([], 7.0), ([0, 34], 10.0)):
        rule.observe(memory, GroupView.of([0] * len(lengths), tokens=lengths))
        assert memory["std_N"][0] == np.float32(expected)
    assert memory["mean_N"][0] == np.float32(20 + 0.3 * (7 - 20) + 0.3 * (17 - (20 + 0.3 * (7 - 20))))
    assert np.isnan([memory["mean_N"][1], memory["std_N"][1]]).all()


def test_the_released_deviation_is_the_samples_of_the_trained_rows_alone():
    """The 2 shortest and the longest are trained on, and none that was truncated."""
    recipe = recipes.darts(4, 2, 1, max_redundancy=4.0, lengths_of="trained")
    rule = recipe.stages[0].size
    memory = rule.init(PromptTable(1))
    rule.observe(memory, GroupView.of([0] * 5, tokens=[50, 10, 90, 20, 99], truncated=[False] * 4 + [True]))
    assert memory["std_N"][0] == np.float32(np.std([10, 20, 90], ddof=1))
    rule.observe(memory, GroupView.of([0], tokens=[7]))  # one length alone has no deviation
    assert memory["std_N"][0] == np.float32(np.std([10, 20, 90], ddof=1))
    rule.observe(memory, GroupView.of([0] * 4, tokens=[8, 5, 6, 7]))
    first, second = (np.std(lengths, ddof=1) for lengths in ([10, 20, 90], [5, 6, 8]))
    assert memory["std_N"][0] == pytest.approx(first + 0.3 * (second - first), rel=1e-6)


def test_a_prompt_that_was_never_visited_has_the_mean_of_all_that_were_as_in_the_released_code():
    """Prompts 0 to 3 have deviations of 1, 4, 10 and 25, prompts 4 and 5 none; ordered are 0 and 4."""
    recorded, batch = (
        recipes.darts(2, 7, 1, least=10, unseen=unseen).stages[0].size for unseen in ("recorded", "batch")
    )
    groups = [GroupView.of([], prompt=prompt, group=at) for at, prompt in enumerate((0, 4))]
    sizes_of = {}
    for rule in (recorded, batch):
        memory = rule.init(PromptTable(6))
        for prompt, std in enumerate((3.0, 4.0, 10.0, 25.0)):
            rule.observe(memory, GroupView.of([0, 0], prompt=prompt, tokens=[100, 100 + round(2 * std)]))
        rule.observe(memory, GroupView.of([0, 0], prompt=0, tokens=[7, 7]))  # 3 becomes 2.1
        sizes_of[rule is recorded] = list(rule(groups, View.of(6, rows=8), memory))
    assert memory_after(recorded, 6) == pytest.approx((4, (2.1 + 4 + 10 + 25)))
    assert sizes_of == {True: [10, 14], False: [12, 12]}  # 2.1 beside 10.3, or beside 2.1


def memory_after(rule, prompts):
    """Number of recorded prompts and the sum of their deviations, also after the data set was turned round."""
    memory = rule.init(PromptTable(prompts))
    for prompt, std in enumerate((3.0, 4.0, 10.0, 25.0)):
        rule.observe(memory, GroupView.of([0, 0], prompt=prompt, tokens=[100, 100 + round(2 * std)]))
    rule.observe(memory, GroupView.of([0, 0], prompt=0, tokens=[7, 7]))
    turned = rule.remap(memory, np.arange(prompts)[::-1].copy(), PromptTable(prompts))
    assert turned["recorded_2"] == pytest.approx(memory["recorded_2"])
    assert rule.remap(memory, np.array([-1, 1, 2]), PromptTable(3))["recorded_2"] == pytest.approx((2, 14.0))
    return tuple(memory["recorded_2"].tolist())


class Released:
    """The sizes of DARTS's released code, written from its algorithm: running deviations by key, and its solver."""

    def __init__(self, mean, least, most):
        self.mean, self.least, self.most, self.record = mean, least, most, {}

    def sizes(self, prompts):
        mean = sum(self.record.values()) / len(self.record) if self.record else 0.0
        std = [self.record.get(prompt, mean) for prompt in prompts]
        low, high = min(std), max(std)
        std = [(each - low + 1) / (high - low) if high > low else 1.0 for each in std]
        made = [self.least] * len(prompts)
        for _ in range(self.mean * len(prompts) - sum(made)):
            gains = [each / m - each / (m + 1) if m < self.most else -1.0 for each, m in zip(std, made, strict=True)]
            made[gains.index(max(gains))] += 1
        return made

    def learn(self, prompt, trained):
        now = float(np.std(trained, ddof=1))
        self.record[prompt] = 0.3 * now + 0.7 * self.record[prompt] if prompt in self.record else now


def test_over_a_run_sizes_are_distributed_as_in_the_released_code():
    """64 prompts of very different lengths in batches of 16, three passes over the data; half of them are new at first."""
    recipe = recipes.darts(
        16, 5, 3, least=10, normalise=True, lengths_of="trained", longest_by="size", unseen="recorded"
    )
    rule, released = recipe.stages[0].size, Released(12, 10, 16)
    memory, random = rule.init(PromptTable(64)), np.random.default_rng(0)
    spread_N, made, expected = random.uniform(0.05, 1.2, 64), [], []
    for _ in range(12):
        prompts = random.permutation(64)[:16].tolist()
        groups = [GroupView.of([], prompt=prompt, group=at) for at, prompt in enumerate(prompts)]
        sizes_G = list(rule(groups, View.of(64, rows=8), memory))
        made += sizes_G
        expected += released.sizes(prompts)
        for prompt, size in zip(prompts, sizes_G, strict=True):
            lengths = random.lognormal(6, spread_N[prompt], size).astype(int).tolist()
            tail = min(3, (16 - size) // 2)
            by_length = sorted(lengths)
            released.learn(prompt, by_length[: 8 - tail] + by_length[size - tail :])
            rule.observe(memory, GroupView.of([0] * size, prompt=prompt, tokens=lengths))
    assert len(set(expected)) == 7  # every size from 10 to 16
    assert np.bincount(made, minlength=17).tolist() == pytest.approx(np.bincount(expected, minlength=17), abs=2)
    assert np.mean(np.array(made) == expected) > 0.98  # records are kept in single precision


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


def memory_of(lengths):
    """Of prompts whose lengths have these means and deviations, in tokens; NaN: never visited."""
    mean_N, std_N = np.array(lengths, np.float32).T
    return {"mean_N": mean_N, "std_N": std_N}


def groups_of(count):
    return [GroupView.of([], prompt=g, group=g) for g in range(count)]


def priced(latency, lengths, rows=4, longest=1, most=2.0):
    """Sizes for prompts whose lengths have these means and deviations."""
    return sized(Priced(most, latency, longest), lengths, rows)


def sized(rule, lengths, rows=8):
    return list(rule(groups_of(len(lengths)), View.of(len(lengths), rows=rows), memory_of(lengths)))


WIDE, NARROW = (150.0, 60.0), (150.0, 1.0)
FLAT = ((1, 1.0), (100, 1.0))  # a token takes as long however many rollouts are decoded
STEEP = ((1, 0.01), (100, 1.0))  # in proportion to their number


def test_the_seconds_of_a_batch_follow_from_the_ends_of_its_rollouts():
    """By Blom's scores 0, and -z, 0, z of three: lengths 100 - 20 z, 100, 100 + 20 z; a second group of two rollouts."""
    z = NormalDist().inv_cdf(2.625 / 3.25)
    mean_G, std_G = np.array([100.0]), np.array([20.0])
    all_run = ends(mean_G, std_G, [3], [0], 3)
    assert all_run == pytest.approx([100 - 20 * z, 100, 100 + 20 * z])
    assert ends(mean_G, std_G, [3], [0], 1) == pytest.approx([100 - 20 * z] * 3)  # all are stopped when the first ended
    assert ends(mean_G, std_G, [3], [2], 3) == pytest.approx(all_run)  # both of the two others go on
    five = ends(mean_G, std_G, [5], [5], 5)
    one_goes_on = ends(mean_G, std_G, [5], [1], 3)  # the middle one of the three others, when two have ended
    assert one_goes_on == pytest.approx([five[0], five[1], five[1], five[1], five[3]])
    assert ends(np.array([100.0, 7.0]), np.array([20.0, 0.0]), [3, 2], [0, 0], 3).tolist()[:2] == [7.0, 7.0]
    assert (ends(np.array([1.0]), np.array([50.0]), [5], [0], 5) >= 0).all()


def test_seconds_are_the_sum_over_the_ends_of_rollouts_of_what_a_token_takes_then():
    curve = ((1, 1.0), (3, 2.0))
    assert seconds(curve, np.array([10.0, 10.0, 30.0])) == pytest.approx(10 * 2.0 + 20 * 1.0)
    assert seconds(curve, np.array([10.0, 20.0])) == pytest.approx(10 * 1.5 + 10 * 1.0)
    assert seconds(curve, np.full(6, 10.0)) == pytest.approx(10 * 2.0 * 2)  # six rollouts share three places


def test_where_more_rollouts_leave_no_longest_more_of_them_pay():
    """Four rows, 3 + 1 of up to 6, and 4 + 0 from 7 on: with the longest goes its time."""
    with_longest, by_size = (
        sized(Priced(2.0, ((1, 1.0), (32, 5.0)), 1, each), [WIDE], rows=4) for each in (False, True)
    )
    assert with_longest[0] < 7 <= by_size[0]


def test_without_a_record_half_of_the_redundancy_still_keeps_the_floor():
    """A mutant that ignored `least` before the first record once lived."""
    assert sized(Priced(2.0, FLAT, 0, least=7), [(NAN, NAN)] * 2, rows=4) == [7, 7]


def test_a_prompt_without_a_record_has_the_mean_of_the_others():
    curve, known = ((1, 1.0), (32, 8.0)), [(20.0, 12.0), (150.0, 120.0)]
    unknown, mean, steadier, longer = (
        priced(curve, [*known, each], most=3.0) for each in ((NAN, NAN), (85.0, 66.0), (85.0, 20.0), (4000.0, 66.0))
    )
    assert unknown == mean
    assert unknown not in (steadier, longer)


def test_a_floor_holds_for_priced_sizes_too():
    made = {least: sized(Priced(2.0, STEEP, 0, least=least), [NARROW] * 3) for least in (1, 10, 99)}
    assert made[10] == [10] * 3
    assert made[99] == [16] * 3
    assert sum(made[1]) < 30


def test_redundancy_is_bought_where_it_is_free():
    assert sum(priced(FLAT, [WIDE] * 4)) == 32  # as many as there may be: the K-th ends sooner, and nothing is dearer
    assert sum(priced(STEEP, [WIDE] * 4)) < 32
    assert sum(priced(STEEP, [NARROW] * 4)) == 16  # equal lengths: nothing ends sooner, each one more is dearer
