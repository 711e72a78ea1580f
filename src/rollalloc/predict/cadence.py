"""When a predictor is fitted, and what its settings must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_LEAST_RIDGE = 1e-4  # with less, columns that are nearly equal could not be told from singular ones


def next_fit(paid: int, first_fits: Sequence[int], fit_every: int) -> int:
    """The number of rollouts at which the next fit is due, after so many."""
    later = [each for each in first_fits if each > paid]
    return later[0] if later else paid + fit_every


def check_settings(settings: Any, amounts: Sequence[str], counts: Sequence[str]) -> None:
    """Refuse settings of a predictor that are out of range; its `ridges` and `first_fits` become tuples.

    Args:
        settings: a frozen value with `ridges` and `first_fits`.
        amounts: names of those that must be above 0 and finite.
        counts: names of those that must be whole numbers of 1 or more.

    Raises:
        ValueError: names the one, and what it must be.
    """
    for name in ("ridges", "first_fits"):
        object.__setattr__(settings, name, tuple(getattr(settings, name)))
    for name in amounts:
        if not 0 < getattr(settings, name) < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {getattr(settings, name)!r}")
    for name in counts:
        if not (isinstance(getattr(settings, name), int) and getattr(settings, name) >= 1):
            raise ValueError(f"{name} must be a whole number of 1 or more, got {getattr(settings, name)!r}")
    ridges, first_fits = settings.ridges, settings.first_fits
    if not (ridges and all(_LEAST_RIDGE <= each < math.inf for each in ridges)):
        raise ValueError(f"ridges must be finite, {_LEAST_RIDGE} or more, and at least one, got {ridges}")
    if list(first_fits) != sorted({*first_fits} - {0}) or min(first_fits, default=1) < 0:
        raise ValueError(f"first_fits must ascend from 1 or more, got {first_fits}")
