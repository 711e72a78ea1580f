"""Randomness keyed by what it is for, so that it depends on nothing else that happened before."""

from __future__ import annotations

from typing import Any, cast
from zlib import crc32

import numpy as np


def rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A generator that is a pure function of (seed, purpose, ids).

    The bit generator is pinned (Philox), so that the same key draws the same numbers on every machine and in every
    process, whatever its hash seed.

    Args:
        seed: the run's seed, 0 or more.
        purpose: what is drawn, e.g. "rows"; different purposes are independent.
        ids: whatever else the draw belongs to, e.g. a group id; each 0 or more.
    """
    key = [seed, crc32(purpose.encode()), *ids]
    # The same words as an array spare numpy the conversion of each; beyond 32 bits it splits them.
    entropy = np.array(key, np.uint32) if max(key) < 1 << 32 else key
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


class _WhenUsed:
    """Stands for a generator that is made when something is first drawn from it."""

    def __init__(self, seed: int, purpose: str, ids: tuple[int, ...]) -> None:
        self._key = (seed, purpose, *ids)
        self._generator: np.random.Generator | None = None

    def __getattr__(self, name: str) -> Any:
        if self._generator is None:
            self._generator = rng(*self._key)
        return getattr(self._generator, name)


def rng_when_used(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """`rng`, for rules of which most never draw: making a generator takes longer than taking an event."""
    return cast("np.random.Generator", _WhenUsed(seed, purpose, ids))
