"""The priors that a run began with, kept with it: a block of two columns in a file of features, rate and rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollalloc.core.table import Priors
from rollalloc.data.feature_file import read_features, write_features
from rollalloc.data.features import Cost, Features

_BLOCK = "priors"


def write_priors(path: Path, keys: Sequence[str], priors: Priors) -> None:
    """Write priors under their prompts' keys, whole or not at all, over priors that stand there.

    Raises:
        ValueError: another number of keys than of priors, or a key that occurs twice.
        FileExistsError: something is there that is not ours.
        OSError: it could not be written.
    """
    both_N2 = np.stack([np.nan_to_num(np.asarray(priors.rate_N)), np.asarray(priors.rollouts_N)], 1)
    write_features(path, keys, Features({_BLOCK: both_N2.astype(np.float32)}, Cost(len(keys), 0, 0.0)), overwrite=True)


def read_priors(path: Path, keys: Sequence[str]) -> Priors:
    """The priors of these prompts.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: it is torn or of another kind, or lacks some of the prompts.
    """
    blocks = read_features(path, keys).blocks
    if _BLOCK not in blocks or blocks[_BLOCK].shape[1] != 2:
        raise ValueError(f"{path}: expected priors, found features; it is not what the run wrote")
    return Priors(blocks[_BLOCK][:, 0], blocks[_BLOCK][:, 1])
