"""Ridge logistic regression: by hand."""

import numpy as np

from rollalloc.predict import ridge


def test_the_design_centres_scales_clips_and_adds_a_bias():
    rows_KD = np.array([[2, 0, 7, 1e9], [-2, 0.5, 7, -1e9]], np.float32)
    phi_KF = ridge.design(rows_KD, np.array([0, 0, 7, 0], np.float32), np.array([4, 1, 1, 1], np.float32))
    # 4 / √4 = 2 times (x - centre) / scale, which is kept within 10
    assert phi_KF.tolist() == [[1, 0, 0, 20, 1], [-1, 1, 0, -20, 1]]


def test_a_columns_scale_only_shrinks_what_varies_too_much():
    rows_KD = np.array([[1, 0, 3e38, 5], [7, 0.5, -3e38, 5]], np.float32)
    centre_D, scale_D = ridge.measure(rows_KD)
    np.testing.assert_allclose(centre_D, [4, 0.25, 0, 5])
    np.testing.assert_allclose(scale_D, [3, 1, 3e38, 1], rtol=1e-6)
    np.testing.assert_allclose(ridge.design(rows_KD, centre_D, scale_D)[:, :4], [[-2, -0.5, 2, 0], [2, 0.5, -2, 0]])


def test_a_fit_is_where_the_score_by_hand_is_zero():
    """φ = (±1, 1), θ = (1, 1/2), λ = .1: Σ w (h - nσ(z)) φ = (.1 · 1, .01 · 1/2) has residuals .0525 and -.0475.

    The events have different weights, counts and offsets, and hits that are fractions.
    """
    phi_KF = np.array([[1.0, 1.0], [-1.0, 1.0]])
    weight_K, count_K, offset_K = np.array([1.0, 0.5]), np.array([1.0, 4.0]), np.array([0.0, -1.0])
    rate_K = 1 / (1 + np.exp([-1.5, 1.5]))  # z = 1 + 1/2 + 0, and -1 + 1/2 - 1
    hits_K = count_K * rate_K + np.array([0.0525, -0.0475]) / weight_K
    fitted_RF, precisions = ridge.fit(phi_KF, hits_K, count_K, weight_K, offset_K, [0.1], np.zeros((1, 2)))
    (theta_F,), (precision_FF,) = fitted_RF, precisions
    np.testing.assert_allclose(theta_F, [1.0, 0.5], atol=5e-3)
    # P = Σ w n σ(1 - σ) φφᵀ + Λ; σ(1 - σ) = .149 for both, w n = 1 and 2
    s = 0.14914645
    np.testing.assert_allclose(precision_FF, [[3 * s + 0.1, -s], [-s, 3 * s + 0.01]], rtol=0.02)


def test_each_ridge_ends_where_it_would_alone_with_its_own_precision():
    """The ridges differ by factors of 1,000, so that the matrix that they share is far from right for two of them."""
    draws = np.random.default_rng(0)
    phi_KF = np.hstack([draws.standard_normal((400, 6)), np.ones((400, 1))])
    count_K = draws.integers(1, 5, 400).astype(float)
    hits_K = draws.binomial(count_K.astype(int), ridge.sigmoid(phi_KF @ np.array([3, -2, 1, 0, 0, 0, -1.0]))).astype(
        float
    )
    events = hits_K, count_K, draws.random(400), draws.standard_normal(400) / 4
    ridges = [0.01, 10.0, 1e4]
    thetas_RF, precisions_RFF = ridge.fit(phi_KF, *events, ridges, np.zeros((3, 7)))
    for strength, theta_F, precision_FF in zip(ridges, thetas_RF, precisions_RFF, strict=True):
        (alone_F,), (alone_FF,) = ridge.fit(phi_KF, *events, [strength], np.zeros((1, 7)))
        np.testing.assert_allclose(theta_F, alone_F, atol=2e-3)
        np.testing.assert_allclose(precision_FF, alone_FF, rtol=5e-3, atol=0.05)
    assert np.abs(thetas_RF[0] - thetas_RF[2]).max() > 1


def test_moments_are_those_of_the_posterior_by_hand():
    """Diagonal precisions (4, 1), (2, 8), (1, 5): the variance of (3, 1)θ is 9 / first + 1 / second."""
    basis_FF, spread_RF = ridge.spread(np.array([np.diag(each) for each in ([4.0, 1.0], [2.0, 8.0], [1.0, 5.0])]))
    theta_RF = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]])
    mean_KR, variance_KR = ridge.moments(np.array([[3, 1]], np.float32), theta_RF, basis_FF, spread_RF)
    np.testing.assert_allclose(mean_KR, [[3, 1, 5]])
    np.testing.assert_allclose(variance_KR, [[9 / 4 + 1, 9 / 2 + 1 / 8, 9 + 1 / 5]], rtol=1e-6)


def test_the_sigmoid_does_not_overflow():
    with np.errstate(all="raise"):
        assert ridge.sigmoid(np.array([-1e5, 0.0, 1e5])).tolist() == [0.0, 0.5, 1.0]
