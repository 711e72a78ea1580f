"""What a service is paid for: tokens by kind, and money by a price table of the user's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens by what they are billed as.

    Attributes:
        prefill: of prompts, read by the sampler.
        cached: of prompts that the sampler had read already: of the further samples of a request, and what the service says.
        sampled: generated, of rollouts that were stopped or thrown away too.
        trained: of the sequences of forward and backward passes, prompts included.
    """

    prefill: int = 0
    cached: int = 0
    sampled: int = 0
    trained: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in asdict(self)))

    def __sub__(self, other: Usage) -> Usage:
        """What came since; none of it is below 0."""
        return Usage(*(max(0, getattr(self, name) - getattr(other, name)) for name in asdict(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What a million tokens cost; nobody's price list is built in, for they change.

    Attributes:
        prefill: of prompts, 0 or more.
        sampled: of generated tokens, 0 or more.
        trained: of trained tokens, 0 or more.
        cached: of prompts read before, 0 or more; None: as `prefill`.
        currency: how the sum is called.

    Raises:
        ValueError: a price out of its range.
    """

    prefill: float
    sampled: float
    trained: float
    cached: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        for name in ("prefill", "sampled", "trained", "cached"):
            price = getattr(self, name)
            if price is None and name == "cached":
                continue
            if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < inf:
                raise ValueError(f"{name} must be what a million tokens cost, 0 or more and finite, got {price!r}")

    def of(self, usage: Usage) -> float:
        """What tokens cost: Σ tokens · price / 10⁶."""
        cached = self.prefill if self.cached is None else self.cached
        return (
            usage.prefill * self.prefill
            + usage.cached * cached
            + usage.sampled * self.sampled
            + usage.trained * self.trained
        ) / 1e6


def bill(usage: Usage, lost: Usage, prices: Prices | None) -> dict[str, Any]:
    """The fields of a line of the metrics.

    Args:
        usage: of the run as it stands.
        lost: of what was paid and then done again, after a kill.
        prices: None: no money.
    """
    fields: dict[str, Any] = {"cost": asdict(usage), "cost_lost": asdict(lost)}
    if prices is not None:
        fields |= {"money": round(prices.of(usage + lost), 6), "currency": prices.currency}
    return fields
