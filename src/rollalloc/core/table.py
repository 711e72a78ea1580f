"""The data set as the core sees it: a number of prompts and, optionally, their keys, priors and features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from operator import index
from typing import Any, SupportsIndex, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.packing import natural, pack, unpack

GONE = -1  # index of a prompt that left the data set


def place(saved: Any) -> int:
    """Return a saved index of a prompt, or `GONE`. Raise a ValueError if the value is neither."""
    return GONE if type(saved) is int and saved == GONE else natural(saved, "prompt")


def key_digests(keys: Iterable[str]) -> NDArray[np.uint64]:
    """A 64-bit digest of each key, shape (N,). It is the same in every process."""
    joined = b"".join(blake2b(str(key).encode(), digest_size=8).digest() for key in keys)
    return np.frombuffer(joined, dtype="<u8").astype(np.uint64)


@dataclass(frozen=True, eq=False)
class PromptTable:
    """The prompts of a run.

    Args:
        keys: a unique key for each prompt, compared as text. Keys identify prompts if the data set is reordered. Or an
            int: the number of prompts, without keys.
        prior_N: prior success rate of each prompt, before its first rollout, in [0, 1]; NaN if unknown.
        features: input of a predictor: finite arrays of shape (N, D) by name, kept as float32. A single array counts as
            {"features": array}. A saved state contains only digests of the arrays.

    Raises:
        ValueError: there are no prompts, a key occurs twice, a length is wrong, a prior is outside [0, 1], or
            features are not finite.
    """

    keys: Sequence[str] | int
    prior_N: ArrayLike | None = None
    features: Any = field(default_factory=dict[str, NDArray[np.float32]])

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise ValueError("a prompt table needs at least one prompt, got none; check the data file and its filters")
        if not isinstance(self.keys, int):
            self._refuse_duplicates(self.keys)
        if self.prior_N is not None:
            prior_N = np.asarray(self.prior_N, np.float64)
            if prior_N.shape != (len(self),):
                raise ValueError(f"prior_N must have one entry per prompt, shape ({len(self)},), got {prior_N.shape}")
            object.__setattr__(self, "prior_N", prior_N)
            known_N = ~np.isnan(prior_N)
            if np.any((prior_N[known_N] < 0) | (prior_N[known_N] > 1)):
                raise ValueError("prior_N must contain success rates in [0, 1], or NaN if unknown")
        object.__setattr__(self, "features", self._checked_features())

    def _checked_features(self) -> dict[str, NDArray[np.float32]]:
        features: Any = self.features
        if features is None or isinstance(features, Mapping):
            blocks = cast("Mapping[str, ArrayLike]", features or {})
        else:
            blocks = {"features": features}
        checked: dict[str, NDArray[np.float32]] = {}
        for name, block in blocks.items():
            if not isinstance(name, str):  # pyright: ignore
                raise ValueError(f"the names of features must be strings, because they are saved as JSON, got {name!r}")
            try:
                with np.errstate(over="ignore"):  # values that are too large for float32 are refused below
                    features_ND = np.asarray(block, np.float32).view()
            except (TypeError, ValueError) as error:
                raise ValueError(f"features {name!r} must be numbers of shape ({len(self)}, D): {error}") from error
            if features_ND.ndim != 2 or len(features_ND) != len(self) or features_ND.shape[1] < 1:
                raise ValueError(f"features {name!r} must have shape ({len(self)}, D), D ≥ 1, got {features_ND.shape}")
            if not np.isfinite(features_ND).all():
                row = int(np.flatnonzero(~np.isfinite(features_ND).all(axis=1))[0])
                raise ValueError(
                    f"features {name!r} must be finite in float32, but the features of prompt {row} are not"
                )
            features_ND.flags.writeable = False  # rules can see the array, and its digest is computed only once
            checked[name] = features_ND
        return checked

    def __len__(self) -> int:
        return self.keys if isinstance(self.keys, int) else len(self.keys)

    @property
    def widths(self) -> dict[str, int]:
        """The number of columns of each array of features."""
        return {name: int(block_ND.shape[1]) for name, block_ND in self.features.items()}

    @staticmethod
    def _refuse_duplicates(keys: Sequence[str]) -> None:
        seen: dict[str, int] = {}
        for at, key in enumerate(keys):
            if str(key) in seen:
                raise ValueError(
                    f"prompt key {key!r} occurs at {seen[str(key)]} and at {at}; keys must be unique, or one prompt's "
                    "results would count for another; if the keys are indices in several data sets, put the name of the "
                    "data set before each index"
                )
            seen[str(key)] = at

    def state_dict(self) -> dict[str, Any]:
        """Digests that identify the data set and its prompts when a state is loaded."""
        return {"count": len(self), "keys": pack(self._digests_N), "features": self._feature_digests}

    def source_of(self, saved: dict[str, Any], remap: ArrayLike | str | None) -> NDArray[np.int64] | None:
        """Return the index of each prompt in a saved data set.

        Args:
            saved: the `state_dict` of the saved data set.
            remap: None if the data sets are the same. With "keys", each prompt is found by its key. An array is checked and
                returned.

        Returns:
            Shape (N,), with -1 for a new prompt; None if the data sets are the same.

        Raises:
            ValueError: the data sets differ and `remap` is None; `remap` is "keys" and a data set has no keys; or the array
                is not a valid mapping.
        """
        saved_N = unpack(saved["keys"])
        if remap is None:
            if saved["count"] != len(self) or not np.array_equal(saved_N, self._digests_N):
                raise ValueError(
                    f"the state was saved for {saved['count']} prompts, this data set has {len(self)} or other keys; "
                    'remap="keys" finds them by key'
                )
            if saved["features"] != self._feature_digests:
                raise ValueError(
                    f"the state was saved with the features {saved['features']}, got {self._feature_digests}; use the "
                    "same features. Or load with a remap; rules then assume that features of the same name and width mean "
                    "the same as in the saved run"
                )
            return None
        if isinstance(remap, str):
            if remap != "keys" or not saved_N.size or not self._digests_N.size:
                raise ValueError(f'remap must be "keys", with keys in both data sets, or indices; got {remap!r}')
            index_of = {digest: at for at, digest in enumerate(saved_N.tolist())}
            return np.array([index_of.get(digest, GONE) for digest in self._digests_N.tolist()], np.int64)
        source_N = np.asarray(remap, np.int64)
        known_N = source_N[source_N >= 0]
        distinct = len(np.unique(known_N)) == len(known_N)
        if source_N.shape != (len(self),) or not distinct or np.any(known_N >= saved["count"]):
            raise ValueError(
                f"remap must give each of {len(self)} prompts its own index below {saved['count']}, or -1; "
                f"got shape {source_N.shape}"
            )
        return source_N

    @cached_property
    def _feature_digests(self) -> dict[str, str]:
        return {
            name: blake2b(np.ascontiguousarray(block).data, digest_size=8).hexdigest()
            for name, block in self.features.items()
        }

    @cached_property
    def _digests_N(self) -> NDArray[np.uint64]:
        """The digests of all keys, shape (N,); shape (0,) without keys."""
        if isinstance(self.keys, int):
            return np.zeros(0, np.uint64)
        return key_digests(self.keys)

    @staticmethod
    def of(prompts: Any) -> PromptTable:
        """Return the table itself, or a table of that many prompts if an int is given."""
        if isinstance(prompts, PromptTable):
            return prompts
        if isinstance(prompts, SupportsIndex) and not isinstance(prompts, bool):
            return PromptTable(index(prompts))
        raise TypeError(f"prompts must be a number of prompts or a PromptTable, got {type(prompts).__name__}")
