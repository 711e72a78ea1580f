"""Low-rank adapters as a value; `adapter` puts them into a model."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rollalloc.core.recipe import at_least


@dataclass(frozen=True)
class Lora:
    """Train a low-rank addition to some of a model's matrices, and leave the rest as it is.

        W' = W + alpha / rank · B A,   A of shape (rank, in), B of shape (out, rank)

    A begins random, B at zero, so that the adapted model begins as the base model (arXiv 2106.09685). There is no dropout:
    the update would see other log-probabilities than the sampler.

    Attributes:
        rank: of B A, at least 1, and no more than the smallest side of a matrix that it is added to.
        alpha: above 0; None: twice the rank.
        targets: names of the linear layers, their last part or more of it, e.g. "q_proj" or "mlp.up_proj"; empty: all of
            them but the head.

    Raises:
        ValueError: a value out of its range.
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least("the rank of LoRA", self.rank, 1)
        if self.alpha is not None and not 0 < self.alpha < inf:
            raise ValueError(f"the alpha of LoRA must be above 0 and finite, got {self.alpha}")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not all(target.strip() for target in self.targets):
            raise ValueError("the targets of LoRA must be names of layers, got an empty one")

    @property
    def scale(self) -> float:
        """What alpha is, given or not."""
        return 2.0 * self.rank if self.alpha is None else self.alpha
