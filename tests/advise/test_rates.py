"""The mixture of success rates: what its parts must be, and how often its intervals cover the truth."""

# pyright: reportGeneralTypeIssues=false, reportOptionalSubscript=false

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc.advise.rates import fit_rates

WORLDS = {  # prompts → their rates
    "U-shaped": lambda random, prompts: random.beta(0.2, 0.2, prompts),
    "uniform": lambda random, prompts: random.random(prompts),
    "hard": lambda random, prompts: random.beta(0.3, 3.0, prompts),
    "half hopeless": lambda random, prompts: np.where(
        random.random(prompts) < 0.5, 0.0, random.beta(2.0, 2.0, prompts)
    ),
}


def fitted(hits, count, **more):
    return fit_rates(np.array(hits), np.array(count), **more)


def test_a_mixture_has_the_mean_and_the_groups_without_variance_of_its_counts():
    found = fitted([0, 1, 2, 3, 4] * 20, [4] * 100)
    assert found.weight_K.sum() == pytest.approx(1)
    assert found.mean.value == pytest.approx(0.5, abs=0.01)
    assert found.zero_variance(4).value == pytest.approx(0.4, abs=0.02)
    assert found.zero_variance(1).value == pytest.approx(1)
    assert found.sd.value < np.std([0, 0.25, 0.5, 0.75, 1])  # raw means of four spread farther


@pytest.mark.parametrize(("hits", "share"), [(0, "hopeless"), (40, "solved")])
def test_where_all_come_out_the_same_the_interval_is_that_of_what_was_not_seen(hits, share):
    found = fitted([hits] * 50, [40] * 50)
    assert getattr(found, share).value > 0.99
    low, high = found.zero_variance(40).interval
    assert low == pytest.approx(0.025 ** (1 / 50), abs=0.04)  # the exact limit, to the noise of 200 resamples
    assert high > 0.98


def test_a_prompt_s_rate_is_drawn_to_the_others_the_less_it_was_tried():
    found = fitted([2, 3, 1, 2] * 50, [4] * 200)
    few, many, none = found.posterior_mean(np.array([1, 40, 0]), np.array([1, 40, 0])).tolist()
    assert found.mean.value < few < many
    assert none == pytest.approx(found.mean.value)


def test_visits_of_one_prompt_are_resampled_together():
    hits, count = [0, 4] * 40, [4] * 80
    apart = fitted(hits, count).mean.interval
    together = fitted(hits, count, prompt_V=np.repeat(np.arange(16), 5)).mean.interval
    assert together[1] - together[0] != apart[1] - apart[0]
    assert not len(fitted(hits, count, prompt_V=np.arange(80) % 9).weight_BK)  # 9 prompts say nothing of others


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(any), min_size=1, max_size=40))
def test_fitted_rates_are_a_distribution_and_groups_gain_variance_with_size(counts):
    hits, misses = np.array(counts).T
    found = fit_rates(hits, hits + misses, resamples=5)
    assert found.weight_K.sum() == pytest.approx(1)
    assert (found.weight_K > 0).all()
    shares = [found.zero_variance(n) for n in (1, 2, 4, 8, 16, 32)]
    assert all(less.value <= one.value + 1e-12 for one, less in pairwise(shares))
    for share in (*shares, found.mean, found.hopeless, found.solved, found.sd):
        assert share.interval is None or share.interval[0] <= share.value <= share.interval[1]


@pytest.mark.parametrize("world", [*WORLDS, "all or nothing"])
def test_estimates_are_near_the_truth(world):
    """2,000 prompts of 8 rollouts: the standard error of each share is at most .011, and 4 of them have 6e-5."""
    random = np.random.default_rng(3)
    rates = WORLDS[world](random, 2000) if world in WORLDS else (random.random(2000) < 0.4).astype(float)
    found = fit_rates(random.binomial(8, rates), np.full(2000, 8), resamples=2)
    for n in (2, 4, 8):
        assert found.zero_variance(n).value == pytest.approx((rates**n + (1 - rates) ** n).mean(), abs=0.045)
