"""What the core knows of prompts.

- `PromptTable` is the data set: a number of prompts and, optionally, their keys, priors and features. It does not change.
- `PromptStatistics` is the record of each prompt: attempts, successes, tokens, version and how its last visit ended.
- `PromptPool` says when each prompt may be drawn, and when an epoch ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import log2
from operator import index
from typing import Any, SupportsIndex, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.packing import exact_keys, move_in, natural, pack, unpack

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


NEW, QUARANTINED = "new", "quarantined"
HALF_LIFE = 64  # an attempt counts half in `recent_attempts` after this number of later attempts on the same prompt
_MOST_RECENT = 2.0**15  # upper limit of the recent counts, which are float16 (at most 65,504)


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one prompt.

    Attributes:
        attempts: scored rollouts so far.
        successes: sum of their metrics.
        tokens: tokens paid for the prompt, including failed and cancelled rollouts.
        version: version of the weights at its last visit, -1 before the first.
        fate: how its last visit ended, such as "trained" or "out_of_band/solved"; "new" before the first.
        failures: visits in a row without any score because rollouts failed, counted up to 255.
        recent_attempts: a weighted number of attempts. An attempt counts half after `HALF_LIFE` later attempts on the
            prompt, a quarter after twice as many, and so on. Use it as evidence about a success rate that changes while
            the policy learns. Accurate to three digits; 0 if no judge of the recipe has the trait `reads_recent`.
        recent_failures: `attempts` minus `successes` with the same weights, clipped to [0, `recent_attempts`].
    """

    attempts: int = 0
    successes: float = 0.0
    tokens: int = 0
    version: int = -1
    fate: str = NEW
    failures: int = 0
    recent_attempts: float = 0.0
    recent_failures: float = 0.0


def aged(counted: float, newer: int) -> float:
    """The value of a recent count after `newer` more attempts on the prompt: counted · 2^(-newer / HALF_LIFE)."""
    return counted * 0.5 ** (newer / HALF_LIFE)


class PromptStatistics:
    """The records of all prompts, in arrays of shape (N,). The allocator writes them, rules read them.

    A prompt takes 26 bytes, or 30 with `recent`.

    Args:
        prompts: N, the number of prompts.
        recent: whether to count recent attempts and failures.
    """

    def __init__(self, prompts: int, recent: bool = False) -> None:
        self.attempts_N: NDArray[np.uint32] = np.zeros(prompts, np.uint32)
        self.successes_N: NDArray[np.float64] = np.zeros(prompts, np.float64)
        self.recent_2N: NDArray[np.float16] | None = np.zeros((2, prompts), np.float16) if recent else None
        self.tokens_N: NDArray[np.int64] = np.zeros(prompts, np.int64)
        self.version_N: NDArray[np.int32] = np.full(prompts, -1, np.int32)
        self.fate_N: NDArray[np.uint8] = np.zeros(prompts, np.uint8)
        self.failures_N: NDArray[np.uint8] = np.zeros(prompts, np.uint8)
        self.fates: list[str] = [NEW]  # `fate_N` contains indices into this list

    def record(self, prompt: int) -> Record:
        """The record of one prompt."""
        recent_2 = (0.0, 0.0) if self.recent_2N is None else self.recent_2N[:, prompt].tolist()
        return Record(
            attempts=int(self.attempts_N[prompt]),
            successes=float(self.successes_N[prompt]),
            tokens=int(self.tokens_N[prompt]),
            version=int(self.version_N[prompt]),
            fate=self.fates[int(self.fate_N[prompt])],
            failures=int(self.failures_N[prompt]),
            recent_attempts=recent_2[0],
            recent_failures=recent_2[1],
        )

    def counts(self) -> dict[str, int]:
        """Number of prompts for each `Record.fate`."""
        count_F: list[int] = np.bincount(self.fate_N, minlength=len(self.fates)).tolist()
        return dict(zip(self.fates, count_F, strict=True))

    def with_fate(self, fate: str) -> list[int]:
        """The prompts with this `Record.fate`."""
        return np.flatnonzero(self.fate_N == self.fates.index(fate)).tolist() if fate in self.fates else []

    def fail(self, prompt: int) -> int:
        """Count a visit in which rollouts failed and none was scored. Return the number of such visits in a row."""
        self.failures_N[prompt] = min(int(self.failures_N[prompt]) + 1, np.iinfo(np.uint8).max)
        return int(self.failures_N[prompt])

    def close_visit(self, prompt: int, fate: str, version: int, metrics: list[float]) -> None:
        """Record that a visit ended. `metrics` has the metric of each scored rollout."""
        if fate not in self.fates:
            if len(self.fates) == np.iinfo(np.uint8).max:
                raise ValueError(
                    f"more than {len(self.fates)} different fates; a judge's reasons must come from a small set"
                )
            self.fates.append(fate)
        self.fate_N[prompt] = self.fates.index(fate)
        self.version_N[prompt] = version
        # A visit without a score is no evidence, and does not end a row of failed visits.
        if not metrics:
            return
        attempts, successes = len(metrics), sum(metrics)
        self.attempts_N[prompt] += attempts
        self.successes_N[prompt] += successes
        if self.recent_2N is not None:
            failures = min(max(attempts - successes, 0.0), attempts)
            before_2: list[float] = self.recent_2N[:, prompt].tolist()
            self.recent_2N[:, prompt] = [
                min(aged(before, attempts) + now, _MOST_RECENT)
                for before, now in zip(before_2, (attempts, failures), strict=True)
            ]
        self.failures_N[prompt] = 0

    _ARRAYS = ("attempts_N", "successes_N", "tokens_N", "version_N", "fate_N", "failures_N")

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON data."""
        recent = None if self.recent_2N is None else pack(self.recent_2N)
        return {"fates": list(self.fates), "recent_2N": recent} | {
            name: pack(getattr(self, name)) for name in self._ARRAYS
        }

    def load_state_dict(self, state: dict[str, Any], source_N: NDArray[np.int64] | None = None) -> None:
        """Restore saved statistics.

        Args:
            state: the result of `state_dict`.
            source_N: index of each prompt in the saved statistics, or -1 for a new prompt. None: the data set is the
                same.

        Raises:
            ValueError: a key is missing or unexpected, or an array or a fate is invalid.
        """
        exact_keys(state, ("fates", "recent_2N", *self._ARRAYS), "statistics")
        self.fates = [str(fate) for fate in state["fates"]]
        for name in self._ARRAYS:
            move_in(getattr(self, name), state[name], source_N, f"statistics, {name}")
        if self.recent_2N is not None and state["recent_2N"] is not None:  # None: not counted under the saved recipe
            move_in(self.recent_2N, state["recent_2N"], source_N, "statistics, recent_2N")
        if self.fate_N.size and int(self.fate_N.max()) >= len(self.fates):
            raise ValueError(
                f"statistics, fate_N: index {int(self.fate_N.max())} of {len(self.fates)} fates; the state is corrupt"
            )


@dataclass(frozen=True, slots=True)
class Epochs:
    """A prompt waits `count` epochs, counted from the epoch in which it was drawn. None: the prompt is never drawn again.

    Raises:
        ValueError: `count` is negative.
    """

    count: int | None

    def __post_init__(self) -> None:
        if self.count is not None and (type(self.count) is not int or self.count < 0):
            raise ValueError(f"Epochs: count must be a whole number of 0 or more, or None for never, got {self.count}")


NOW, NEXT_EPOCH, NEVER = Epochs(0), Epochs(1), Epochs(None)
Until = Epochs | int  # an int is the first version of the weights under which the prompt may be drawn

# Values of `due_N` above every epoch, for prompts that do not wait for an epoch.
_ON_VERSION, _IN_FLIGHT, _NEVER = (np.iinfo(np.int32).max - back for back in (2, 1, 0))
LEAST_SHARE = 0.25  # if a smaller share of the prompts is left to draw, drivers log a warning


class PromptPool:
    """The prompts that may be drawn. The pool stores the epoch from which each prompt may be drawn again.

    `free_N[i]` is `due_N[i] <= epoch`. When the prompt rule has no prompt left to draw, `roll` begins the next
    epoch in which a prompt may be drawn. Groups in flight continue.
    """

    def __init__(self, prompts: int) -> None:
        self.epoch = 0
        self.due_N: NDArray[np.int32] = np.zeros(prompts, np.int32)
        self.free_N: NDArray[np.bool_] = np.ones(prompts, np.bool_)
        # True for evicted prompts, until they are drawn again. Their last visit made them wait for more than one epoch.
        self.evicted_N: NDArray[np.bool_] = np.zeros(prompts, np.bool_)
        self.away = 0  # prompts in flight, prompts that wait for a version, and prompts that may never be drawn again
        self.barred = 0  # prompts that may never be drawn again
        self.revived = 0  # visits of prompts that had been evicted
        self.dry = False  # True if the last draw found no prompt, and no prompt has become free since
        self.out = 0  # prompts that do not come back in this epoch or the next
        self.should_warn = False  # whether drivers should warn after this batch that few prompts are left
        self._said = 0  # level of the last warning: 1 below `LEAST_SHARE`, 2 below half of it, 3 below a quarter, ...
        self._by_version: list[tuple[int, int]] = []

    def take(self, prompt: int) -> None:
        """Record that the prompt was drawn."""
        self.revived += bool(self.evicted_N[prompt])
        self.evicted_N[prompt] = False
        self.free_N[prompt] = False
        self.due_N[prompt] = _IN_FLIGHT
        self.away += 1

    def give_back(self, prompt: int, until: Until, drawn_epoch: int, version: int) -> None:
        """Record that the prompt's visit ended. `until` says when the prompt may be drawn again."""
        if isinstance(until, int):
            if until <= version:
                until = NOW
            else:
                # It stays `away`: no number of epochs brings it back.
                self.due_N[prompt] = _ON_VERSION
                heapq.heappush(self._by_version, (until, prompt))
                return
        self.evicted_N[prompt] = until.count is None or until.count > 1
        if until.count is None:
            self.bar(prompt)
            return
        # From the epoch of the draw: a visit that lasts into the next epoch must not delay the prompt by a further
        # one.
        due = self.epoch if until.count == 0 else drawn_epoch + until.count
        self.out += due > self.epoch + 1
        self.due_N[prompt] = due
        self.free_N[prompt] = due <= self.epoch
        self.away -= 1
        self.dry = False

    def bar(self, prompt: int) -> None:
        """Record that the prompt must never be drawn again."""
        self.due_N[prompt] = _NEVER
        self.barred += 1
        self.out += 1

    def is_barred(self, prompt: int) -> bool:
        """Whether the prompt must never be drawn again."""
        return bool(self.due_N[prompt] == _NEVER)

    def on_version(self, version: int) -> None:
        """Free the prompts that waited for this version of the weights."""
        while self._by_version and self._by_version[0][0] <= version:
            prompt = heapq.heappop(self._by_version)[1]
            self.due_N[prompt] = self.epoch
            self.free_N[prompt] = True
            self.away -= 1
            self.dry = False

    def roll(self) -> bool:
        """Begin the next epoch in which a prompt may be drawn. Return False if no prompt waits for an epoch."""
        due = self.due_epoch()
        self.dry = due is None
        if due is not None:
            self.begin(max(self.epoch + 1, due))
        return due is not None

    def any_due(self) -> bool:
        """Whether a prompt may be drawn in this or a later epoch.

        False if every prompt is in flight, waits for new weights, or may never be drawn again.
        """
        return self.away < len(self.due_N)

    def due_epoch(self) -> int | None:
        """The first epoch in which a prompt may be drawn; None if no prompt waits for an epoch."""
        return int(self.due_N.min()) if self.any_due() else None

    def begin(self, epoch: int) -> None:
        """Begin this epoch."""
        self.epoch = epoch
        self.free_N = self.due_N <= epoch
        # Prompts in flight or waiting for a version are above every epoch too, but come back.
        later_N = (self.due_N > epoch + 1) & (self.due_N < _ON_VERSION)
        self.out = int(np.count_nonzero(later_N)) + self.barred
        self.dry = False

    def evicted(self) -> int:
        """Number of evicted prompts."""
        return int(np.count_nonzero(self.evicted_N))

    @property
    def left(self) -> int:
        """Number of prompts that may be drawn in this epoch or the next, including prompts in flight."""
        return len(self.due_N) - self.out

    def after_batch(self) -> None:
        """Set `should_warn` after a batch.

        A warning is due when the share of prompts left falls below `LEAST_SHARE`, and again each time it has halved. When
        the share has risen to 2 · `LEAST_SHARE`, the warnings start over.
        """
        share = self.left / len(self.due_N)
        halved = 0 if share >= LEAST_SHARE else 1 + int(log2(LEAST_SHARE / max(share, 0.5 / len(self.due_N))))
        self.should_warn = halved > self._said
        if self.should_warn or share >= 2 * LEAST_SHARE:
            self._said = halved

    _SAVED = ("epoch", "dry", "due_N", "evicted_N", "revived", "by_version", "said", "speaks")

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON data."""
        return {
            "epoch": self.epoch,
            "dry": self.dry,
            "due_N": pack(self.due_N),
            "evicted_N": pack(self.evicted_N),
            "revived": self.revived,
            "by_version": sorted(self._by_version),
            "said": self._said,
            "speaks": self.should_warn,
        }

    def load_state_dict(self, state: dict[str, Any], source_N: NDArray[np.int64] | None = None) -> None:
        """Restore a saved pool. `source_N` gives each prompt's index in the saved pool, -1 for a new prompt."""
        exact_keys(state, self._SAVED, "pool")
        move_in(self.due_N, state["due_N"], source_N, "pool, due_N")
        self.barred = int(np.count_nonzero(self.due_N == _NEVER))
        self.away = int(np.count_nonzero(self.due_N >= _ON_VERSION))
        move_in(self.evicted_N, state["evicted_N"], source_N, "pool, evicted_N")
        self.revived = natural(state["revived"], "pool, revived")
        self._said = natural(state["said"], "pool, said")
        if not isinstance(state["speaks"], bool):
            raise ValueError(f"pool, speaks: expected true or false, got {state['speaks']!r}; the state is corrupt")
        self.should_warn = state["speaks"]
        self._by_version = [(int(version), int(prompt)) for version, prompt in state["by_version"]]
        if source_N is not None:
            target = {int(old): new for new, old in enumerate(source_N) if old >= 0}
            self._by_version = [(version, target[old]) for version, old in self._by_version if old in target]
        heapq.heapify(self._by_version)
        if any(self.due_N[prompt] != _ON_VERSION for _, prompt in self._by_version):
            raise ValueError(
                "pool, by_version: lists a prompt that is not waiting for a new version of the weights; the state is corrupt"
            )
        # This computes `free_N` and `out` from `due_N`.
        self.begin(natural(state["epoch"], "pool, epoch"))
        self.dry = bool(state["dry"]) and source_N is None  # another data set may have new prompts to draw
