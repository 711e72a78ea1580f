"""Pools by success rate, by hand."""

import numpy as np
import pytest

from rollalloc.tasks.skills import Pool
from rollalloc_lab.tasks.bands import chosen_by_rate

POOL = Pool(edges=(0.02, 0.95), shares=(0.5, 0.25, 0.25))


def test_a_pool_has_the_shares_of_its_bands_each_candidate_at_most_once():
    rate_N = np.repeat([0.0, 0.019, 0.02, 0.949, 0.95, 1.0], 10)
    chosen = chosen_by_rate(rate_N, 40, POOL, np.random.default_rng(0))
    assert len(set(chosen.tolist())) == 40
    assert np.bincount(np.digitize(rate_N[chosen], POOL.edges)).tolist() == [20, 10, 10]
    bands_N = np.digitize(rate_N[chosen], POOL.edges)
    assert np.any(np.diff(bands_N) < 0)  # in random order


def test_a_band_with_too_few_candidates_is_named_with_what_there_is():
    rate_N = np.array([0.0, 0.0, 0.5, 1.0])
    with pytest.raises(ValueError, match=r"at least \[4, 2, 2\] .* found \[2, 1, 1\]; draw more candidates"):
        chosen_by_rate(rate_N, 8, POOL, np.random.default_rng(0))
