"""The forecast: against closed forms and known pools, what the log cannot answer, and each of its refusals."""

from __future__ import annotations

import numpy as np
import pytest
from logged import Group, columns

from rollalloc import recipes
from rollalloc.core.events import Order
from rollalloc.lab.waste import forecast as module
from rollalloc.lab.waste.finding import find, forecast_sentence
from rollalloc.lab.waste.forecast import Plan, Refused, visits_of
from rollalloc.lab.waste.groups import Gathering, Log
from rollalloc.lab.waste.replay import Paid, _Deck, replay

RATES = np.array([0.0, 1.0, 0.1, 0.5, 0.8])


def pool(prompts, n, seed, visits=1):
    """Groups of prompts whose success rates are drawn from `RATES`."""
    random = np.random.default_rng(seed)
    rates = RATES[random.integers(len(RATES), size=prompts)]
    return [
        Group(str(prompt), visit, (random.random(n) < rate).astype(float))
        for visit in range(visits)
        for prompt, rate in enumerate(rates)
    ]


def paid(recipe, groups, openings, seed=0):
    """What one run of the allocator pays."""
    found, sums = columns(groups) if isinstance(groups, list) else groups, Paid()
    replay(recipe, found, visits_of(found, 1), openings, np.random.default_rng(seed), sums)
    return sums


def plan_for(log, groups, **options):
    return module.plan_for(log, columns(groups), **options)


def forecast(groups, *given, **options):
    return module.forecast(columns(groups), *given, **options)


def teaching(groups):
    """Rows of logged groups whose rewards differ."""
    return sum(len(group.rewards) for group in groups if np.ptp(group.rewards))


def test_grpo_pays_what_the_logged_groups_say():
    groups = pool(64, 8, seed=0)
    books = paid(recipes.grpo(4, 8), groups, 5 * 64)
    # A pass over 64 visits is exact; the burn-in takes the first batch of 80 away.
    assert books.price("rollouts") == pytest.approx(8 * 64 / teaching(groups), rel=0.05)
    assert books.guessed == 0
    assert books.again == books.ordered - 8 * 64  # a second pass has nothing new


def test_dapo_that_carries_its_surplus_pays_for_a_row_that_teaches_what_grpo_pays():
    """Filtering moves the waste out of the batch, it saves no rollout. At most a batch's worth is carried here."""
    groups = pool(128, 8, seed=1)
    plain = paid(recipes.grpo(4, 8), groups, 20 * 128).price("rollouts")
    carried = paid(recipes.dapo(4, 8, 4, surplus="carry"), groups, 20 * 128).price("rollouts")
    assert carried == pytest.approx(plain, rel=0.03)


def test_pilot_commit_pays_what_the_window_lets_through():
    """Closed form: a prompt of rate p costs n_pilot, and n_commit more with the probability that its pilots are inside.

    4 pilots, window [1/8, 3/4]: 1, 2 or 3 successes, so that all 16 rows teach.
    """
    groups = [group._replace(first=16) for group in pool(2000, 64, seed=2)]
    inside = np.mean([1 - p**4 - (1 - p) ** 4 for p in RATES])
    books = paid(recipes.pilot_commit(8, 4, 12, 24, p_solve=2.0, promote="oldest"), groups, 4000)
    assert books.price("rollouts") == pytest.approx((4 + 12 * inside) / inside / 16, rel=0.04)


def test_tokens_are_those_of_the_rollouts_that_were_dealt():
    gathering = Gathering()
    for prompt in range(20):
        for at in range(4):
            gathering.add(prompt, f"p{prompt}", 0, float(at % 2), tokens=10)
    books = paid(recipes.grpo(5, 4), gathering.groups(), 40)
    assert (books.tokens, books.rollouts) == (10 * books.rollouts, books.rows)


def test_unscored_rollouts_are_dealt_as_failures():
    groups = [group._replace(rewards=np.where(np.arange(8) < 2, np.nan, group.rewards)) for group in pool(64, 8, 3)]
    with_failures = paid(recipes.grpo(4, 8), groups, 64 * 5).price("rollouts")
    assert paid(recipes.grpo(4, 8), pool(64, 8, 3), 64 * 5).price("rollouts") < with_failures < np.inf


# ------------------------------------------------------------------------------------------------ what the log cannot answer


def test_every_group_of_a_prompt_is_dealt_before_one_is_dealt_again():
    found = columns(Group("p", visit, [visit, visit]) for visit in range(3))
    books = Paid()
    deck = _Deck(found, visits_of(found, 1), np.random.default_rng(0), books)
    dealt = [deck.deal(Order(group, 0, 0, (2 * group, 2 * group + 1)), 0) for group in range(4)]
    assert all(one.reward == other.reward for one, other in dealt)  # of one group, never of two
    assert sorted(one.reward for one, _ in dealt[:3]) == [0, 1, 2]
    assert (books.ordered, books.again, books.guessed) == (8, 2, 0)


def test_more_rollouts_than_a_group_has_are_guessed_and_counted():
    groups = [Group(f"p{at}", 0, [at % 2] * 4) for at in range(40)]
    books = paid(recipes.grpo(20, 6), groups, 40)
    assert 3 * books.guessed == books.ordered
    assert books.rows > 0  # a rate that four alike leave open: some of the guessed differ


def test_own_recipes_are_compared_with_grpo_and_what_the_log_cannot_answer_is_said():
    groups = pool(64, 8, seed=0, visits=2)
    own = {"racing": recipes.racing(4, (4, 16), 8), "reinforce": recipes.reinforce(8), "grpo again": recipes.grpo(4, 8)}
    found = find(Log("trl", groups=columns(groups)), own=own, resamples=4)
    assert list(found.forecast.prices) == ["grpo", *own]
    assert found.forecast.plan.n_pilot is None
    assert found.forecast.prices["grpo again"].times_rollouts.value == pytest.approx(1, rel=0.1)
    notes = " ".join(found.notes)
    assert "racing: no logged group is large enough for" in notes
    assert "reinforce does not compare the rollouts of a prompt with each other" in notes
    assert "grpo again" not in notes
    assert "racing " in forecast_sentence(found.forecast)


def test_a_batch_of_more_groups_than_prompts_is_refused():
    groups = pool(64, 8, seed=0)
    plan = plan_for(Log("trl"), groups, own=True)
    with pytest.raises(Refused, match="a batch of 65 groups needs as many prompts, the log has 64; give fewer"):
        forecast(groups, plan, {"grpo": recipes.grpo(65, 8)}, resamples=2)


# ----------------------------------------------------------------------------------------------------------- the whole of it


def test_a_recipe_that_would_have_trained_on_nothing_has_no_price():
    """15 of 16 are right in every group: 8 pilots never have a mean of 3/4 or less."""
    groups = [group._replace(rewards=[0] + [1] * 15) for group in pool(64, 16, seed=0)]
    found = forecast(groups, Plan(n=16, n_pilot=8, groups=2), resamples=2)
    price = found.prices["pilot_commit"]
    assert (price.rollouts, price.times_rollouts.value, price.times_rollouts.interval) == (np.inf, np.inf, (0, np.inf))
    assert "pilot_commit ∞ × (0.00 – ∞)" in forecast_sentence(found)


def test_a_log_in_which_one_prompt_has_most_visits_has_a_forecast():
    groups = pool(20, 64, seed=4) + pool(1, 64, seed=4, visits=150)
    low, high = forecast(groups, Plan(n=64, n_pilot=16, groups=2), resamples=4).prices["dapo"].times_rollouts.interval
    assert 0 <= low < high


def test_the_same_seed_gives_the_same_forecast():
    groups, plan = pool(64, 4, seed=4), Plan(n=4, n_pilot=2, groups=2)
    one, two, other = (forecast(groups, plan, seed=seed, resamples=3) for seed in (1, 1, 2))
    assert one == two != other


def test_a_plan_takes_the_size_that_nearly_all_groups_have_and_a_quarter_of_it_as_pilots():
    groups = pool(96, 16, seed=0) + [group._replace(first=3) for group in pool(4, 16, seed=1)]
    plan = plan_for(Log("trl"), groups)
    assert (plan.n, plan.n_pilot) == (16, 4)
    assert plan.groups == 6  # 96 visits per step, but a simulation of them needs 16 batches
    assert plan_for(Log("trl"), pool(64, 4, seed=0)).n_pilot == 2
    assert plan_for(Log("trl"), pool(16, 8, seed=0, visits=20)).groups == 2  # eight prompts for each group


@pytest.mark.parametrize(
    ("groups", "options", "said"),
    [
        (pool(32, 8, 0), {}, "too few groups with 2 rollouts or more: needs 64 of 10 prompts, the log has 32 of 32"),
        (pool(64, 8, 0), {"n": 16}, "needs groups of 16 rollouts, 0% of the logged ones have as many"),
        (pool(64, 3, 0), {}, "at least 4 rollouts, 2 pilots and 2 commits"),
        (pool(64, 8, 0), {"n_pilot": 1}, "the mean of one pilot is 0 or 1"),
        (pool(64, 8, 0), {"n_pilot": 7}, "2 pilots and 2 commits"),
        ([g._replace(rewards=2 * g.rewards - 1) for g in pool(64, 8, 0)], {}, r"rewards lie in \[-1, 1\].*--threshold"),
        ([g._replace(rewards=[1] * 8) for g in pool(64, 8, 0)], {}, "no row that teaches to compare with"),
    ],
)
def test_a_log_that_cannot_carry_a_forecast_is_refused(groups, options, said):
    with pytest.raises(Refused, match=said):
        plan_for(Log("trl"), groups, **options)


def test_a_log_from_which_groups_were_filtered_out_is_refused():
    filtered = [group for group in pool(400, 8, 0) if np.ptp(group.rewards)]
    with pytest.raises(Refused, match="filtered out before logging"):
        plan_for(Log("verl", complete=False), filtered)
    assert plan_for(Log("verl", complete=False), pool(400, 8, 0)).n == 8


@pytest.mark.slow
def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    """40 logs of 96 prompts; the truth is the ratio on 4,000 prompts. At 95% coverage fewer than 33 has probability 0.3%."""
    plan = Plan(n=8, n_pilot=4, groups=4)
    large = pool(4000, 8, seed=99)
    truth = {name: paid(recipe, large, 4000).price("rollouts") for name, recipe in plan.recipes().items()}
    covered = {"dapo": 0, "pilot_commit": 0}
    for seed in range(40):
        found = forecast(pool(96, 8, seed), plan, seed=seed, resamples=20)
        for name in covered:
            low, high = found.prices[name].times_rollouts.interval
            covered[name] += low <= truth[name] / truth["grpo"] <= high
    assert min(covered.values()) >= 33, covered
