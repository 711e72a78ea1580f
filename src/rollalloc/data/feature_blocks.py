"""Features of prompts, from which a predictor estimates success rates before any rollout exists.

A block is an array with one row per prompt. All blocks have the same scale, whatever their width: if the predictor's weights
have unit variance, each block adds the same variance to the predicted logit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.recipe import at_least
from rollalloc.core.seeds import rng
from rollalloc.predict.predictor import WIDEST

WIDTH = 256  # default maximum number of columns of a block
_SCALE = 4.0  # root mean square length of a row
_NOISE = 1e-6  # a smaller standard deviation, relative to a column's root mean square, may be float32's rounding
_FAINT = 1e-30  # smaller standard deviations have too few digits in float32
_ROWS = 1 << 16  # number of rows to process at a time, to limit the size of temporary arrays

Tokens = Sequence[int]


@dataclass(frozen=True)
class FeatureCost:
    """The cost of computing features.

    Attributes:
        prompts: number of prompts.
        tokens: number of tokens that the model read, without padding.
        seconds: seconds from the first token to the last.
    """

    prompts: int
    tokens: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Features:
    """Blocks of features, and the cost of computing them.

    Attributes:
        blocks: float32 arrays by name, shape (N, D). Row n belongs to prompt n.
        cost: the cost of computing them.

    Raises:
        ValueError: there are no blocks; blocks differ in N; or a block is not a finite float32 array of shape (N, D).
    """

    blocks: Mapping[str, NDArray[np.float32]]
    cost: FeatureCost

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("expected at least one block of features, for example length, got none")
        first, *others = self.blocks.values()
        for name, block_ND in self.blocks.items():
            is_block = block_ND.dtype == np.float32 and block_ND.ndim == 2 and block_ND.size > 0
            if not is_block or block_ND.shape[0] != first.shape[0]:
                raise ValueError(
                    f"features {name!r}: expected float32 of shape (prompts, columns) with as many prompts as the other "
                    f"{len(others)} blocks have, got {block_ND.dtype} of shape {block_ND.shape}"
                )
            _refuse_infinite(name, block_ND)

    def __len__(self) -> int:
        return len(next(iter(self.blocks.values())))


def check_width(width: int) -> None:
    """Check that a width (number of columns) is in its range.

    Raises:
        ValueError: `width` is not in [1, `WIDEST`].
    """
    at_least("width", width, 1)
    if width > WIDEST:
        raise ValueError(
            f"width must be at most {WIDEST}, got {width}; {WIDTH} is usual, and a predictor's time grows with its square"
        )


def standardised(block_ND: ArrayLike) -> NDArray[np.float32]:
    """A block whose columns have mean 0 and equal standard deviations, at a fixed scale.

        x[n, d] = 4 / √V · (b[n, d] − mean_d) / deviation_d

    V is the number of columns that vary. Columns that do not vary, except by float32's rounding, become 0. With the factor
    4 / √V, the mean over n of Σ_d x[n, d]² is 4² = 16.

    Args:
        block_ND: shape (N, D), finite in float32.
    """
    x_ND = np.array(block_ND, np.float32)
    size_D = _root_mean_square(x_ND)
    # Subtract the mean twice. If the mean is far larger than the deviation, its rounding to float32 leaves a remainder.
    for _ in range(2):
        x_ND -= x_ND.mean(axis=0, dtype=np.float64).astype(np.float32)
    deviation_D = _root_mean_square(x_ND)
    varies_D = deviation_D > np.maximum(_NOISE * size_D, _FAINT)
    # Columns that do not vary are divided by infinity, and so become 0.
    x_ND /= np.where(varies_D, deviation_D, np.inf).astype(np.float32)
    x_ND *= np.float32(_SCALE / max(1, varies_D.sum()) ** 0.5)
    return x_ND


def projection(seed: int, rows: int, width: int) -> NDArray[np.float32]:
    """A random matrix P, shape (rows, width). Multiplication by P keeps squared lengths and distances on average.

        P[r, c] ~ N(0, 1 / width),   E‖x P‖² = ‖x‖², with a relative deviation of √(2 / width)

    Args:
        seed: equal seeds give equal matrices on every machine.
        rows: number of columns before the projection, at least 1.
        width: number of columns after the projection, at least 1.

    Source: Johnson and Lindenstrauss (1984); Dasgupta and Gupta (2003) for the Gaussian.
    """
    drawn = rng(seed, "projection").standard_normal((rows, width), np.float32)
    drawn /= np.float32(width**0.5)
    return drawn


def token_bag(tokens: Sequence[Tokens], vocabulary: int, *, width: int = WIDTH, seed: int = 0) -> NDArray[np.float32]:
    """How often each token occurs in each prompt, standardised. A large vocabulary is hashed into `width` columns.

        b[n, d] = Σ_{t in prompt n, column(t) = d} sign(t)

    A token's column and sign depend only on the token and the seed. If the vocabulary has at most `width` tokens, each token
    has its own column, with the sign 1.

    Args:
        tokens: N prompts as token ids, each in [0, vocabulary).
        vocabulary: size of the vocabulary.
        width: maximum number of columns.
        seed: seed of the hash.
    """
    exact = vocabulary <= width
    columns = vocabulary if exact else width
    column_V = np.arange(vocabulary) if exact else rng(seed, "token columns").integers(width, size=vocabulary)
    sign_V = np.ones(vocabulary) if exact else 1.0 - 2.0 * rng(seed, "token signs").integers(2, size=vocabulary)
    bag_ND = np.empty((len(tokens), columns), np.float32)
    for start in range(0, len(tokens), _ROWS):
        part = tokens[start : start + _ROWS]
        ids_T = np.fromiter(chain.from_iterable(part), np.int64)
        row_T = np.repeat(np.arange(len(part)), [len(prompt) for prompt in part])
        counts = np.bincount(row_T * columns + column_V[ids_T], sign_V[ids_T], len(part) * columns)
        bag_ND[start : start + len(part)] = counts.reshape(-1, columns)
    return standardised(bag_ND)


def log_length(tokens: Sequence[Tokens]) -> NDArray[np.float32]:
    """The logarithm of each prompt's number of tokens, standardised; shape (N, 1)."""
    return standardised(np.log([len(prompt) for prompt in tokens])[:, None])


def own_features(blocks: Mapping[str, ArrayLike], *, width: int = WIDTH, seed: int = 0) -> Features:
    """Features from your own arrays, for example from an embedding model: standardised, and projected if they are wide.

    Args:
        blocks: arrays of finite numbers by name, shape (N, D). Row n belongs to prompt n.
        width: maximum number of columns of a block. A wider block is projected to this width and standardised again.
        seed: seed of the projection.

    Raises:
        ValueError: there are no blocks; blocks differ in N; or a block does not have shape (N, D), or has numbers that do
            not fit into float32.
    """
    check_width(width)
    reduced = {name: _reduced(name, block, width, seed) for name, block in blocks.items()}
    return Features(reduced, FeatureCost(max((len(block_ND) for block_ND in reduced.values()), default=0), 0, 0.0))


def _reduced(name: str, block: ArrayLike, width: int, seed: int) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite, and are refused below
        array_ND = np.asarray(block, np.float32)
    if array_ND.ndim != 2 or not array_ND.size:
        raise ValueError(f"features {name!r}: expected shape (prompts, columns), got {array_ND.shape}")
    _refuse_infinite(name, array_ND)
    x_ND = standardised(array_ND)
    if x_ND.shape[1] <= width:
        return x_ND
    return standardised(x_ND @ projection(seed, x_ND.shape[1], width))


def _root_mean_square(x_ND: NDArray[np.float32]) -> NDArray[np.float64]:
    """The root mean square of each column, summed in float64 without converting the whole array."""
    sums_D = np.zeros(x_ND.shape[1])
    for start in range(0, len(x_ND), _ROWS):
        sums_D += np.square(x_ND[start : start + _ROWS], dtype=np.float64).sum(axis=0)
    return np.sqrt(sums_D / max(1, len(x_ND)))


def _refuse_infinite(name: str, block_ND: NDArray[np.float32]) -> None:
    for start in range(0, len(block_ND), _ROWS):
        finite_N = np.isfinite(block_ND[start : start + _ROWS]).all(axis=1)
        if not finite_N.all():
            raise ValueError(
                f"features {name!r}: expected finite float32 numbers, but row {start + int(finite_N.argmin())} has others; "
                "leave that prompt out, or fix how its features are computed"
            )
