"""The norm that gradients are clipped to: a constant, or a multiple of the running mean of their norms if that is less."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_KEPT = 0.95  # weight of the previous mean at each step
_COUNTED = 2.0  # a norm counts in the mean as at most this many limits, so that a spike hardly raises the next limit


@dataclass(slots=True, kw_only=True)
class NormLimit:
    """The norm to which the next gradient is clipped.

        limit = min(most, factor · m),   m ← 0.95 m + 0.05 min(norm, 2 limit),   m₁ = min(norm, most)

    A rare large gradient that meets a small second moment of AdamW can ruin a run. This limit follows the run's own
    gradients, whatever their scale.

    Attributes:
        most: upper bound of the limit.
        factor: multiple of the running mean, at least 1. None: the limit is `most`.
        mean: running mean of the norms so far. None: no gradient yet.
    """

    most: float
    factor: float | None
    mean: float | None = None

    @property
    def value(self) -> float:
        """The limit now."""
        return self.most if self.factor is None or self.mean is None else min(self.most, self.factor * self.mean)

    def saw(self, norm: float) -> None:
        """Update the mean with the norm of a gradient before it was clipped."""
        if self.factor is None or not 0 < norm < inf:
            return
        counted = min(norm, _COUNTED * self.value)
        self.mean = min(norm, self.most) if self.mean is None else _KEPT * self.mean + (1 - _KEPT) * counted
