"""Features in a file: safetensors, each prompt's row under a digest of its key, with a header that says where they are from.

The file is written whole or not at all, and only over one that this module wrote. It carries a digest of all of its bytes,
taken with zeros in the digest's own place, so that a single one that is changed is found.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rollalloc.core.table import key_digests
from rollalloc.data.features import FeatureCost, Features
from rollalloc.files.atomic import written
from rollalloc.files.claims import claim_files, refuse_foreign_files

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_SCHEMA = 2
_MADE_BY = "rollalloc features"
_HEADER = "rollalloc"  # the header's name in the metadata; its value is JSON
_KEYS = "keys"
_DIGEST, _DIGEST_BYTES = "digest", 16  # its name in the metadata
_BLOCK = "block:"  # begins the name of a block's tensor
_LONGEST_HEADER = 1 << 20  # bytes; ours have some hundred
_READ_AT_ONCE = 1 << 20  # bytes
# What the contents of a file that is corrupt, or another program's, may raise.
_NOT_OURS = (SafetensorError, ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Origin:
    """Where features are from.

    Attributes:
        model: its name or folder, as it was given.
        weights: digest of its weights (`rollalloc.models.features.weights_digest`); None: only its tokenizer was used.
        seed: of projection and hash.
    """

    model: str
    weights: str | None
    seed: int


def refuse_place(path: Path, *, overwrite: bool = False) -> None:
    """Refuse a place where no features can be written; changes nothing.

    Args:
        overwrite: features that stand there may be replaced.

    Raises:
        ValueError: a name that does not end in .safetensors.
        FileExistsError: something is there that is not to be overwritten, or that rollalloc did not write.
        NotADirectoryError, PermissionError: nothing can be written there.
    """
    if path.suffix != SUFFIX or path.name == SUFFIX:
        raise ValueError(
            f"expected the name of a file that ends in {SUFFIX}, got {str(path)!r}; e.g. --out features{SUFFIX}"
        )
    refuse_foreign_files([path])
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(f"{path} holds features already; replace them (--overwrite), or give another --out")
    there = next(place for place in path.absolute().parents if os.path.lexists(place))
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is no folder, so that {path} cannot be written; give another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"nothing can be written into {there}; give another --out")


def holds_features(path: Path) -> bool:
    """Whether a file begins as a file of features does, damaged or not."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head: Any = json.loads(file.read(length)) if length <= _LONGEST_HEADER else None
        return json.loads(head["__metadata__"][_HEADER])["made_by"] == _MADE_BY
    except (OSError, *_NOT_OURS):
        return False


def write_features(
    path: Path, keys: Sequence[str], features: Features, *, origin: Origin | None = None, overwrite: bool = False
) -> None:
    """Write features under their prompts' keys, whole or not at all; missing folders are made.

    Args:
        path: ends in .safetensors.
        keys: of the prompts, unique, in the order of the rows (`rollalloc.data.prompts.PromptSet.keys`).
        features: of the same prompts.
        origin: where they are from; None: not known, e.g. the user's own.
        overwrite: replace features that stand there.

    Raises:
        ValueError: another number of keys than of rows, a key that occurs twice, or a wrong ending.
        FileExistsError: something is there that is not to be overwritten, or that is not ours.
        OSError: it could not be written.
    """
    path = Path(path)
    refuse_place(path, overwrite=overwrite)
    claim_files([path])
    save_features(path, keys, features, origin=origin)


def save_features(path: Path, keys: Sequence[str], features: Features, *, origin: Origin | None = None) -> None:
    """As `write_features`, in place of whatever is there: into a folder whose names the caller has claimed."""
    if len(keys) != len(features):
        raise ValueError(f"expected one key a row, got {len(keys)} keys for {len(features)} rows of features")
    keys_N = key_digests(keys)
    if len(np.unique(keys_N)) < len(keys_N):
        raise ValueError(f"{len(keys_N) - len(np.unique(keys_N))} keys occur twice; features are found by key")
    described = {
        "schema": _SCHEMA,
        "made_by": _MADE_BY,
        "prompts": len(keys_N),
        "keys": _digest(keys_N),
        "origin": None if origin is None else asdict(origin),
        "blocks": {name: block_ND.shape[1] for name, block_ND in features.blocks.items()},
        "cost": asdict(features.cost),
    }
    tensors = {f"{_BLOCK}{name}": np.ascontiguousarray(block_ND) for name, block_ND in features.blocks.items()}
    with written(path) as beside:
        try:
            digest = "00" * _DIGEST_BYTES  # until it is known
            save_file({_KEYS: keys_N, **tensors}, beside, metadata={_HEADER: json.dumps(described), _DIGEST: digest})
            seal(beside)
        except SafetensorError as error:
            raise OSError(f"{path} could not be written ({error}); free some space, or give another --out") from error


def read_features(path: Path, keys: Sequence[str], *, weights: str | None = None) -> Features:
    """Features of these prompts, in this order, whatever order and further prompts the file has.

    Features of another model than the run's are legitimate, a small model's for a large one say: predictions may be worse,
    and nothing else. So they are taken, with a warning.

    Args:
        path: a file that `write_features` wrote.
        keys: of the prompts that features are wanted of.
        weights: digest of the run's initial weights; None: not compared.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: no prompts, a file that is corrupt or changed, of another kind or schema, or without some of the prompts.
    """
    path = Path(path)
    if not keys:
        raise ValueError("expected the keys of at least one prompt, got none")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `{_MADE_BY} --out {path}` makes it")
    wanted_N = key_digests(keys)
    try:
        _check_seal(path)
        with safe_open(path, "np") as file:
            described = _described(file.metadata())
            rows_N = _rows(_keys_of(file, described), wanted_N)
            missing_N = rows_N < 0
            names = () if missing_N.any() else described["blocks"]
            blocks = {name: _taken(_block_of(file, name, described), rows_N) for name in names}
        features = Features(blocks, FeatureCost(**described["cost"])) if blocks else None
    except _NOT_OURS as error:
        raise ValueError(
            f"{path}: not a whole file of features of schema {_SCHEMA} ({error}); make it again with `{_MADE_BY}`"
        ) from error
    if features is None:
        raise ValueError(
            f"{path} has no features of {missing_N.sum():,} of {len(wanted_N):,} prompts, the first "
            f"{keys[int(missing_N.argmax())]!r}; make it again from all files of prompts (`{_MADE_BY} --prompts ...`)"
        )
    _warn_of_another_model(path, described["origin"], weights)
    return features


def seal(path: Path) -> None:
    """Put the digest of a file's bytes into the place that its header has for it.

    Raises:
        ValueError: it has none.
    """
    if (found := _digests(path)) is None:
        raise ValueError(f"{path} has no place for a digest")
    with path.open("r+b") as file:
        file.seek(found[0])
        file.write(found[2])


def _check_seal(path: Path) -> None:
    """Refuse a file whose bytes are not those that its digest was taken of.

    Raises:
        ValueError: they are others, it has no digest, or it is not a file of safetensors.
    """
    if (found := _digests(path)) is None:
        raise ValueError("it has no digest of its bytes")
    if found[1] != found[2]:
        raise ValueError("its bytes are not those that were written")


def _digests(path: Path) -> tuple[int, bytes, bytes] | None:
    """Where in a file its digest stands, what stands there, and what should; None without a place."""
    with path.open("rb") as file:
        first = file.read(8)
        if (length := int.from_bytes(first, "little")) > _LONGEST_HEADER:
            raise ValueError("its header is too long")
        head = file.read(length)
        places = [*re.finditer(rb'"%s": ?"([0-9a-f]{%d})"' % (_DIGEST.encode(), 2 * _DIGEST_BYTES), head)]
        if len(places) != 1:
            return None
        begin, end = places[0].span(1)
        made = blake2b(first + head[:begin] + b"0" * (end - begin) + head[end:], digest_size=_DIGEST_BYTES)
        while part := file.read(_READ_AT_ONCE):
            made.update(part)
    return len(first) + begin, places[0][1], made.hexdigest().encode()


def _rows(keys_N: NDArray[np.uint64], wanted_M: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each wanted key its row, -1 where there is none."""
    order_N = np.argsort(keys_N)
    sorted_N = keys_N[order_N]
    if (sorted_N[1:] == sorted_N[:-1]).any():
        raise ValueError("a key occurs twice")
    at_M = np.minimum(np.searchsorted(sorted_N, wanted_M), len(keys_N) - 1)
    return np.where(sorted_N[at_M] == wanted_M, order_N[at_M], -1)


def _taken(block_ND: NDArray[np.float32], rows_M: NDArray[np.int64]) -> NDArray[np.float32]:
    """Those rows; the block itself, which may be large, where they are all of it in its order."""
    return block_ND if np.array_equal(rows_M, np.arange(len(block_ND))) else block_ND[rows_M]


def _keys_of(file: Any, described: dict[str, Any]) -> NDArray[np.uint64]:
    keys_N = _tensor(file, _KEYS, "U64", [described["prompts"]])
    if _digest(keys_N) != described["keys"]:
        raise ValueError("its keys are not those that were written")
    return keys_N


def _block_of(file: Any, name: str, described: dict[str, Any]) -> NDArray[np.float32]:
    return _tensor(file, f"{_BLOCK}{name}", "F32", [described["prompts"], described["blocks"][name]])


def _tensor(file: Any, name: str, dtype: str, shape: list[int]) -> NDArray[Any]:
    """A tensor, once it is known to be as the header says."""
    part = file.get_slice(name)
    if part.get_dtype() != dtype or list(part.get_shape()) != shape or 0 in shape:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, is {part.get_dtype()} of {part.get_shape()}")
    return file.get_tensor(name)


def _described(metadata: dict[str, str] | None) -> dict[str, Any]:
    """The header, as `write_features` wrote it.

    Raises:
        One of _NOT_OURS: it is not.
    """
    described: Any = json.loads((metadata or {})[_HEADER])
    if described["made_by"] != _MADE_BY or described["schema"] != _SCHEMA:
        raise ValueError(f"made by {short(described['made_by'])}, schema {short(described['schema'])}")
    counts = [
        described["prompts"],
        *described["blocks"].values(),
        described["cost"]["prompts"],
        described["cost"]["tokens"],
    ]
    if not all(type(count) is int for count in counts) or not isfinite(described["cost"]["seconds"]):
        raise ValueError("expected whole numbers of prompts, columns and tokens, and a number of seconds")
    if not described["blocks"]:
        raise ValueError("expected at least one block")
    if described["origin"] is not None:
        Origin(**described["origin"])
    return described


def _warn_of_another_model(path: Path, origin: dict[str, Any] | None, weights: str | None) -> None:
    if weights is not None and origin is not None and origin["weights"] not in (None, weights):
        log.warning(
            "%s was made with other weights (%s) than the run's: its predictions may be worse, nothing else changes",
            path, short(origin["model"]),
        )  # fmt: skip


def _digest(keys_N: NDArray[np.uint64]) -> str:
    return blake2b(np.ascontiguousarray(keys_N, "<u8").data, digest_size=16).hexdigest()
