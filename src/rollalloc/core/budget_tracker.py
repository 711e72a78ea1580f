"""Count what was spent, say how much the budgets still allow, and explain why no more groups may be opened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from rollalloc.core.packing import exact_keys, natural
from rollalloc.core.recipe import Budget


class Ends(Enum):
    """What happens when no more groups can be opened and no rollout is running."""

    BATCH = "batch"  # a short batch is made; if no group is ready, `max_candidates` further prompts are allowed
    RUN = "run"  # a short batch is made; if no group is ready, the run is over
    NOTHING = "nothing"  # nothing ends; the core waits for an event from the driver


@dataclass(frozen=True, slots=True)
class Halt:
    """Why no more groups can be opened now."""

    why: str
    ends: Ends


NO_LIMIT = Budget()


class BudgetTracker:
    """Rollouts and tokens spent, compared with the budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.limited = budget != NO_LIMIT
        self.paid = 0  # rollouts ordered
        self.owed = 0  # rollouts that are decided and not ordered yet
        self.tokens = 0  # tokens of rollouts with a terminal event
        self.batch_opened = 0  # groups opened since the last batch

    def room(self) -> int | None:
        """Number of rollouts that the budget still allows, at least 0; None without a limit."""
        left = self._left()
        return None if left is None else max(0, left)

    def overdrawn(self) -> bool:
        """Whether the budget no longer allows rollouts that are decided but not yet ordered.

        True if the token budget is spent, or if a state was loaded with a smaller budget.
        """
        if not self.owed or not self.limited:
            return False
        return self._tokens_are_spent() or (self._left() or 0) < 0

    def halt(self) -> Halt:
        """Explain that the budget is spent, or that too little of it is left for another group."""
        budget = self.budget
        known = [(budget.run_rollouts, "rollouts", self.paid), (budget.run_tokens, "tokens", self.tokens)]
        limits = " and ".join(f"{limit:,} {unit}" for limit, unit, _ in known if limit is not None)
        if budget.run_rollouts is None or any(limit is not None and spent >= limit for limit, _, spent in known):
            return Halt(f"the budget of {limits} is spent", Ends.RUN)
        left = budget.run_rollouts - self.paid
        return Halt(f"the budget of {limits} has {left:,} rollouts left, too few for another group", Ends.RUN)

    def _left(self) -> int | None:
        """Rollouts that may still be decided; negative if a state was loaded with a smaller budget."""
        if self._tokens_are_spent():
            return 0
        return None if self.budget.run_rollouts is None else self.budget.run_rollouts - self.paid - self.owed

    def _tokens_are_spent(self) -> bool:
        return self.budget.run_tokens is not None and self.tokens >= self.budget.run_tokens

    _FIELDS = ("paid", "owed", "tokens", "batch_opened")

    def state_dict(self) -> dict[str, Any]:
        """The counts that a saved state contains. The budget itself is part of the recipe."""
        return {name: getattr(self, name) for name in self._FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved counts."""
        exact_keys(state, self._FIELDS, "budgets")
        for name in self._FIELDS:
            setattr(self, name, natural(state[name], f"budgets, {name}"))
