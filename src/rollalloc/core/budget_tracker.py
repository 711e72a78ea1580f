"""Count what was spent, and say what the budgets still allow and why no more groups may be opened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from rollalloc.core.packing import exact_keys, natural
from rollalloc.core.recipe import Budget


class Ends(Enum):
    """What ends, once nothing is running, because no more groups can be opened."""

    BATCH = "batch"  # a short batch is made; if no group is ready, the count of candidates restarts
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
        self._paid_before = self._tokens_before = 0  # values at the last batch

    def order(self, rollouts: int) -> None:
        """Count decided rollouts as ordered."""
        self.owed -= rollouts
        self.paid += rollouts

    @property
    def batch_paid(self) -> int:
        """Rollouts ordered since the last batch."""
        return self.paid - self._paid_before

    @property
    def batch_tokens(self) -> int:
        """Tokens of rollouts that ended since the last batch."""
        return self.tokens - self._tokens_before

    def next_batch(self) -> None:
        """Start the counts of the next batch."""
        self.batch_opened, self._paid_before, self._tokens_before = 0, self.paid, self.tokens

    def room(self) -> int | None:
        """Number of rollouts that the budgets still allow, at least 0; None without a limit."""
        if not self.limited:
            return None
        limits = [left for left in (self._left_in_run(), self._left_in_batch()) if left is not None]
        return max(0, min(limits)) if limits else None

    def overdrawn(self) -> bool:
        """Whether decided rollouts may no longer be ordered: tokens are spent, or a smaller budget was loaded."""
        budget = self.budget
        if not self.owed or not self.limited:
            return False
        tokens = _spent(budget.run_tokens, self.tokens) or _spent(budget.batch_tokens, self.batch_tokens)
        return tokens or (self._left_in_run() or 0) < 0 or (self._left_in_batch() or 0) < 0

    def halt(self) -> Halt:
        """Return a `Halt` that names the budget without room for another group."""
        run, batch = self._left_in_run(), self._left_in_batch()
        if run is not None and (batch is None or run <= batch):
            limits = _limits("run", self.budget.run_rollouts, self.paid, self.budget.run_tokens, self.tokens)
        else:
            limits = _limits(
                "batch", self.budget.batch_rollouts, self.batch_paid, self.budget.batch_tokens, self.batch_tokens
            )
        return Halt(f"the budget of {limits}", Ends.RUN)

    def _left_in_run(self) -> int | None:
        return _left(self.budget.run_rollouts, self.paid + self.owed, self.budget.run_tokens, self.tokens)

    def _left_in_batch(self) -> int | None:
        return _left(
            self.budget.batch_rollouts, self.batch_paid + self.owed, self.budget.batch_tokens, self.batch_tokens
        )

    _FIELDS = ("paid", "owed", "tokens", "batch_opened", "batch_paid", "batch_tokens")

    def state_dict(self) -> dict[str, Any]:
        """The counts. The budget itself is part of the recipe."""
        return {name: getattr(self, name) for name in self._FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved counts."""
        exact_keys(state, self._FIELDS, "budgets")
        saved = {name: natural(state[name], f"budgets, {name}") for name in self._FIELDS}
        if saved["batch_paid"] > saved["paid"] or saved["batch_tokens"] > saved["tokens"]:
            raise ValueError(f"budgets: the last batch cost more than the whole run, {saved}; the state is corrupt")
        self.paid, self.owed, self.tokens = saved["paid"], saved["owed"], saved["tokens"]
        self.batch_opened = saved["batch_opened"]
        self._paid_before, self._tokens_before = self.paid - saved["batch_paid"], self.tokens - saved["batch_tokens"]


def _limits(whose: str, rollout_limit: int | None, rollouts: int, token_limit: int | None, tokens: int) -> str:
    """The end of the sentence "the budget of 1,500 rollouts has 4 left, too few for another group"."""
    known = [
        (limit, unit, spent)
        for limit, unit, spent in ((rollout_limit, "rollouts", rollouts), (token_limit, "tokens", tokens))
        if limit is not None
    ]
    limits = " and ".join(f"{limit:,} {unit}" for limit, unit, _ in known) + (" a batch" if whose == "batch" else "")
    if rollout_limit is None or any(spent >= limit for limit, _, spent in known):
        return f"{limits} is spent"
    return f"{limits} has {rollout_limit - rollouts:,} rollouts left, too few for another group"


def _spent(limit: int | None, tokens: int) -> bool:
    return limit is not None and tokens >= limit


def _left(rollout_limit: int | None, rollouts: int, token_limit: int | None, tokens: int) -> int | None:
    if _spent(token_limit, tokens):
        return 0
    return None if rollout_limit is None else rollout_limit - rollouts
