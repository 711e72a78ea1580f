"""The limit of the gradient's norm that follows the run."""

from __future__ import annotations

import pytest

from rollalloc.generate.sampling import Sampling
from rollalloc.train.clipping import NormLimit
from rollalloc.train.config import Config


def test_the_limit_follows_the_norms_by_hand():
    limit = NormLimit(most=1.0, factor=1.5)
    assert limit.value == 1.0
    limit.saw(0.4)
    assert limit.value == pytest.approx(0.6)
    limit.saw(0.2)  # m = .95 · .4 + .05 · .2
    assert limit.value == pytest.approx(1.5 * 0.39)
    limit.saw(9.0)  # a spike counts for twice the limit: .95 · .39 + .05 · 2 · .585
    assert limit.mean == pytest.approx(0.429)
    limit.saw(0.0)  # no row of that step had an advantage
    assert limit.mean == pytest.approx(0.429)


def test_a_first_norm_beyond_all_others_is_forgotten():
    """The mean begins with at most `most`, so after 60 usual norms almost nothing is left of the first."""
    limit = NormLimit(most=1.0, factor=1.5)
    limit.saw(1e30)
    assert limit.mean == 1.0
    for _ in range(60):
        limit.saw(0.1)
    assert limit.value == pytest.approx(1.5 * (0.1 + 0.9 * 0.95**60))


def test_it_is_part_of_what_a_resumed_run_must_have_in_common():
    assert Config(sampling=Sampling(3), adaptive_clip=None).identity()["adaptive_clip"] is None
    assert Config(sampling=Sampling(3)).identity()["adaptive_clip"] == 1.5
