"""Random generators keyed by their purpose, so that no draw depends on earlier draws."""

from __future__ import annotations

from typing import Any, cast
from zlib import crc32

import numpy as np


def rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return a generator that depends only on (seed, purpose, ids). The bit generator is Philox.

    Args:
        seed: the run's seed, 0 or more.
        purpose: what is drawn, such as "rows". Generators with different purposes are independent.
        ids: ids of the draw, such as a group id; each 0 or more.
    """
    # Not `hash`, which gives text another number in every process.
    key = [seed, crc32(purpose.encode()), *ids]
    # An array of 32-bit words gives the same stream and saves numpy the conversion of each number.
    entropy = np.array(key, np.uint32) if max(key) < 1 << 32 else key
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


class _WhenUsed:
    """A placeholder that builds the generator at the first draw."""

    __slots__ = ("_generator", "_key")

    def __init__(self, seed: int, purpose: str, ids: tuple[int, ...]) -> None:
        self._key = (seed, purpose, *ids)
        self._generator: np.random.Generator | None = None

    def __getattr__(self, name: str) -> Any:
        if self._generator is None:
            self._generator = rng(*self._key)
        return getattr(self._generator, name)


def rng_when_used(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Like `rng`, but the generator is built at the first draw, because building is slow and most rules never draw."""
    return cast("np.random.Generator", _WhenUsed(seed, purpose, ids))
