"""Learning rates over a run."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Literal, get_args

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate over optimizer steps: a linear rise, then constant or falling to a floor.

    Counted in optimizer steps, not in rollouts or batches: a recipe that throws rollouts away takes fewer steps for the
    same budget, and would else be trained with smaller rates.

    Attributes:
        warmup: steps over which the rate rises, 0 or more.
        shape: what follows.
        steps: after which the floor is reached, those of the rise included, more than `warmup`; None for "constant".
        floor: share of the rate that is left then, in [0, 1].

    Raises:
        ValueError: a value out of its range, or steps for a constant rate.
    """

    warmup: int = 0
    shape: Shape = "constant"
    steps: int | None = None
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup must be 0 or more optimizer steps, got {self.warmup}")
        if self.shape not in get_args(Shape):
            raise ValueError(f"the schedule's shape must be one of {', '.join(get_args(Shape))}, got {self.shape!r}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be a share of the learning rate in [0, 1], got {self.floor}")
        if (self.steps is None) != (self.shape == "constant"):
            raise ValueError(f"a constant rate has no steps and a falling one needs them, got {self}")
        if self.steps is not None and self.steps <= self.warmup:
            raise ValueError(f"steps must be more than those of the warm-up, {self.warmup}, got {self.steps}")

    def share(self, step: int) -> float:
        """Share of the learning rate at an optimizer step.

            rise: step / warmup
            then, with x = min(1, (step - 1 - warmup) / (steps - warmup)):
            constant: 1,   linear: floor + (1 - floor) · (1 - x),   cosine: floor + (1 - floor) · (1 + cos πx) / 2

        The first step after the rise has the full rate, and the first after `steps` the floor, as in the schedules of
        PyTorch and transformers; the rise itself begins above 0, so that no step is lost.

        Args:
            step: 1 is the first.
        """
        if step <= self.warmup:
            return step / self.warmup
        if self.steps is None:
            return 1.0
        done = min(1.0, (step - 1 - self.warmup) / (self.steps - self.warmup))
        left = 1 - done if self.shape == "linear" else (1 + cos(pi * done)) / 2
        return self.floor + (1 - self.floor) * left
