"""Settings of low-rank adapters. The module `adapter` adds them to a model."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rollalloc.core.recipe import at_least


@dataclass(frozen=True)
class Lora:
    """LoRA: train a low-rank addition to some of a model's matrices, and freeze everything else (arXiv 2106.09685).

        W' = W + alpha / rank · B A,   A of shape (rank, in), B of shape (out, rank)

    A begins random and B begins as 0, so training begins at the base model. There is no dropout: with it, the update and
    the sampler would compute different log-probabilities.

    Attributes:
        rank: rank of the adapters B A, at least 1 and at most the smaller side of each adapted matrix.
        alpha: scale of the adapters, above 0. None: 2 · rank.
        targets: names of the linear layers to adapt, or ends of their names, for example "q_proj" or "mlp.up_proj".
            Empty: all linear layers except the head.

    Raises:
        ValueError: a value is out of range.
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
            raise ValueError("the targets of LoRA must be names of layers, got an empty name")

    @property
    def scale(self) -> float:
        """alpha, or 2 · rank if alpha is None."""
        return 2.0 * self.rank if self.alpha is None else self.alpha
