"""Blocks of features: the rows of some prompts, as every predictor reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Features = Mapping[str, NDArray[Any]]  # by block: shape (N, D), columns of mean about 0 and deviation about 1


def rows_of(features: Features, name: str, shape: tuple[int, int], prompts_K: NDArray[np.int64]) -> NDArray[np.float32]:
    """The rows of a block for some prompts, shape (K, D); reads no others.

    Args:
        features: by block.
        name: of the block.
        shape: (N, D) that a memory was made for.
        prompts_K: indices in [0, N).

    Raises:
        ValueError: a block that is missing, of another shape, or not finite for one of them.
    """
    if name not in features or features[name].shape != shape:
        got = features[name].shape if name in features else f"only {sorted(features)}"
        raise ValueError(f"features {name!r}: expected shape {shape}, as the memory was made for, got {got}")
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
        rows_KD = features[name][prompts_K].astype(np.float32, copy=False)
    if not np.isfinite(rows_KD).all():
        bad = prompts_K[~np.isfinite(rows_KD).all(1)][0]
        raise ValueError(f"features {name!r} of prompt {bad} are not finite; fill in or drop such columns")
    return rows_KD
