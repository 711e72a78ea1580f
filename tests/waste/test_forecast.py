"""The forecast: against closed forms and known pools, and each of its refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollalloc import recipes
from rollalloc.waste.finding import forecast_sentence
from rollalloc.waste.forecast import Plan, Refused, forecast, plan_for, price
from rollalloc.waste.groups import Group, Log
from rollalloc.waste.shares import mixed

RATES = np.array([0.0, 1.0, 0.1, 0.5, 0.8])


def pool(prompts, n, seed, visits=1):
    """Groups of prompts whose success rates are drawn from `RATES`."""
    random = np.random.default_rng(seed)
    rates = RATES[random.integers(len(RATES), size=prompts)]
    return [
        Group(str(prompt), visit, (random.random(n) < rate).astype(float), None, n)
        for visit in range(visits)
        for prompt, rate in enumerate(rates)
    ]


def test_grpo_pays_what_the_logged_groups_say():
    groups = pool(64, 8, seed=0)
    per_mixed, per_signal = price(recipes.grpo(4, 8), groups, 5 * 64, np.random.default_rng(0))
    differ = sum(mixed(group.rewards_G) for group in groups)
    signal = sum(8 * group.rewards_G.var() for group in groups)
    # A pass over 64 visits is exact; the burn-in takes the first batch of 80 away.
    assert per_mixed == pytest.approx(8 * 64 / differ, rel=0.05)
    assert per_signal == pytest.approx(8 * 64 / signal, rel=0.05)


def test_dapo_that_carries_its_surplus_pays_for_a_mixed_group_what_grpo_pays():
    """Filtering moves the waste out of the batch, it saves no rollout. At most a batch's worth is carried here."""
    groups = pool(256, 8, seed=1)
    random = np.random.default_rng(0)
    plain, _ = price(recipes.grpo(4, 8), groups, 20 * 256, random)
    carried, _ = price(recipes.dapo(4, 8, 4, surplus="carry"), groups, 20 * 256, random)
    assert carried == pytest.approx(plain, rel=0.03)


def test_pilot_commit_pays_what_the_window_lets_through():
    """Closed form: a prompt of rate p costs n_pilot, and n_commit more with the probability that its pilots are inside.

    4 pilots, window [1/8, 3/4]: 1, 2 or 3 successes.
    """
    groups = pool(2000, 64, seed=2)
    groups = [replace(group, first=16) for group in groups]
    inside = np.mean([1 - p**4 - (1 - p) ** 4 for p in RATES])
    recipe = recipes.pilot_commit(8, 4, 12, 24, p_solve=2.0, promote="oldest")
    per_mixed, _ = price(recipe, groups, 4000, np.random.default_rng(0))
    assert per_mixed == pytest.approx((4 + 12 * inside) / inside, rel=0.04)


def test_unscored_rollouts_are_dealt_as_failures():
    groups = [replace(group, rewards_G=np.where(np.arange(8) < 2, np.nan, group.rewards_G)) for group in pool(64, 8, 3)]
    per_mixed, per_signal = price(recipes.grpo(4, 8), groups, 64 * 5, np.random.default_rng(0))
    assert np.isfinite([per_mixed, per_signal]).all()
    assert per_mixed > price(recipes.grpo(4, 8), pool(64, 8, 3), 64 * 5, np.random.default_rng(0))[0]


def test_a_recipe_that_would_have_trained_on_nothing_has_no_price():
    """15 of 16 are right in every group: 8 pilots never have a mean of 3/4 or less."""
    groups = [replace(group, rewards_G=np.array([0.0] + [1.0] * 15), first=16) for group in pool(64, 16, seed=0)]
    found = forecast(groups, Plan(n=16, n_pilot=8, groups=2), resamples=2)
    price = found.prices["pilot_commit"]
    assert (price.per_signal, price.ratio_signal.value, price.ratio_signal.interval) == (np.inf, 0, (0, np.inf))
    assert "pilot_commit unbounded (-100% to unbounded)" in forecast_sentence(found)


def test_a_log_in_which_one_prompt_has_most_visits_has_a_forecast():
    """A resample may then have fewer visits than a batch needs: it has no price, and the interval no end."""
    groups = pool(10, 64, seed=4) + pool(1, 64, seed=4, visits=1000)
    plan = Plan(n=64, n_pilot=16, groups=4)
    ratio = forecast(groups, plan, resamples=10).prices["dapo"].ratio_signal
    assert ratio.interval == (0, np.inf)


def test_the_same_seed_gives_the_same_forecast():
    groups, plan = pool(64, 4, seed=4), Plan(n=4, n_pilot=2, groups=2)
    one, two, other = (forecast(groups, plan, seed=seed, resamples=3) for seed in (1, 1, 2))
    assert one == two != other


def test_a_plan_takes_the_size_that_nearly_all_groups_have_and_a_quarter_of_it_as_pilots():
    groups = pool(96, 16, seed=0) + [replace(group, first=3) for group in pool(4, 16, seed=1)]
    plan = plan_for(Log("trl"), groups)
    assert (plan.n, plan.n_pilot) == (16, 4)
    assert plan.groups == 6  # 96 visits a step, but a simulation of them needs 16 batches
    assert plan_for(Log("trl"), pool(64, 4, seed=0)).n_pilot == 2


@pytest.mark.parametrize(
    ("groups", "options", "said"),
    [
        ([], {}, "no rollouts in this log, only sums"),
        (pool(32, 8, 0), {}, "at least 64 groups and 10 prompts, the log has 32 groups of 32 prompts"),
        (pool(4, 8, 0, visits=30), {}, "the log has 120 groups of 4 prompts"),
        (pool(64, 8, 0), {"n": 16}, "needs groups of 16 rollouts, 0% of the logged ones have as many"),
        (pool(64, 3, 0), {}, "at least 4 rollouts, 2 pilots and 2 commits"),
        (pool(64, 8, 0), {"n_pilot": 1}, "the mean of one pilot is 0 or 1"),
        (pool(64, 8, 0), {"n_pilot": 7}, "2 pilots and 2 commits"),
        (
            [replace(g, rewards_G=2 * g.rewards_G - 1) for g in pool(64, 8, 0)],
            {},
            r"rewards lie in \[-1, 1\].*--threshold",
        ),
        ([replace(g, rewards_G=np.ones(8)) for g in pool(64, 8, 0)], {}, "no signal to compare at"),
        ([replace(g, rewards_G=np.full(8, np.nan)) for g in pool(64, 8, 0)], {}, "no rollout in this log has a score"),
    ],
)
def test_a_log_that_cannot_carry_a_forecast_is_refused(groups, options, said):
    with pytest.raises(Refused, match=said):
        plan_for(Log("trl"), groups, **options)


def test_a_log_from_which_groups_were_filtered_out_is_refused():
    filtered = [group for group in pool(400, 8, 0) if mixed(group.rewards_G)]
    with pytest.raises(Refused, match="filtered out before logging"):
        plan_for(Log("verl", complete=False), filtered)
    assert plan_for(Log("verl", complete=False), pool(400, 8, 0)).n == 8


@pytest.mark.slow
def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    """40 logs of 96 prompts; the truth is the ratio on 4,000 prompts. At 95% coverage fewer than 33 has probability 0.3%."""
    plan = Plan(n=8, n_pilot=4, groups=4)
    random, large = np.random.default_rng(0), pool(4000, 8, seed=99)
    truth = {name: price(recipe, large, 4000, random) for name, recipe in plan.recipes().items()}
    covered = {(name, currency): 0 for name in ("dapo", "pilot_commit") for currency in (0, 1)}
    for seed in range(40):
        found = forecast(pool(96, 8, seed), plan, seed=seed, resamples=20)
        for name, currency in covered:
            low, high = (found.prices[name].ratio_mixed, found.prices[name].ratio_signal)[currency].interval
            covered[name, currency] += low <= truth["grpo"][currency] / truth[name][currency] <= high
    assert min(covered.values()) >= 33, covered
