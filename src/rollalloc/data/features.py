"""Features of prompts: what a predictor sees of them before a rollout is paid for.

A block is an array of one row per prompt. All blocks are put on one scale, so that a weight of unit variance in each column
gives a logit of the same variance whatever the block's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.recipe import at_least
from rollalloc.core.seeds import rng

WIDTH = 256  # columns of a block by default
WIDEST = 4096
_SCALE = 4.0  # root mean square length of a row
_NOISE = 1e-6  # deviation, as a share of a column's root mean square, that float32 makes of equal values
_FAINT = 1e-30  # deviation below which float32 runs out of digits
_ROWS = 1 << 16  # worked on at a time, where something of their width is made beside them

Tokens = Sequence[int]


@dataclass(frozen=True)
class FeatureCost:
    """What features cost.

    Attributes:
        prompts: number of them.
        tokens: that went through the model, padding not counted.
        seconds: from the first token to the last.
    """

    prompts: int
    tokens: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Features:
    """Blocks of features and what they cost.

    Attributes:
        blocks: by name, float32 of shape (N, D); row n belongs to prompt n.
        cost: of making them.

    Raises:
        ValueError: no blocks, a block of another shape or type, or one that is not finite.
    """

    blocks: Mapping[str, NDArray[np.float32]]
    cost: FeatureCost

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("expected at least one block of features, got none; e.g. length")
        first, *others = self.blocks.values()
        for name, block_ND in self.blocks.items():
            whole = block_ND.dtype == np.float32 and block_ND.ndim == 2 and block_ND.size > 0
            if not whole or block_ND.shape[0] != first.shape[0]:
                raise ValueError(
                    f"features {name!r}: expected float32 of shape (prompts, columns) with as many prompts as the other "
                    f"{len(others)} blocks have, got {block_ND.dtype} of shape {block_ND.shape}"
                )
            _refuse_infinite(name, block_ND)

    def __len__(self) -> int:
        return len(next(iter(self.blocks.values())))


def check_width(width: int) -> None:
    """Refuse a number of columns that cannot be.

    Raises:
        ValueError: says what was expected.
    """
    at_least("width", width, 1)
    if width > WIDEST:
        raise ValueError(
            f"width must be at most {WIDEST}, got {width}; a predictor's time grows with its square: {WIDTH} is usual"
        )


def standardised(block_ND: ArrayLike) -> NDArray[np.float32]:
    """A block with columns of mean 0 and one deviation, at a fixed scale.

        x[n, d] = 4 / √V · (b[n, d] − mean_d) / deviation_d

    V columns vary; those that do not, or not beyond float32's rounding, are 0. So Σ_d x[n, d]² is 16 in the mean over n.

    Args:
        block_ND: shape (N, D), finite in float32.
    """
    x_ND = np.array(block_ND, np.float32)
    size_D = _root_mean_square(x_ND)
    for _ in range(2):  # the mean as rounded to float32 leaves a rest where it is far above the deviation
        x_ND -= x_ND.mean(axis=0, dtype=np.float64).astype(np.float32)
    deviation_D = _root_mean_square(x_ND)
    varies_D = deviation_D > np.maximum(_NOISE * size_D, _FAINT)
    # What is divided by infinity is 0.
    x_ND /= np.where(varies_D, deviation_D, np.inf).astype(np.float32)
    x_ND *= np.float32(_SCALE / max(1, varies_D.sum()) ** 0.5)
    return x_ND


def projection(seed: int, rows: int, width: int) -> NDArray[np.float32]:
    """A random matrix P, shape (rows, width), whose product keeps squared lengths and distances in the mean.

        P[r, c] ~ N(0, 1 / width),   E‖x P‖² = ‖x‖², with a relative deviation of √(2 / width)

    Args:
        seed: the same gives the same matrix everywhere.
        rows: width of what is projected, at least 1.
        width: to project to, at least 1.

    Source: Johnson and Lindenstrauss (1984); Dasgupta and Gupta (2003) for the Gaussian.
    """
    drawn = rng(seed, "projection").standard_normal((rows, width), np.float32)
    drawn /= np.float32(width**0.5)
    return drawn


def token_bag(tokens: Sequence[Tokens], vocabulary: int, *, width: int = WIDTH, seed: int = 0) -> NDArray[np.float32]:
    """How often each token stands in each prompt, standardised; in hashed columns where the vocabulary is wider.

        b[n, d] = Σ_{t in prompt n, column(t) = d} sign(t)

    A token's column and sign depend on it and the seed only. In a vocabulary of at most `width` they are itself and 1.

    Args:
        tokens: N prompts as token ids, each in [0, vocabulary).
        vocabulary: number of tokens there are.
        width: columns at most.
        seed: of the hash.
    """
    exact = vocabulary <= width
    columns = vocabulary if exact else width
    column_V = np.arange(vocabulary) if exact else rng(seed, "token columns").integers(width, size=vocabulary)
    sign_V = np.ones(vocabulary) if exact else 1.0 - 2.0 * rng(seed, "token signs").integers(2, size=vocabulary)
    bag_ND = np.empty((len(tokens), columns), np.float32)
    for start in range(0, len(tokens), _ROWS):
        part = tokens[start : start + _ROWS]
        ids_T = np.fromiter(chain.from_iterable(part), np.int64)
        row_T = np.repeat(np.arange(len(part)), [len(each) for each in part])
        counted = np.bincount(row_T * columns + column_V[ids_T], sign_V[ids_T], len(part) * columns)
        bag_ND[start : start + len(part)] = counted.reshape(-1, columns)
    return standardised(bag_ND)


def log_length(tokens: Sequence[Tokens]) -> NDArray[np.float32]:
    """The logarithm of each prompt's number of tokens, at least 1, standardised; shape (N, 1)."""
    return standardised(np.log([len(each) for each in tokens])[:, None])


def own_features(blocks: Mapping[str, ArrayLike], *, width: int = WIDTH, seed: int = 0) -> Features:
    """Features from arrays of one's own, of any embedding model say: standardised, and projected where they are wide.

    Args:
        blocks: by name, shape (N, D) each, row n for prompt n; finite numbers.
        width: columns of a block at most; a wider one is projected to so many and standardised again.
        seed: of the projection.

    Raises:
        ValueError: no blocks, blocks of another shape or of unequal N, or numbers that float32 does not hold.
    """
    check_width(width)
    reduced = {name: _reduced(name, block, width, seed) for name, block in blocks.items()}
    return Features(reduced, FeatureCost(max((len(block_ND) for block_ND in reduced.values()), default=0), 0, 0.0))


def _reduced(name: str, block: ArrayLike, width: int, seed: int) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what is too large for float32 is refused as infinite
        array_ND = np.asarray(block, np.float32)
    if array_ND.ndim != 2 or not array_ND.size:
        raise ValueError(f"features {name!r}: expected shape (prompts, columns), got {array_ND.shape}")
    _refuse_infinite(name, array_ND)
    x_ND = standardised(array_ND)
    if x_ND.shape[1] <= width:
        return x_ND
    return standardised(x_ND @ projection(seed, x_ND.shape[1], width))


def _root_mean_square(x_ND: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of each column, summed in float64 without a copy of all in it."""
    sums_D = np.zeros(x_ND.shape[1])
    for start in range(0, len(x_ND), _ROWS):
        sums_D += np.square(x_ND[start : start + _ROWS], dtype=np.float64).sum(axis=0)
    return np.sqrt(sums_D / max(1, len(x_ND)))


def _refuse_infinite(name: str, block_ND: NDArray[np.float32]) -> None:
    for start in range(0, len(block_ND), _ROWS):
        finite_N = np.isfinite(block_ND[start : start + _ROWS]).all(axis=1)
        if not finite_N.all():
            raise ValueError(
                f"features {name!r}: expected finite numbers of float32, got others in row "
                f"{start + int(finite_N.argmin())}; take that prompt out, or mend what makes them"
            )
