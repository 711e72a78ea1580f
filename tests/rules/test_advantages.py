"""Advantage kernels: tables, exact zeros, and what is unbiased given selection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc import recipes
from rollalloc.core.group import GroupView
from rollalloc.core.rule import View
from rollalloc.rules import advantages
from rollalloc.rules.advantages import dr_grpo, grpo, pods, rloo

KERNELS = (grpo, dr_grpo, rloo, pods)
FLOATS = st.floats(-1e12, 1e12)


@pytest.mark.parametrize(
    ("kernel", "rewards_G", "expected_G"),
    [
        (dr_grpo, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        (dr_grpo, [2, 4, 9], [-3, -1, 4]),
        (rloo, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        (rloo, [5], [0]),
        (grpo, [1, 1, 0, 0], np.array([0.5, 0.5, -0.5, -0.5]) / (0.5 + 1e-6)),
        (grpo, [1, 0, 0, 0], np.array([0.75, -0.25, -0.25, -0.25]) / (np.sqrt(3) / 4 + 1e-6)),
        (pods, [1, 1, 0, 0], np.array([0.5, 0.5, -0.5, -0.5]) / (np.sqrt(1 / 3) + 1e-4)),
        (pods, [1], [0]),
        (grpo, [], []),
    ],
)
def test_kernel_by_hand(kernel, rewards_G, expected_G):
    np.testing.assert_allclose(kernel(rewards_G), expected_G, rtol=1e-12, atol=1e-15)


@given(value=FLOATS, count=st.integers(1, 40), kernel=st.sampled_from([grpo, dr_grpo, rloo, pods]))
def test_equal_rewards_are_exactly_zero_for_any_value(value, count, kernel):
    assert not kernel([value] * count).any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_an_error(kernel, bad):
    with pytest.raises(ValueError, match=r"rewards_G must be finite, got (nan|inf) at 1"):
        kernel([0.0, bad])


def test_an_explicit_deviation_is_kept_and_a_default_one_becomes_the_trainers():
    """Which standard deviation GRPO divides by: of the population, as in the paper, or of the sample, as TRL does.

    A recipe made without `deviation` takes that of the trainer (`settled`). Rewards (1, 0, 0, 0) tell them apart: the first
    advantage is 1.732 with the population's and 1.4997 with TRL's.
    """
    group, all_G = GroupView.of([1, 0, 0, 0]), np.arange(4)
    trls = advantages.GRPO(ddof=1, eps=1e-4)
    for recipe, kernel, first in (
        (recipes.grpo(4, 4), advantages.grpo, 1.7320468),
        (recipes.grpo(4, 4, deviation="population"), advantages.GRPO(ddof=0), 1.7320468),
        (recipes.grpo(4, 4, deviation="sample"), advantages.GRPO(ddof=1), 1.4999970),
    ):
        rule = recipe.advantage
        assert rule == advantages.OverGroup(kernel)
        assert rule(group, all_G)[0] == pytest.approx(first, abs=1e-6)
        settled = advantages.settled(rule, trls)
        assert settled == (advantages.OverGroup(trls) if kernel is advantages.grpo else rule)
    assert advantages.settled(advantages.OverGroup(advantages.grpo), trls)(group, all_G)[0] == pytest.approx(
        0.75 / (np.std([1, 0, 0, 0], ddof=1) + 1e-4)
    )
    for own in (recipes.pods(4, 8, 4).advantage, advantages.OverGroup(dr_grpo)):
        assert advantages.settled(own, trls) == own


@pytest.mark.parametrize("deviation", [None, "population", "sample"])
def test_every_recipe_of_grpos_advantage_takes_the_deviation(deviation):
    kernel = advantages.kernel_of(deviation)
    made = [
        recipes.dapo(4, 4, 12, deviation=deviation),
        recipes.pilot_commit(4, 2, 2, 12, deviation=deviation),
        recipes.racing(4, (2, 4), 6, deviation=deviation),
    ]
    assert {recipe.advantage for recipe in made} == {advantages.OverGroup(kernel)}
    darts = recipes.darts(4, 3, 1, deviation=deviation)
    assert darts.advantage == advantages.OverChosen(kernel)
    assert recipes.mix(recipes.dapo(4, 4, 12), darts).advantage == darts.advantage
    assert recipes.mix(made[0], recipes.darts(4, 3, 1)).advantage == darts.advantage
    assert recipes.mix(made[0], darts).advantage == darts.advantage


def test_recipes_of_two_deviations_are_not_joined():
    with pytest.raises(ValueError, match=r"both recipes change advantage: GRPO\(ddof=1.* and GRPO\(ddof=0"):
        recipes.mix(recipes.dapo(4, 4, 12, deviation="sample"), recipes.darts(4, 3, 1, deviation="population"))


# ------------------------------------------------------------------------------------------- against what was expected


@pytest.mark.parametrize(
    ("rule", "group", "expected"),
    [
        (advantages.Rewards(), GroupView.of([1, 0, 1], rewards=[2.0, -1.0, 0.0]), [2, -1, 0]),
        (advantages.Successes(), GroupView.of([1, 0, 1], rewards=[2.0, -1.0, 0.0]), [2, 0, 0]),
        (advantages.Successes(), GroupView.of([0.25]), [0.25]),
        (advantages.AgainstBaseline(), GroupView.of([1, 0], baseline=0.25), [0.75, -0.25]),
        (advantages.AgainstBaseline(), GroupView.of([0, 0], rewards=[-3.0, 4.0], baseline=-1.0), [-2, 5]),
        (advantages.AgainstBaseline(), GroupView.of([1, 0, 0], baseline=None), [2 / 3, -1 / 3, -1 / 3]),
        (advantages.AgainstBaseline(), GroupView.of([1], predicted=0.3), [0]),  # a predicted rate is no baseline
        (advantages.AgainstBaseline(), GroupView.of([1], baseline=0.0), [1]),
    ],
)
def test_advantage_against_what_is_known_by_hand(rule, group, expected):
    np.testing.assert_allclose(rule(group, np.arange(group.scored)), expected, atol=1e-15)
    np.testing.assert_allclose(rule(group, np.array([group.scored - 1])), expected[-1:], atol=1e-15)


def drawn(before, baselines=()):
    """The groups that advantages of a batch belong to, each with what was expected of its prompt."""
    padded = [*baselines, *[None] * (len(before) - len(baselines))]
    return [GroupView.of(rows, baseline=baseline) for rows, baseline in zip(before, padded, strict=True)]


def over_batch(rule, before, groups):
    """What a rule over the batch makes of it; every rollout is a row."""
    return rule(
        [np.array(each, float) for each in before], groups, [np.arange(len(each)) for each in before], View.of()
    )


@pytest.mark.parametrize(
    ("baselines", "after"),
    [
        ([0.25, 0.25, 0.25], [[0.75], [-0.125], [-0.125, 0.75]]),
        ([None, 0.25, 0.25], [[2 / 3], [-0.125], [-0.125, 0.75]]),  # of the other three one is right
        ([0.0, None, 0.5], [[1], [-1 / 3], [-0.25, 0.5]]),
        ([None, None, None], [[2 / 3], [-1 / 3], [-1 / 3, 2 / 3]]),
    ],
)
def test_a_row_is_compared_with_its_baseline_and_without_one_with_the_mean_of_the_other_rows(baselines, after):
    """Negative differences count half (`BatchMean(0.5)`)."""
    before = [[1.0], [0.0], [0.0, 1.0]]
    made = over_batch(advantages.BatchMean(0.5), before, drawn(before, baselines))
    for each, expected in zip(made, after, strict=True):
        np.testing.assert_allclose(each, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (advantages.BatchMean(), [[1], [0], [0], [0]], [[1], [-1 / 3], [-1 / 3], [-1 / 3]]),
        (advantages.BatchMean(0.5), [[1, 0], [0, 0]], [[1, -1 / 6], [-1 / 6, -1 / 6]]),
        (advantages.BatchMean(), [[2, 4], [9]], [[-4.5, -1.5], [6]]),
        (advantages.BatchMean(), [[7]], [[0]]),
        (advantages.BatchNormalised(), [[1, 1], [0], [0]], [[1, 1], [-1], [-1]]),
        (advantages.BatchNormalised(eps=0.5), [[1, 1], [0, 0]], [[0.5, 0.5], [-0.5, -0.5]]),
        (advantages.BatchNormalised(), [[0.1], [0.1, 0.1]], [[0], [0, 0]]),
        (advantages.BatchNormalised(), [[3]], [[0]]),
    ],
)
def test_a_batchs_advantages_by_hand(rule, before, after):
    made = over_batch(rule, before, drawn(before))
    assert [each.shape for each in made] == [(len(each),) for each in after]
    np.testing.assert_allclose(np.concatenate(made), np.concatenate(after), atol=1e-5)


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), min_size=1, max_size=5),
    st.floats(0, 2) | st.none(),
)
def test_the_promises_of_rules_over_a_batch_hold_for_any_batch(batch, neg):
    before = [np.array(each) for each in batch]
    for rule in (advantages.BatchMean(neg), advantages.BatchNormalised(), advantages.BatchNormalised(eps=3.0)):
        groups, chosen = drawn(before, [0.5]), [np.arange(len(each)) for each in before]
        promised = rule.promises(over_batch(rule, before, groups), before, groups, chosen, View.of())
        assert all(promised.values()), promised


@pytest.mark.parametrize(
    ("over", "uncertainty", "weight"),
    [
        ([0.5, -0.5, -0.5], [1.0, 4.0, 6.0], 0.2),
        ([0.5, 0.1, -0.5], [1.0, 2.0, 1.0], 1.0),  # never more than successes
        ([0.5, 0.0, -0.5], [1.0, None, 2.0], 0.5),  # a row without advantage has no say
        ([0.5, -0.5], [0.0, 0.0], 1.0),
        ([0.5, -0.5, -0.5], [1.0, None, 5.0], 0.2),  # by those that are known
        ([0.5, -0.5, -0.5], [1.0, None, None], advantages.USUAL_NEG),
        ([0.5, 1e-17, -0.5], [1.0, 9.0, 2.0], 0.5),  # rounding is no success
        ([0.5, 0.5], [1.0, 2.0], advantages.USUAL_NEG),
        ([], [], advantages.USUAL_NEG),
    ],
)
def test_the_weight_of_failures_by_hand(over, uncertainty, weight):
    """The mean uncertainty of rows above the baseline divided by that of rows below it, at most 1.

    Without a known uncertainty on both sides it is `USUAL_NEG`.
    """
    made = advantages.variance_ratio(np.array(over, float), np.array(uncertainty, float))
    assert made == pytest.approx(weight)


def test_failures_of_a_batch_weigh_by_how_uncertain_its_rows_were():
    """Rewards 1, 0, 0 against a mean of the others; uncertainties 2, 10, 10, so that failures weigh 0.2."""
    groups = [
        GroupView.of([1.0], uncertainties=[2.0]),
        GroupView.of([1.0, 0.0, 0.0], uncertainties=[99.0, 10.0, 10.0]),
    ]
    chosen = [np.array([0]), np.array([1, 2])]  # the first one of three is not trained on
    made = advantages.BatchMean(None)([np.ones(1), np.zeros(2)], groups, chosen, View.of())
    np.testing.assert_allclose(np.concatenate(made), [1.0, -0.1, -0.1])
