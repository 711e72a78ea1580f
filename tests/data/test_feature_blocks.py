"""Features as numbers: the scale they are on, the bag of tokens, the projection, arrays of one's own."""

# pyright: reportIndexIssue=false

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rollalloc.data.feature_blocks import (
    check_width,
    log_length,
    own_features,
    projection,
    standardised,
    token_bag,
)

finite = st.floats(-1e6, 1e6, width=32)


@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12), elements=finite))
def test_each_column_has_mean_0_and_the_same_deviation_or_is_0(block_ND):
    """Columns that vary are scaled so that a row's squared length is 16 on average, whatever their number."""
    x_ND = standardised(block_ND)
    assert x_ND.dtype == np.float32
    varies_D = np.ptp(block_ND.astype(np.float64), axis=0) > np.maximum(1e-4 * np.abs(block_ND).max(axis=0), 1e-28)
    constant_D = np.ptp(block_ND, axis=0) == 0
    assert not x_ND[:, constant_D].any()
    seen_D = x_ND.any(axis=0)
    assert seen_D[varies_D].all()
    assert x_ND.mean(axis=0) == pytest.approx(np.zeros(x_ND.shape[1]), abs=1e-2)
    if seen_D.any():
        assert x_ND[:, seen_D].std(axis=0) == pytest.approx(np.full(seen_D.sum(), 4 / np.sqrt(seen_D.sum())), rel=1e-2)
        assert (x_ND.astype(np.float64) ** 2).sum(axis=1).mean() == pytest.approx(16, rel=1e-2)


def test_a_small_deviation_beside_a_large_mean_is_not_lost():
    """float32 holds 1000 ± 0.01, and the mean as rounded to it must not stand for the mean."""
    block_N1 = 1000 + 0.01 * np.random.default_rng(0).standard_normal((5000, 1))
    x_N1 = standardised(block_N1)
    assert x_N1.mean() == pytest.approx(0, abs=1e-5)
    assert x_N1.std() == pytest.approx(4, rel=1e-4)


# tokens and length


def test_a_small_vocabulary_is_counted_exactly():
    counts = [[2, 1, 0], [0, 0, 1], [1, 1, 1]]
    assert token_bag([(0, 0, 1), (2,), (0, 1, 2)], 3, width=3) == pytest.approx(standardised(counts))


def test_a_large_vocabulary_is_hashed_with_signs_into_the_width():
    """One prompt per token: each row of the bag, before it is standardised, has one entry, 1 or -1."""
    vocabulary, width = 2000, 16
    x_ND = token_bag([(token,) for token in range(vocabulary)], vocabulary, width=width)
    assert x_ND.shape == (vocabulary, width)
    middle_D = np.median(x_ND, axis=0)  # nearly all have 0 there
    away_ND = np.abs(x_ND - middle_D) > 1e-3
    assert (away_ND.sum(axis=1) == 1).all()
    column_N = away_ND.argmax(axis=1)
    positive_N = (x_ND > middle_D)[np.arange(vocabulary), column_N]
    # Fair coins and dice: 5 deviations either side, so that a right hash fails less than once in 10,000 seeds.
    assert abs(positive_N.sum() - vocabulary / 2) < 5 * np.sqrt(vocabulary / 4)
    expected, deviation = vocabulary / width, np.sqrt(vocabulary / width * (1 - 1 / width))
    assert np.abs(np.bincount(column_N, minlength=width) - expected).max() < 5 * deviation


def test_the_hash_depends_on_the_token_and_the_seed_only():
    tokens = [tuple(row) for row in np.random.default_rng(0).integers(0, 300, (50, 6)).tolist()]
    bag = token_bag(tokens, 300, width=7)
    assert np.array_equal(bag, token_bag(tokens, 300, width=7))
    assert np.array_equal(bag, token_bag(tokens, 10_000, width=7))  # a vocabulary padded for the hardware
    assert not np.array_equal(bag, token_bag(tokens, 300, width=7, seed=1))


def test_the_length_is_logarithmic():
    assert log_length([(1,), (1, 1), (1, 1, 1, 1)])[:, 0] == pytest.approx(
        4 * np.array([-1, 0, 1]) / np.sqrt(2 / 3), abs=1e-5
    )
    assert not log_length([(1, 2)] * 3).any()


# projection


def test_a_projection_keeps_distances():
    """Squared distances of 100 pairs in 1,000 dimensions, projected to 256: each ratio is χ²(256) / 256.

    It leaves [0.6, 1.5] with a chance of 5e-7 (scipy: chi2.cdf(153.6, 256) + chi2.sf(384, 256)), one of 100 with 5e-5.
    """
    pairs_2ND = np.random.default_rng(1).standard_normal((2, 100, 1000)).astype(np.float32)
    projected = pairs_2ND @ projection(0, 1000, 256)
    ratio_N = np.square(projected[0] - projected[1]).sum(1) / np.square(pairs_2ND[0] - pairs_2ND[1]).sum(1)
    assert ratio_N.min() > 0.6
    assert ratio_N.max() < 1.5
    # The mean of 100 has a deviation of √(2/256)/10 = 0.009.
    assert ratio_N.mean() == pytest.approx(1, abs=0.045)


# arrays of one's own


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({}, "at least one block"),
        ({"mine": [1.0, 2.0]}, r"features 'mine': expected shape \(prompts, columns\), got \(2,\)"),
        ({"mine": np.zeros((0, 3))}, r"got \(0, 3\)"),
        ({"mine": [[1.0], [np.nan]]}, "features 'mine': expected finite float32 numbers, but row 1 has others"),
        ({"mine": [[1.0], [1e300]]}, "row 1 has others"),
        ({"mine": np.zeros((3, 1)), "yours": np.zeros((2, 1))}, "features 'yours': .* as many prompts"),
    ],
)
def test_arrays_that_are_no_features_are_refused(blocks, message):
    with pytest.raises(ValueError, match=message):
        own_features(blocks)


@pytest.mark.parametrize("width", [0, -1, 4097, 2.0, True, "256"])
def test_a_width_that_cannot_be_is_refused(width):
    with pytest.raises(ValueError, match="width must be"):
        check_width(width)
    with pytest.raises(ValueError, match="width must be"):
        own_features({"mine": np.zeros((2, 2))}, width=width)
