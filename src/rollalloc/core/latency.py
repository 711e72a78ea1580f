"""A latency curve says how many seconds a token takes, depending on how many rollouts are decoded at once."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

Curve = tuple[tuple[int, float], ...]  # points (rollouts decoded at once, seconds per token of each)


def checked_curve(latency: Any) -> Curve:
    """Return the points of a latency curve in plain numbers.

    Raises:
        ValueError: they are not points of a curve, or seconds decrease while rollouts increase.
    """
    try:
        points = tuple((int(rollouts), float(seconds)) for rollouts, seconds in latency)
    except (TypeError, ValueError):
        points = ()
    numbers = [rollouts for rollouts, _ in points]
    whole = all(0 < seconds < inf for _, seconds in points)
    if not points or numbers != sorted(set(numbers)) or numbers[0] < 1 or not whole:
        raise ValueError(
            "latency must be pairs of rollouts, growing from 1 on, and seconds for a token above 0, such as "
            f"((1, 0.002), (64, 0.004)), got {latency!r}"
        )
    for (fewer, before), (more, after) in pairwise(points):
        if after < before:
            raise ValueError(
                f"latency falls from {before:g} s for a token of {fewer} rollouts to {after:g} s of {more}; a step of more "
                "rollouts is not cheaper: measure again, or give both the mean"
            )
    return points
