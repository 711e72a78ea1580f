"""The model of the evidence finds what was planted, and takes a bound as a bound."""

import numpy as np
import pytest

from planted_evidence import LEVELS, SLOPES, planted, signals
from rollalloc.lab.advise.choices import METHODS
from rollalloc.lab.advise.evidence import evidence_of
from rollalloc.lab.advise.outcomes import Outcomes, _above, fit

PLAIN = {method: {method: 1.0} for method in METHODS}


def fitted(evidence, **changes) -> Outcomes:
    return fit(evidence, METHODS, ("many_answers",), draws=200, burn_in=100, **changes)


def means(outcomes: Outcomes, many_answers: float) -> dict[str, float]:
    drawn = outcomes.drawn(signals(many_answers), PLAIN)
    return {method: float((drawn[method] - drawn["grpo_n4"]).mean()) for method in METHODS}


def test_levels_and_slopes_are_found():
    """Each within 0.25 in logs, five standard errors of means of a dozen tasks: fails once in 100,000 seeds."""
    outcomes = fitted(planted(tasks=12))
    for many in (0.1, 0.9):
        found = means(outcomes, many)
        for method in METHODS:
            assert found[method] == pytest.approx(LEVELS[method] + SLOPES[method] * many, abs=0.25)


def test_the_spreads_are_found():
    """Standard deviations of 72 cells and 144 runs: within a quarter of what was planted in thirty seeds tried."""
    outcomes = fitted(planted(tasks=12, tau=0.4, sigma=0.2))
    assert np.median(outcomes.tau_D) == pytest.approx(0.4, rel=1 / 3)
    assert np.median(outcomes.sigma_D) == pytest.approx(0.2, rel=1 / 3)


def test_a_bound_is_not_taken_for_a_cost():
    whole, cut = planted(), planted(most=4_000)
    assert any(one.censored for task in cut.tasks for found in task.paid.values() for one in found)
    as_costs = cut.described()
    for task in as_costs["tasks"].values():
        task["paid"] = {method: [[paid, False, 1] for paid, *_ in found] for method, found in task["paid"].items()}
    truth, honest, naive = (means(fitted(each), 0.5)["grpo_n16"] for each in (whole, cut, evidence_of(as_costs)))
    assert abs(honest - truth) < abs(naive - truth)
    assert naive < truth  # what did not arrive looks cheap


def test_a_mean_of_runs_counts_as_many():
    one, eight = planted(runs=1).described(), planted(runs=1).described()
    for task in eight["tasks"].values():
        task["paid"] = {method: [[*found[0][:2], 8]] for method, found in task["paid"].items()}
    # The seeds' noise of such a mean is a third of a run's, so a run's is believed to be larger.
    sigmas = [np.median(fitted(evidence_of(each)).sigma_D) for each in (one, eight)]
    assert sigmas[1] > sigmas[0]


def test_outside_of_the_evidence_intervals_widen():
    outcomes = fitted(planted())
    spreads = []
    for many in (0.5, 1.0, 1.5, 3.0):
        drawn = outcomes.drawn(signals(many), PLAIN)
        spreads.append(float(np.std(drawn["reinforce"] - drawn["grpo_n4"])))
    assert spreads == sorted(spreads)
    assert outcomes.beyond(signals(0.5)).max() == 0
    assert outcomes.beyond(signals(1.5)).max() > 1


def test_the_same_seed_gives_the_same_model():
    one, other = fitted(planted()), fitted(planted())
    np.testing.assert_array_equal(one.level_DM, other.level_DM)
    assert means(one, 0.2) == means(other, 0.2)


def test_without_runs_nothing_is_fitted():
    with pytest.raises(ValueError, match="expected runs of spo"):
        fit(planted(), ("spo",), ())


def test_what_is_drawn_for_a_task_leaves_a_method_s_mean_where_it_is():
    outcomes = fitted(planted())
    one, other = (outcomes.drawn(signals(0.4), PLAIN, seed=seed) for seed in (0, 1))
    assert [float(one[method].mean()) for method in METHODS] == pytest.approx(
        [float(other[method].mean()) for method in METHODS], rel=1e-9
    )
    assert not np.array_equal(one["raft"], other["raft"])


def test_of_graded_answers_those_that_differ_are_not_many_right_ones():
    outcomes = fitted(planted())
    graded, single = (outcomes.drawn(each, PLAIN) for each in (signals(1.0, graded=1.0), signals(0.0)))
    for method in METHODS:
        np.testing.assert_array_equal(graded[method], single[method])


def test_a_mean_of_many_runs_has_a_tasks_own_spread_and_not_the_seeds():
    outcomes = fitted(planted(sigma=0.5))
    spread = {runs: float(np.var(outcomes.drawn(signals(0.5), PLAIN, runs=runs)["raft"])) for runs in (1, 1000)}
    own = outcomes.drawn(signals(0.5), PLAIN, runs=10**9)["raft"]
    assert spread[1000] == pytest.approx(float(np.var(own)), rel=0.01)
    assert spread[1] - spread[1000] == pytest.approx(float((outcomes.sigma_D**2).mean()), rel=0.5)  # 800 draws


@pytest.mark.parametrize("mean", [-40.0, -12.0, -4.0, 5.0, 12.0, 40.0])
def test_what_a_run_that_did_not_arrive_has_paid_is_drawn_between_once_and_twice_its_bound(mean):
    bound = np.full(500, 7.0)
    random = np.random.default_rng(0)
    drawn = _above(bound, bound + mean, np.ones(500), random) - bound
    assert drawn.min() + 1e-9 >= 0
    assert drawn.max() <= np.log(2) + 1e-9
    nearest = min(max(mean, 0), np.log(2))  # where such a law is densest
    assert np.median(np.abs(drawn - nearest)) < np.median(np.abs(random.random(500) * np.log(2) - nearest))


def test_beyond_the_evidence_a_task_s_own_spread_grows_by_the_deviations():
    """Two deviations beyond what any task had: √(1 + 2²) times τ. The standard error of 4,000 draws' spread is 1.1%."""
    one, none = np.ones(1), np.zeros((4000, 1))
    known = Outcomes(
        ("raft",), ("many_answers",), one * 0.5, one * 0.25, one * 0, one, none, none[:, None], none[:, 0] + 0.1, none[:, 0]
    )  # fmt: skip
    for many, times in ((0.5, 1), (1.0, 1), (1.5, 5**0.5), (-0.5, 5**0.5)):
        drawn = known.drawn(signals(many), {"raft": {"raft": 1.0}})["raft"]
        assert drawn.std() == pytest.approx(0.1 * times, rel=0.06)
