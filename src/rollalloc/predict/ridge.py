"""Ridge logistic regression of success rates on features, with a Laplace posterior, event weights and offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_FARTHEST = 10.0  # standardised features are clipped to ±10
_PRIOR_SD = 4.0  # prior standard deviation of a logit with ridge 1, whatever the number of features
_BIAS_RIDGE = 0.01
# Maximum number of Newton steps. The fit has converged when a step gains less than `_CONVERGED` nats.
_MOST_STEPS, _CONVERGED = 24, 1e-5
_AGAIN = 8  # number of Newton steps with one Gram matrix
_MOVED = 0.05  # share of Σ w n σ(1 − σ) by which the events may have moved without a new Gram matrix for the posterior
_LEAST_FLOW = 1e-300  # avoids 0 / 0 where every event is certain

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
    phi_KF: Floats,
    hits_K: Floats,
    count_K: Floats,
    weight_K: Floats,
    offset_K: Floats,
    ridges: Sequence[float],
    theta_RF: Floats,
) -> tuple[Floats, Rows, Rows]:
    """For each ridge, find θ that maximises Σ w (h·z − n·log(1 + e^z)) − ½ Σ λ θ² with z = φθ + offset, by Newton steps.

    λ is 0.01 for the bias and the ridge otherwise. Hits need not be whole numbers, as in the quasi-binomial family. Graded
    metrics vary less than successes with the same mean, so their posterior is wider than necessary.

    The Gram matrix φᵀ diag(w n σ(1 − σ)) φ and its decomposition take most of the time. So all ridges use that of the middle
    ridge, scaled to the ridge's own Σ w n σ(1 − σ), and it is computed anew only every `_AGAIN` steps. The gradients are
    exact, so each ridge still ends at its own θ. The posterior's covariance is that of the shared matrix. With thousands of
    events, this changes predicted rates by less than 0.002; with hundreds, those of the smallest ridge by up to 0.02.

    Args:
        phi_KF: φ from `design`, shape (K, F). It must be float64, because nearly equal columns would become equal in
            float32.
        hits_K: h, the sum of each event's metrics, in [0, count].
        count_K: n, the number of each event's rollouts, at least 1.
        weight_K: w, in (0, 1].
        offset_K: a number added to the logit of each event.
        ridges: the R values of λ, at least one, each above 0.
        theta_RF: start values, shape (R, F).

    Returns:
        θ, shape (R, F); and Q, shape (F, F), and c, shape (R, F), such that the posterior variance of φθ_r is
        Σ_i c_ri (φQ)_i². φQ is the same for all ridges r.
    """
    events = _Events(phi_KF, weight_K * hits_K, weight_K * count_K, offset_K)
    fits = [_Fit(events, ridge, theta_F) for ridge, theta_F in zip(ridges, theta_RF, strict=True)]
    shared, going = _Shared.of(fits), fits
    for step in range(_MOST_STEPS):
        if step and step % _AGAIN == 0:
            shared = _Shared.of(fits)
        going = [each for each in going if each.improve(shared)]
        if not going:
            break
    if shared.is_old(fits):
        shared = _Shared.of(fits)
    spread_RF = np.array([shared.spread(each.flow_K().sum(), each.ridge) for each in fits], np.float32)
    return np.array([each.theta_F for each in fits]), shared.basis_FF.astype(np.float32), spread_RF


class _Events(NamedTuple):
    """What is fitted to: φ, w h, w n and the offsets."""

    phi_KF: Floats
    pull_K: Floats
    push_K: Floats
    offset_K: Floats


class _Shared(NamedTuple):
    """Q diag(d) Qᵀ, the middle ridge's φᵀ diag(w n σ(1 − σ)) φ over its Σ w n σ(1 − σ).

    With it, the precision of a fit is P = f Q diag(d) Qᵀ + λI + (0.01 − λ)eeᵀ, where f is the fit's own Σ w n σ(1 − σ),
    and e is the unit vector of the bias. So P⁻¹ = A⁻¹ − k A⁻¹eeᵀA⁻¹ with A⁻¹ = Q diag(u) Qᵀ, u = 1 / (fd + λ) and
    k = (0.01 − λ) / (1 + (0.01 − λ) eᵀA⁻¹e).
    """

    values_F: Floats
    basis_FF: Floats
    flow_K: Floats  # w n σ(1 − σ) of each event, of the middle ridge at that time

    @classmethod
    def of(cls, fits: Sequence[_Fit]) -> _Shared:
        """The decomposition at the present θ of the middle ridge."""
        middle = fits[len(fits) // 2]
        flow_K = middle.flow_K()
        rooted_KF = middle.events.phi_KF * np.sqrt(flow_K)[:, None]
        values_F, basis_FF = np.linalg.eigh(rooted_KF.T @ rooted_KF / max(flow_K.sum(), _LEAST_FLOW))
        return cls(np.maximum(values_F, 0.0), basis_FF, flow_K)  # rounding can put the smallest below 0

    def is_old(self, fits: Sequence[_Fit]) -> bool:
        """Whether the middle ridge's θ has moved since so far that the posterior would change."""
        now_K = fits[len(fits) // 2].flow_K()
        return float(np.abs(now_K - self.flow_K).sum()) > _MOVED * float(self.flow_K.sum())

    def _terms(self, flow: float, ridge: float) -> tuple[Floats, Floats, float]:
        """u, uQᵀe and k."""
        u_F = 1 / (flow * self.values_F + ridge)
        bias_F, more = u_F * self.basis_FF[-1], _BIAS_RIDGE - ridge
        return u_F, bias_F, more / (1 + more * float(bias_F @ self.basis_FF[-1]))

    def solve(self, flow: float, ridge: float, slope_F: Floats) -> Floats:
        """P⁻¹ times the vector."""
        u_F, bias_F, k = self._terms(flow, ridge)
        turned_F = self.basis_FF.T @ slope_F
        return self.basis_FF @ (u_F * turned_F - k * bias_F * float(bias_F @ turned_F))

    def spread(self, flow: float, ridge: float) -> Floats:
        """c, the diagonal of Qᵀ P⁻¹ Q."""
        u_F, bias_F, k = self._terms(flow, ridge)
        return u_F - k * bias_F**2


class _Fit:
    """The fit with one ridge: θ, the logits z of the events, and the objective's negative, so far."""

    def __init__(self, events: _Events, ridge: float, theta_F: Floats) -> None:
        self.events, self.ridge = events, ridge
        self.ridge_F = np.full(theta_F.size, ridge)
        self.ridge_F[-1] = _BIAS_RIDGE  # the last parameter is the bias
        self._move(theta_F)

    def _move(self, theta_F: Floats) -> None:
        phi_KF, pull_K, push_K, offset_K = self.events
        self.theta_F, self.z_K = theta_F, phi_KF @ theta_F + offset_K
        penalty = 0.5 * float(self.ridge_F @ theta_F**2)
        self.cost = float(push_K @ np.logaddexp(0.0, self.z_K) - pull_K @ self.z_K) + penalty

    def flow_K(self) -> Floats:
        """w n σ(1 − σ) of each event at θ."""
        rate_K = sigmoid(self.z_K)
        return self.events.push_K * rate_K * (1 - rate_K)

    def improve(self, shared: _Shared) -> bool:
        """Take a step. Return False, and take none, if no step length that was tried gains `_CONVERGED`."""
        phi_KF, pull_K, push_K, _ = self.events
        slope_F = phi_KF.T @ (pull_K - push_K * sigmoid(self.z_K)) - self.ridge_F * self.theta_F
        step_F = shared.solve(self.flow_K().sum(), self.ridge, slope_F)
        gain = float(slope_F @ step_F)  # the quadratic approximation predicts half of this gain
        before = self.theta_F, self.z_K, self.cost
        while gain > _CONVERGED:
            self._move(before[0] + step_F)
            if self.cost <= before[2] - 1e-4 * gain:
                return True
            step_F, gain = step_F / 2, gain / 2
        self.theta_F, self.z_K, self.cost = before
        return False


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
