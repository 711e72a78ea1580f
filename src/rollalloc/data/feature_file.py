"""A file of features in safetensors format, with a digest of each prompt's key. The header names the model that was used.

The file is written completely or not at all. It replaces only files that this module wrote.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rollalloc.core.prompts import key_digests
from rollalloc.data.feature_blocks import FeatureCost, Features
from rollalloc.files.claims import claim_files, refuse_foreign_files
from rollalloc.files.regular import written

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_SCHEMA = 4
_MADE_BY = "rollalloc features"
_HEADER = "rollalloc"  # name of our header in the metadata of the file; its value is JSON
_KEYS = "keys"
_BLOCK = "block:"  # prefix of the names of tensors with features
# Errors raised when a file is read that is corrupt, or that another program wrote.
_NOT_OURS = (SafetensorError, ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Origin:
    """The model that computed the features.

    Attributes:
        model: name or folder of the model, as the user gave it.
        weights: digest of the model's weights (`rollalloc.models.featurizer.weights_digest`).
        seed: seed of the projection and the hash.
    """

    model: str
    weights: str
    seed: int


def refuse_place(path: Path, *, overwrite: bool = False) -> None:
    """Check that features can be written to a path. Nothing is changed.

    Args:
        path: path of the file.
        overwrite: whether an existing file of features may be replaced.

    Raises:
        ValueError: the name does not end in .safetensors.
        FileExistsError: the file exists, and `overwrite` is False or rollalloc did not write the file.
        NotADirectoryError, PermissionError: the folder cannot be written to.
    """
    if path.suffix != SUFFIX or path.name == SUFFIX:
        raise ValueError(
            f"expected the name of a file that ends in {SUFFIX}, got {str(path)!r}; e.g. --out features{SUFFIX}"
        )
    refuse_foreign_files([path])
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(f"{path} holds features already; replace them (--overwrite), or give another --out")
    parent = next(place for place in path.absolute().parents if os.path.lexists(place))
    if not parent.is_dir():
        raise NotADirectoryError(f"{path} cannot be written, since {parent} is not a folder; give another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"you have no permission to write into {parent}; give another --out")


def holds_features(path: Path) -> bool:
    """Whether a file has the header of a file of features."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with safe_open(path, "np") as file:
            _read_header(file.metadata())
    except (OSError, *_NOT_OURS):
        return False
    return True


def write_features(
    path: Path, keys: Sequence[str], features: Features, *, origin: Origin | None = None, overwrite: bool = False
) -> None:
    """Write features with the keys of their prompts, completely or not at all. Missing folders are created.

    Args:
        path: a path that ends in .safetensors.
        keys: unique keys of the prompts, in the order of the rows (`rollalloc.data.prompts.PromptSet.keys`).
        features: features of the same prompts.
        origin: the model that computed the features. None: unknown, for example for your own arrays.
        overwrite: True: an existing file of features is replaced.

    Raises:
        ValueError: the number of keys is not the number of rows, a key occurs twice, or the path does not end in
            .safetensors.
        FileExistsError: the file exists, and `overwrite` is False or rollalloc did not write the file.
        OSError: the file could not be written.
    """
    path = Path(path)
    refuse_place(path, overwrite=overwrite)
    claim_files([path])
    save_features(path, keys, features, origin=origin)


def save_features(path: Path, keys: Sequence[str], features: Features, *, origin: Origin | None = None) -> None:
    """Like `write_features`, but replaces an existing file. The caller must have claimed the path (`files.claims`)."""
    if len(keys) != len(features):
        raise ValueError(f"expected one key for each row, got {len(keys)} keys for {len(features)} rows of features")
    keys_N = key_digests(keys)
    if len(np.unique(keys_N)) < len(keys_N):
        raise ValueError(
            f"{len(keys_N) - len(np.unique(keys_N))} keys occur more than once; features are looked up by key, so each must "
            "be unique"
        )
    header = {
        "schema": _SCHEMA,
        "made_by": _MADE_BY,
        "prompts": len(keys_N),
        "origin": None if origin is None else asdict(origin),
        "blocks": {name: block_ND.shape[1] for name, block_ND in features.blocks.items()},
        "cost": asdict(features.cost),
    }
    tensors = {f"{_BLOCK}{name}": np.ascontiguousarray(block_ND) for name, block_ND in features.blocks.items()}
    metadata = {_HEADER: json.dumps(header)}
    with written(path) as temporary:
        try:
            save_file({_KEYS: keys_N, **tensors}, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path} could not be written ({error}); free some space, or give another --out") from error


def read_features(path: Path, keys: Sequence[str], *, weights: str | None = None) -> Features:
    """Read the features of the prompts with these keys, in the order of the keys.

    The file may have more prompts, in any order. A warning is logged if another model than the run's computed the features.
    Predictions may then be worse, but training stays correct.

    Args:
        path: a file that `write_features` wrote.
        keys: keys of the prompts.
        weights: digest of the run's initial weights, to compare with the digest in the file. None: do not compare.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: `keys` is empty; some prompts are not in the file; or the file is corrupt, was changed, or is not a file
            of features of this schema.
    """
    path = Path(path)
    if not keys:
        raise ValueError("expected the keys of at least one prompt, got none")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `{_MADE_BY} --out {path}` writes it")
    wanted_N = key_digests(keys)
    try:
        with safe_open(path, "np") as file:
            header = _read_header(file.metadata())
            keys_N = _tensor(file, _KEYS, "U64", [header["prompts"]])
            whole = {name: _block_of(file, name, header) for name in header["blocks"]}
        rows_N = _rows(keys_N, wanted_N)
        missing_N = rows_N < 0
        blocks = {} if missing_N.any() else {name: _select(block_ND, rows_N) for name, block_ND in whole.items()}
        features = Features(blocks, FeatureCost(**header["cost"])) if blocks else None
    except _NOT_OURS as error:
        raise ValueError(
            f"{path}: not a complete file of features of schema {_SCHEMA} ({error}); write it again with `{_MADE_BY}`"
        ) from error
    if features is None:
        raise ValueError(
            f"{path} lacks the features of {missing_N.sum():,} prompts (of {len(wanted_N):,}), for example of "
            f"{keys[int(missing_N.argmax())]!r}; write it again from all files of prompts (`{_MADE_BY} --prompts ...`)"
        )
    origin = header["origin"]
    if weights is not None and origin is not None and origin["weights"] != weights:
        log.warning(
            "%s has features of another model (%s) than the run's: predictions may be worse, but training stays correct",
            path, short(origin["model"]),
        )  # fmt: skip
    return features


def _rows(keys_N: NDArray[np.uint64], wanted_M: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The row of each wanted key; -1 if it is missing."""
    order_N = np.argsort(keys_N)
    sorted_N = keys_N[order_N]
    if (sorted_N[1:] == sorted_N[:-1]).any():
        raise ValueError("a key occurs twice")
    at_M = np.minimum(np.searchsorted(sorted_N, wanted_M), len(keys_N) - 1)
    return np.where(sorted_N[at_M] == wanted_M, order_N[at_M], -1)


def _select(block_ND: NDArray[np.float32], rows_M: NDArray[np.int64]) -> NDArray[np.float32]:
    """The given rows of a block. For all rows in order, return the block itself, because a copy may be large."""
    return block_ND if np.array_equal(rows_M, np.arange(len(block_ND))) else block_ND[rows_M]


def _block_of(file: Any, name: str, header: dict[str, Any]) -> NDArray[np.float32]:
    return _tensor(file, f"{_BLOCK}{name}", "F32", [header["prompts"], header["blocks"][name]])


def _tensor(file: Any, name: str, dtype: str, shape: list[int]) -> NDArray[Any]:
    """Read a tensor, if it has the type and shape that the header says."""
    part = file.get_slice(name)
    if part.get_dtype() != dtype or list(part.get_shape()) != shape or 0 in shape:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, is {part.get_dtype()} of {part.get_shape()}")
    return file.get_tensor(name)


def _read_header(metadata: dict[str, str] | None) -> dict[str, Any]:
    """The header that `write_features` wrote.

    Raises:
        One of _NOT_OURS: the header is missing, or `write_features` did not write it.
    """
    header: Any = json.loads((metadata or {})[_HEADER])
    if header["made_by"] != _MADE_BY or header["schema"] != _SCHEMA:
        raise ValueError(f"made by {short(header['made_by'])}, schema {short(header['schema'])}")
    counts = [header["prompts"], *header["blocks"].values(), header["cost"]["prompts"], header["cost"]["tokens"]]
    if not all(type(count) is int for count in counts) or not isfinite(header["cost"]["seconds"]):
        raise ValueError("expected whole numbers of prompts, columns and tokens, and a number of seconds")
    if not header["blocks"]:
        raise ValueError("expected at least one block")
    if header["origin"] is not None:
        Origin(**header["origin"])
    return header
