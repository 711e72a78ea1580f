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
    (theta_F,), basis_FF, (spread_F,) = ridge.fit(phi_KF, hits_K, count_K, weight_K, offset_K, [0.1], np.zeros((1, 2)))
    np.testing.assert_allclose(theta_F, [1.0, 0.5], atol=5e-3)
    # P = Σ w n σ(1 - σ) φφᵀ + Λ; σ(1 - σ) = .149 for both, w n = 1 and 2
    s = 0.14914645
    covariance_FF = np.linalg.inv([[3 * s + 0.1, -s], [-s, 3 * s + 0.01]])
    np.testing.assert_allclose(spread_F, np.diag(basis_FF.T @ covariance_FF @ basis_FF), rtol=0.02)


def test_each_ridge_ends_where_it_would_alone_and_the_middle_one_with_its_own_spread():
    """The ridges differ by factors of 1,000, so that the matrix that they share is far from right for two of them."""
    draws = np.random.default_rng(0)
    phi_KF = np.hstack([draws.standard_normal((400, 6)), np.ones((400, 1))])
    count_K = draws.integers(1, 5, 400).astype(float)
    hits_K = draws.binomial(count_K.astype(int), ridge.sigmoid(phi_KF @ np.array([3, -2, 1, 0, 0, 0, -1.0]))).astype(
        float
    )
    events = hits_K, count_K, draws.random(400), draws.standard_normal(400) / 4
    ridges = [0.01, 10.0, 1e4]
    thetas_RF, basis_FF, spread_RF = ridge.fit(phi_KF, *events, ridges, np.zeros((3, 7)))
    for strength, theta_F in zip(ridges, thetas_RF, strict=True):
        (alone_F,), *_ = ridge.fit(phi_KF, *events, [strength], np.zeros((1, 7)))
        np.testing.assert_allclose(theta_F, alone_F, atol=2e-3)
    assert np.abs(thetas_RF[0] - thetas_RF[2]).max() > 1
    # The middle ridge's Σ w n σ(1 - σ) φφᵀ + Λ, written out; its inverse, in the basis.
    hits_K, count_K, weight_K, offset_K = events
    rate_K = ridge.sigmoid(phi_KF @ thetas_RF[1] + offset_K)
    precision_FF = (phi_KF.T * (weight_K * count_K * rate_K * (1 - rate_K))) @ phi_KF + np.diag([10.0] * 6 + [0.01])
    wanted_F = np.diag(basis_FF.T @ np.linalg.inv(precision_FF) @ basis_FF)
    np.testing.assert_allclose(spread_RF[1], wanted_F, rtol=0.02)


def test_a_posterior_narrows_with_its_ridge_and_with_its_events():
    draws = np.random.default_rng(1)
    phi_KF = np.hstack([draws.standard_normal((600, 5)), np.ones((600, 1))])
    hits_K = (draws.random(600) < ridge.sigmoid(phi_KF[:, 0])).astype(float)

    def variances(count):
        ones_K, none_K = np.ones(count), np.zeros(count)
        fitted = ridge.fit(phi_KF[:count], hits_K[:count], ones_K, ones_K, none_K, [0.1, 1.0, 10.0], np.zeros((3, 6)))
        return ridge.moments(phi_KF.astype(np.float32), *fitted)[1]

    few_KR, many_KR = variances(100), variances(600)
    assert np.all(many_KR.mean(0) < few_KR.mean(0) / 3)
    assert np.all(np.diff(few_KR.mean(0)) < 0)


def test_moments_are_those_of_the_posterior_by_hand():
    """Variances (1/4, 1), (1/2, 1/8), (1, 1/5) along the axes: that of (3, 1)θ is 9 · first + second."""
    theta_RF = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]])
    spread_RF = np.array([[1 / 4, 1.0], [1 / 2, 1 / 8], [1.0, 1 / 5]], np.float32)
    mean_KR, variance_KR = ridge.moments(
        np.array([[3, 1]], np.float32), theta_RF, np.eye(2, dtype=np.float32), spread_RF
    )
    np.testing.assert_allclose(mean_KR, [[3, 1, 5]])
    np.testing.assert_allclose(variance_KR, [[9 / 4 + 1, 9 / 2 + 1 / 8, 9 + 1 / 5]], rtol=1e-6)


def test_the_sigmoid_does_not_overflow():
    with np.errstate(all="raise"):
        assert ridge.sigmoid(np.array([-1e5, 0.0, 1e5])).tolist() == [0.0, 0.5, 1.0]
