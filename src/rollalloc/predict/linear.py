"""Ridge regression with a Gaussian likelihood: several ridges from one product of the design with itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollalloc.predict.ridge import Floats, penalties


def fit(phi_KF: Floats, y_KT: Floats, weight_K: Floats, ridges: Sequence[float]) -> Floats:
    """θ that minimises Σ w (y − φθ)² + Σ λ θ² for each ridge λ and each target; λ is .01 for the bias.

        θ = (Φᵀ W Φ + Λ)⁻¹ Φᵀ W y

    Hoerl and Kennard, Technometrics 12, 1970. It is the mean of the posterior where y has variance 1 / w about φθ, and each
    θ has variance 1 / λ about 0.

    Args:
        phi_KF: of `ridge.design`, shape (K, F), in float64.
        y_KT: finite, shape (K, T); of mean about 0 and deviation about 1, to which λ is made.
        weight_K: in (0, 1], shape (K,).
        ridges: λ, each above 0.

    Returns:
        Shape (R, F, T).
    """
    weighted_KF = phi_KF * weight_K[:, None]
    product_FF, pull_FT = weighted_KF.T @ phi_KF, weighted_KF.T @ y_KT
    found = [np.linalg.solve(product_FF + np.diag(penalties(each, len(pull_FT))), pull_FT) for each in ridges]
    return np.array(found, np.float64)
