"""What predictions were worth: by hand."""

import numpy as np
import pytest

from rollalloc.predict import quality


def test_log_losses_by_hand():
    said_KE = np.array([[0.5, 0.25], [0.5, 1.0]])
    losses_E = quality.log_losses(said_KE, np.array([1.0, 1.5]), np.array([2.0, 2.0]))
    np.testing.assert_allclose(
        losses_E,
        [4 * np.log(2), -np.log(0.25) - np.log(0.75) - 1.5 * np.log(0.999) - 0.5 * np.log(0.001)],
    )


def test_auc_by_hand():
    """Successes at .8, .5; failures at .5, .2, .2: of 6 pairs 5 are in order and 1 is tied."""
    said_K = np.array([0.5, 0.2, 0.8])
    assert quality.auc(said_K, np.array([1.0, 0.0, 1.0]), np.array([2.0, 2.0, 1.0])) == pytest.approx(5.5 / 6)
    assert quality.auc(said_K, np.array([0.5, 0.5, 0.5]), np.ones(3)) == pytest.approx(0.5)


def test_calibration_error_by_hand():
    """Two bins: .2, .4 said of 1 and 0 hits (|.6 - 1|), .6, .9 of 1 and 3 of 3 (|3.3 - 4|), over 6 rollouts."""
    said_K, hits_K, count_K = np.array([[0.9, 0.2, 0.6, 0.4], [3, 1, 1, 0], [3, 1, 1, 1]])
    assert quality.calibration_error(said_K, hits_K, count_K, bins=2) == pytest.approx((0.4 + 0.7) / 6)
