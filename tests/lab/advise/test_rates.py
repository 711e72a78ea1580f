"""The mixture of success rates: what its parts must be, and how often its intervals cover the truth."""

from __future__ import annotations

import numpy as np
import pytest

from rollalloc.lab.advise.rates import fit_rates


def test_a_mixture_of_counts_has_their_mean():
    hits, count = np.array([0, 1, 2, 3, 4] * 20), np.full(100, 4)
    fitted = fit_rates(hits, count)
    assert fitted.weight_K.sum() == pytest.approx(1)
    assert fitted.mean.value == pytest.approx(0.5, abs=0.01)
    assert fitted.zero_variance(4).value == pytest.approx(0.4, abs=0.02)
    assert fitted.zero_variance(1).value == pytest.approx(1)


def test_no_counts_are_refused():
    with pytest.raises(ValueError, match="at least one prompt, got none"):
        fit_rates(np.zeros(0, np.int64), np.zeros(0, np.int64))
