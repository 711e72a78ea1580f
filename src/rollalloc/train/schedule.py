"""The learning rate over a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi
from typing import Any, Literal, get_args

from rollalloc.core.recipe import Budget

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate over a run: a linear warmup, and then a constant rate or a fall to a floor.

    The rate falls over a number of optimizer steps, or over the run's budget. In the second case, the rate of a batch
    depends on the share of the budget that was spent before the batch.

    Attributes:
        warmup: number of steps over which the rate rises, 0 or more.
        shape: "constant", "linear" or "cosine": how the rate continues after the warmup.
        steps: number of optimizer steps, including the warmup, until the floor is reached; more than `warmup`. None:
            the rate falls over the budget, or is constant.
        floor: the rate at the end, as a share of the full rate, in [0, 1].

    Raises:
        ValueError: a value is out of its range, or `steps` is set for a constant rate.
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
        if self.steps is not None and self.shape == "constant":
            raise ValueError(f"a constant rate has no steps, got {self.steps}; give linear or cosine (--schedule)")
        if self.steps is not None and self.steps <= self.warmup:
            raise ValueError(f"steps must be more than the warm-up steps, {self.warmup}, got {self.steps}")

    @property
    def over_budget(self) -> bool:
        """Whether the rate falls over the run's budget."""
        return self.shape != "constant" and self.steps is None

    def share(self, step: int, spent: float | None = None) -> float:
        """The learning rate at an optimizer step, as a share of the full rate.

            warmup: step / warmup
            then, with x = min(1, (step - 1 - warmup) / (steps - warmup)), or x = spent:
            constant: 1,   linear: floor + (1 - floor) · (1 - x),   cosine: floor + (1 - floor) · (1 + cos πx) / 2

        As in PyTorch and transformers, the first step after the warmup has the full rate, and the first step after
        `steps` has the floor. The first step of the warmup is already above 0. A rate that falls over the budget begins to
        fall with the first rollout, so during the warmup the rising and the falling share are multiplied.

        Args:
            step: number of the step, from 1.
            spent: share of the budget that was spent before the batch, in [0, 1]. Needed if the rate falls over the budget.
        """
        if self.over_budget:
            assert spent is not None
            return min(1.0, step / max(1, self.warmup)) * self._fallen(spent)
        if step <= self.warmup:
            return step / self.warmup
        if self.steps is None:
            return 1.0
        return self._fallen(min(1.0, (step - 1 - self.warmup) / (self.steps - self.warmup)))

    def _fallen(self, done: float) -> float:
        left = 1 - done if self.shape == "linear" else (1 + cos(pi * done)) / 2
        return self.floor + (1 - self.floor) * left


def share_spent(budget: Budget, max_batches: int | None, batches: int, paid: Mapping[str, Any]) -> float | None:
    """Share of a run's budget that is spent, in [0, 1]. With several limits, the largest share. None: there is no limit.

    Args:
        budget: budget of the recipe.
        max_batches: another limit, in batches; None: no such limit.
        batches: number of batches trained.
        paid: contains `rollouts_paid` and `tokens_paid` at the newest update.
    """
    spent = (paid["rollouts_paid"], paid["tokens_paid"], batches)
    limits = (budget.run_rollouts, budget.run_tokens, max_batches)
    shares = [amount / limit for amount, limit in zip(spent, limits, strict=True) if limit is not None]
    return min(1.0, max(shares)) if shares else None


def check_budget(schedule: Schedule, budget: Budget, max_batches: int | None) -> None:
    """Raise a ValueError if the learning rate falls over the budget but the run has no budget."""
    limits = (budget.run_rollouts, budget.run_tokens, max_batches)
    if schedule.over_budget and not any(limits):
        do = "give --max-rollouts (Budget(run_rollouts=...)) or --schedule-steps (Schedule(steps=...))"
        raise ValueError(
            f"a {schedule.shape} schedule without steps falls over the run's budget, and there is none; {do}"
        )
