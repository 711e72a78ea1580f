"""The Kalman step on the common drift: by hand."""

import numpy as np
import pytest

from rollalloc.predict import drift


def test_a_step_by_hand():
    """One success where 1/2 was said, p′ = 1/4: g = .5, I = .25; P⁻ = 1 + .01, P = 1.01 / 1.2525."""
    offset, variance = drift.step(0.3, 1.0, np.array([0.5]), np.array([0.25]), np.ones(1), np.ones(1), 0.01)
    assert variance == pytest.approx(1.01 / 1.2525)
    assert offset == pytest.approx(0.3 + 0.5 * 1.01 / 1.2525)


def test_a_step_over_two_events_by_hand():
    """p = .2 and .5, p′ = .08 and .25, 1.5 of 4 and 0 of 2: g = .7·.5 - 1 = -.65, I = 4·.04 + 2·.25 = .66; P⁻ = 6q."""
    said_K, slope_K, hits_K, count_K = np.array([[0.2, 0.5], [0.08, 0.25], [1.5, 0], [4, 2]])
    offset, variance = drift.step(0.0, 0.0, said_K, slope_K, hits_K, count_K, 0.1)
    assert variance == pytest.approx(0.6 / (1 + 0.6 * 0.66))
    assert offset == pytest.approx(variance * -0.65)


def test_a_step_of_the_drift_is_at_most_one_logit_and_0_without_a_walk():
    ones = np.ones(100)
    offset, _ = drift.step(0.0, 5.0, 0.1 * ones, 0.01 * ones, ones, ones, 0.0)
    assert offset == 1.0
    assert drift.step(0.7, 0.0, 0.1 * ones, 0.09 * ones, ones, ones, 0.0) == (0.7, 0.0)
