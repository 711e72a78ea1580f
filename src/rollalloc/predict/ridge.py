"""Ridge logistic regression of success rates on features, with a Laplace posterior, event weights and offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FARTHEST = 10.0  # standardised features are clipped to ±10
_PRIOR_SD = 4.0  # prior standard deviation of a logit with ridge 1, whatever the number of features
_BIAS_RIDGE = 0.01
# Maximum number of Newton steps. The fit has converged when a step gains less than `_CONVERGED` nats.
_MOST_STEPS, _CONVERGED = 12, 1e-5

Floats = NDArray[np.float64]
Rows = NDArray[np.float32]
Features = Mapping[str, NDArray[Any]]  # float32 blocks of shape (N, D); columns have mean about 0 and std about 1


def sigmoid(logit: Floats) -> Floats:
    """σ(z) = 1 / (1 + e^−z), without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * logit))


def measure(rows_KD: Rows) -> tuple[Rows, Rows]:
    """The centre and scale of each column. The scale is the standard deviation, but at least 1.

    Columns that vary little are not scaled up, because their values may be 0 in nearly all rows.

    Args:
        rows_KD: finite, shape (K, D).

    Returns:
        Centre and scale, each of shape (D,).
    """
    mean_D, deviation_D = rows_KD.mean(0, dtype=np.float64), rows_KD.std(0, dtype=np.float64)  # float32 could overflow
    return mean_D.astype(np.float32), np.maximum(deviation_D, 1.0).astype(np.float32)


def design(rows_KD: Rows, centre_D: Rows, scale_D: Rows) -> Rows:
    """φ = (4 / √D · clip((x − centre) / scale, ±10), 1). With ridge 1, the prior std of a logit is about 4 for any D.

    Args:
        rows_KD: finite features, shape (K, D).
        centre_D: from `measure`.
        scale_D: from `measure`.

    Returns:
        Shape (K, D + 1); the last column is the bias.
    """
    count, width = rows_KD.shape
    phi_KF = np.ones((count, width + 1), np.float32)
    inner_KD = phi_KF[:, :width]
    with np.errstate(over="ignore"):  # infinities are clipped below
        np.subtract(rows_KD, centre_D, out=inner_KD)
    inner_KD /= scale_D
    np.clip(inner_KD, -_FARTHEST, _FARTHEST, out=inner_KD)
    inner_KD *= np.float32(_PRIOR_SD / np.sqrt(max(width, 1)))
    return phi_KF


def fit(
    phi_KF: Floats, hits_K: Floats, count_K: Floats, weight_K: Floats, offset_K: Floats, ridge: float, theta_F: Floats
) -> tuple[Floats, Floats]:
    """Find θ that maximises Σ w (h·z − n·log(1 + e^z)) − ½ Σ λ θ² with z = φθ + offset, by Newton steps.

    λ is 0.01 for the bias and `ridge` otherwise. Hits need not be whole numbers, as in the quasi-binomial family. Graded
    metrics vary less than successes with the same mean, so their posterior is wider than necessary.

    Args:
        phi_KF: φ from `design`, shape (K, F). It must be float64, because nearly equal columns would become equal in
            float32.
        hits_K: h, the sum of each event's metrics, in [0, count].
        count_K: n, the number of each event's rollouts, at least 1.
        weight_K: w, in (0, 1].
        offset_K: a number added to the logit of each event.
        ridge: λ, above 0.
        theta_F: start value, shape (F,).

    Returns:
        θ, shape (F,), and the precision −∇² at θ, shape (F, F).
    """
    ridge_F = np.full(theta_F.size, ridge)
    ridge_F[-1] = _BIAS_RIDGE  # the last parameter is the bias
    pull_K, push_K = weight_K * hits_K, weight_K * count_K

    def logits(at_F: Floats) -> Floats:
        return phi_KF @ at_F + offset_K

    def cost(z_K: Floats, at_F: Floats) -> float:
        return float(push_K @ np.logaddexp(0.0, z_K) - pull_K @ z_K + 0.5 * ridge_F @ at_F**2)

    z_K = logits(theta_F)
    now = cost(z_K, theta_F)
    precision_FF = np.diag(ridge_F)
    for _ in range(_MOST_STEPS):
        rate_K = sigmoid(z_K)
        slope_F = phi_KF.T @ (pull_K - push_K * rate_K) - ridge_F * theta_F
        rooted_KF = phi_KF * np.sqrt(push_K * rate_K * (1 - rate_K))[:, None]
        precision_FF = rooted_KF.T @ rooted_KF + np.diag(ridge_F)
        step_F = np.linalg.solve(precision_FF, slope_F)
        gain = float(slope_F @ step_F)  # the quadratic approximation predicts half of this gain
        while gain > _CONVERGED:
            z_K = logits(theta_F + step_F)
            then = cost(z_K, theta_F + step_F)
            if then <= now - 1e-4 * gain:
                break
            step_F, gain = step_F / 2, gain / 2
        else:  # no step length that was tried improves the objective
            break
        theta_F, now = theta_F + step_F, then
    return theta_F, precision_FF


def spread(precision_RFF: Floats) -> tuple[Rows, Rows]:
    """Q and c such that the variance of φθ_r is about Σ_i c_ri (φQ)_i². φQ is computed only once for all ridges r.

    The columns of Q are the eigenvectors of P_r for the middle ridge r, and c_r is the diagonal of Qᵀ P_r⁻¹ Q. The
    variance is exact for the middle ridge, and for each ridge whose P_r has the same eigenvectors. For other ridges, the
    approximation hardly changes the predicted rates.

    Args:
        precision_RFF: P_r from `fit`, shape (R, F, F).

    Returns:
        Q, shape (F, F), and c, shape (R, F).
    """
    _, basis_FF = np.linalg.eigh(precision_RFF[len(precision_RFF) // 2])
    spread_RF = [np.einsum("fi,fi->i", basis_FF, np.linalg.solve(each_FF, basis_FF)) for each_FF in precision_RFF]
    return basis_FF.astype(np.float32), np.array(spread_RF, np.float32)


def moments(phi_KF: Rows, theta_RF: Floats, basis_FF: Rows, spread_RF: Rows) -> tuple[Floats, Floats]:
    """Mean and variance of the logits φθ_r under their posteriors, each of shape (K, R)."""
    # NumPy would warn of invalid values here, because OpenBLAS also reads memory beyond the arrays.
    with np.errstate(invalid="ignore"):
        mean_KR = phi_KF @ theta_RF.T.astype(np.float32)
        turned_KF = phi_KF @ basis_FF
        np.square(turned_KF, out=turned_KF)
        return mean_KR.astype(np.float64), (turned_KF @ spread_RF.T).astype(np.float64)


def flatness(variance: Floats) -> Floats:
    """κ = 1 / √(1 + πv/8). If z has mean μ and variance v, then E σ(z) ≈ σ(κμ) (MacKay 1992)."""
    return 1.0 / np.sqrt(1.0 + np.pi * variance / 8.0)
