"""How long a decoding step takes, by how many rollouts are in it: a curve through an engine's own steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollalloc.core.latency import Curve


def measured_curve(steps: Sequence[tuple[int, float]], points: int = 8) -> Curve:
    """A curve through decoding steps.

    As many groups of like concurrency, with as many steps each; a point is the mean concurrency, rounded, and the median
    seconds, made to grow with it by pooling neighbours (isotonic regression), since a step of more rollouts is not cheaper.

    Args:
        steps: (rollouts, seconds) of each, at least one, rollouts at least 1.
        points: at most.
    """
    found: dict[int, tuple[float, int]] = {}
    for part in np.array_split(np.array(sorted(steps), np.float64), min(points, len(steps))):
        at = max(1, round(float(part[:, 0].mean())))
        seconds, count = found.get(at, (0.0, 0))
        both = count + len(part)
        found[at] = (seconds * count + float(np.median(part[:, 1])) * len(part)) / both, both
    pooled: list[tuple[list[int], float, int]] = []
    for at, (seconds, count) in sorted(found.items()):
        pooled.append(([at], seconds, count))
        while len(pooled) > 1 and pooled[-2][1] >= pooled[-1][1]:
            there, more, many = pooled.pop()
            before, earlier, few = pooled.pop()
            pooled.append((before + there, (earlier * few + more * many) / (few + many), few + many))
    return tuple((at, seconds) for places, seconds, _ in pooled for at in places)
