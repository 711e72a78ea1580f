"""The cost of a run at a service: tokens by kind, and money if the user gives prices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, split as the service bills them.

    Attributes:
        prefill: prompt tokens that the sampler had to read.
        cached: prompt tokens that the sampler had already read. These are the service's cache hits and, if a request has
            several samples, the prompt's tokens for each sample after the first.
        sampled: generated tokens, including tokens of rollouts that were stopped or dropped.
        trained: tokens of the sequences in forward and backward passes, including prompts.
    """

    prefill: int = 0
    cached: int = 0
    sampled: int = 0
    trained: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in asdict(self)))

    def at_least(self, other: Usage) -> Usage:
        """For each kind of token, the larger of the two numbers."""
        return Usage(*(max(getattr(self, name), getattr(other, name)) for name in asdict(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """The price of a million tokens of each kind. There are no built-in prices, because services change them.

    Attributes:
        prefill: price of prompt tokens, 0 or more.
        sampled: price of generated tokens, 0 or more.
        trained: price of trained tokens, 0 or more.
        cached: price of prompt tokens that the sampler had read before, 0 or more. None: the same as `prefill`.
        currency: name of the currency, for reports.

    Raises:
        ValueError: a price is negative or not finite.
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
                raise ValueError(f"{name} must be the price of a million tokens, 0 or more and finite, got {price!r}")

    def of(self, usage: Usage) -> float:
        """The price of these tokens: Σ tokens · price / 10⁶."""
        cached = self.prefill if self.cached is None else self.cached
        return (
            usage.prefill * self.prefill
            + usage.cached * cached
            + usage.sampled * self.sampled
            + usage.trained * self.trained
        ) / 1e6


def bill(usage: Usage, prices: Prices | None) -> dict[str, Any]:
    """The cost as fields for a line of the metrics. Without prices, `money` and `currency` are left out."""
    fields: dict[str, Any] = {"cost": asdict(usage)}
    if prices is not None:
        fields |= {"money": round(prices.of(usage), 6), "currency": prices.currency}
    return fields
