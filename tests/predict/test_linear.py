"""Ridge regression with a Gaussian likelihood: by hand."""

import numpy as np
import pytest

from rollalloc.predict import linear


def test_a_fit_by_hand():
    """φ = (±1, 1), w = (1, 1/2): ΦᵀWΦ = (3/2, 1/2; 1/2, 3/2), ΦᵀWy = (2 - 1/2, 2 + 1/2) for y = (2, 1).

    With λ = 1/2 and .01 for the bias: (2 θ₀ + θ₁/2, θ₀/2 + 1.51 θ₁) = (3/2, 5/2). The second target is twice the first.
    """
    phi_KF, weight_K = np.array([[1.0, 1.0], [-1.0, 1.0]]), np.array([1.0, 0.5])
    theta_RFT = linear.fit(phi_KF, np.array([[2.0, 4.0], [1.0, 2.0]]), weight_K, (0.5, 1e9))
    expected = np.linalg.solve([[2.0, 0.5], [0.5, 1.51]], [1.5, 2.5])
    np.testing.assert_allclose(theta_RFT[0, :, 0], expected)
    np.testing.assert_allclose(theta_RFT[0, :, 1], 2 * expected)
    # Under a ridge that allows nothing there is the bias alone, and that is hardly held back.
    assert theta_RFT[1, 0, 0] == pytest.approx(0, abs=1e-8)
    assert theta_RFT[1, 1, 0] == pytest.approx(2.5 / 1.51)
