"""The settings of the loss; `rollalloc.train.loss` computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

Aggregation = Literal["token_mean", "sequence_mean", "dr_grpo"]


@dataclass(frozen=True, slots=True)
class Clip:
    """Limits of the importance ratios.

    Attributes:
        low: ratios below 1 - low are clipped; in (0, 1].
        high: ratios above 1 + high are clipped; above 0. A value above low is "clip-higher" (DAPO, arXiv 2503.14476).
        dual: dual clip, a number above 1. The loss of a token with a negative advantage A is at most dual · |A|
            (arXiv 1912.09729). None: no limit.
        stale: maximum importance weight of rows sampled from older weights, at least 1.

    Raises:
        ValueError: a value is out of its range.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    stale: float = 2.0

    def __post_init__(self) -> None:
        if not (0 < self.low <= 1 and self.high > 0 and self.stale >= 1):
            raise ValueError(f"expected low in (0, 1], high above 0 and stale of at least 1, got {self}")
        if self.dual is not None and not 1 < self.dual < inf:
            raise ValueError(f"expected dual above 1 and finite, or None for no bound, got {self.dual}")


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss that an optimizer step minimises.

    Attributes:
        clip: limits of the importance ratios.
        aggregation: how the losses of the tokens of a mini-batch are combined (`rollalloc.train.loss.shares`): "token_mean",
            as in DAPO, "sequence_mean", as in GRPO, or "dr_grpo".
        kl: weight of the KL divergence to the initial policy, 0 or more. The KL term includes rows without an advantage,
            because the divergence is a mean over everything that the policy samples.

    Raises:
        ValueError: a value is out of its range.
    """

    clip: Clip = field(default_factory=Clip)
    aggregation: Aggregation = "token_mean"
    kl: float = 0.0

    def __post_init__(self) -> None:
        if self.aggregation not in get_args(Aggregation):
            raise ValueError(f"aggregation must be one of {', '.join(get_args(Aggregation))}, got {self.aggregation!r}")
        if not 0 <= self.kl < inf:
            raise ValueError(f"kl must be 0 or more, and finite, got {self.kl}")
