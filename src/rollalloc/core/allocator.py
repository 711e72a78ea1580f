"""The one stateful class: told what happened, asked what to do.

It is a front door. A group's way is `lifecycle`'s, what is ordered is decided in `decisions`, batches are made in `batches`,
why a run ends is in `endings`, and `saving` turns it all into data; the state that they share is a `Run`. A call costs in
proportion to the groups it touches, never to the number of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import ArrayLike

from rollalloc.core import batches, decisions, endings, lifecycle, saving
from rollalloc.core.budget_tracker import Ends, Halt
from rollalloc.core.errors import EventError, MetricError, NoProgress, RuleError
from rollalloc.core.events import (
    NOTHING,
    Actions,
    Batch,
    Cancelled,
    Done,
    Event,
    Failed,
    Offered,
    Order,
    Updated,
)
from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Recipe, refuse_other
from rollalloc.core.run import Run
from rollalloc.core.selection import Selection
from rollalloc.core.statistics import QUARANTINED, PromptStatistics
from rollalloc.core.table import PromptTable
from rollalloc.core.teaching import Teaching


class Allocator:
    """Decides, from what it is told, which rollouts to generate, to stop, to release and to train on.

    Its state is a function of the recipe, the seed and the events told so far.

    Args:
        recipe: what to do.
        prompts: the data set, as a `PromptTable` or as a number of prompts.
        seed: 0 or more.

    Raises:
        TypeError: what is no recipe.
        ValueError: more groups in a batch than there are prompts, or a negative seed.
    """

    def __init__(self, recipe: Recipe, prompts: int | PromptTable, seed: int) -> None:
        refuse_other(recipe)
        table = PromptTable.of(prompts)
        if recipe.groups > len(table):
            raise ValueError(
                f"the recipe trains on {recipe.groups} groups per batch but there are only {len(table)} prompts; "
                "use fewer groups or more prompts"
            )
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        self._run = Run(recipe, table, int(seed))

    # ------------------------------------------------------------------------------------------ what a driver calls

    def tell(self, events: Iterable[Event]) -> None:
        """Take what happened.

        Args:
            events: in the order in which they happened.

        Raises:
            EventError: an event for a rollout that is unknown or already over, a number that is not finite or not
                possible, a version that goes back. The events before it were taken.
            MetricError: a metric outside [0, 1] under a recipe whose rules take it for a success rate.
        """
        run, on_done = self._run, lifecycle.on_done
        for number, event in enumerate(events):
            try:
                if type(event) is Done:
                    on_done(run, event)
                else:
                    self._on_other(event)
            except EventError as error:
                raise type(error)(f"event {number}, {error}") from None

    def _on_other(self, event: Event) -> None:
        match event:
            case Done():
                lifecycle.on_done(self._run, event)
            case Failed() | Cancelled():
                lifecycle.on_lost(self._run, event)
            case Updated():
                lifecycle.on_updated(self._run, event)
            case Offered():
                lifecycle.on_offered(self._run, event)
            case _:
                raise EventError(f"expected an event of rollalloc.core.events, got {type(event).__name__}")

    def ask(self, capacity: int | None = None) -> Actions:
        """What to do now. Each action is handed out once.

        Args:
            capacity: rollouts that may be started now; None: any number. Too few give fewer or split orders.

        Raises:
            NoProgress: nothing to do, nothing running, and nothing left to be told that would change it.
            RuleError: a rule of the recipe broke its contract.
        """
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity must be 0 or more rollouts, or None for no limit, got {capacity}")
        run, flight, budgets = self._run, self._run.flight, self._run.budgets
        if run.settled and flight.owner and not (flight.touched or run.cancel or run.release):
            if not budgets.owed:  # most asks of a driver that tells each completion by itself
                return NOTHING
            if not budgets.limited:  # nearly all others: a slot became free
                return Actions(decisions.hand_out(run, capacity))
        if flight.touched:
            lifecycle.stop_early(run)
        if budgets.limited and budgets.overdrawn():
            lifecycle.withhold(run)
        batch, orders = None, ()
        if not (run.settled and flight.owner):  # else nothing changed since the last decision, which still holds
            batch = None if run.settled else batches.full_batch(run)
            if batch is None and run.finished is None:
                halt = decisions.decide(run)
                if not flight.owner and run.idle():
                    batch = self._resolve(halt)
        if budgets.owed and batch is None and run.finished is None:
            orders = decisions.hand_out(run, capacity)
        cancel = release = ()
        if run.cancel:  # a rollout may have ended between the decision to stop it and now
            cancel = tuple(rollout for rollout in run.cancel if rollout in flight.stopped)
            run.cancel = []
        if run.release:
            release, run.release = tuple(run.release), []
        return Actions(orders, cancel, release, batch, run.finished)

    def _resolve(self, halt: Halt | None) -> Batch | None:
        """Nothing is running and nothing was decided: a short batch, a fresh round, the end of the run, or an error."""
        run = self._run
        if halt is not None and halt.ends is Ends.NOTHING:
            raise NoProgress(halt.why)
        if run.flight.ready:
            why = halt.why if halt else f"the intake rule {run.recipe.intake!r} opens no more groups"
            if batch := batches.make_batch(run, why):
                return batch
            raise NoProgress(f"{run.recipe.stages[-1].promote!r} promotes no group although nothing is running")
        if halt is not None and halt.ends is Ends.BATCH:
            run.budgets.batch_opened = 0  # what was paid stays paid: the batch's budget holds
            halt = decisions.decide(run)
            if not run.idle():
                return None
        if halt is None or halt.ends is not Ends.RUN:
            raise NoProgress(halt.why if halt else endings.no_progress(run))
        lifecycle.discard_waiting(run)
        lifecycle.forget(run, list(run.kept.values()))
        run.finished = halt.why
        return None

    def outstanding(self) -> Actions:
        """After a load: orders in flight, cancellations without a terminal event, the batch not yet trained."""
        run = self._run
        orders = [
            Order(group.id, group.prompt, stage, rollouts)
            for group in run.flight.groups.values()
            for stage, rollouts in group.by_stage(sorted(group.running))
        ]
        not_handed_out = set(run.cancel)
        cancel = tuple(rollout for rollout in run.flight.stopped if rollout not in not_handed_out)
        return Actions(tuple(orders), cancel, (), run.batch, run.finished)

    def wanted(self) -> int:
        """Prompts that a loader should offer now; 0 for a recipe that draws its own."""
        run, rule = self._run, self._run.loader
        if rule is None or rule.ended(run.memory):
            return 0
        if run.blocked() or run.finished or endings.opening_halt(run) or not run.pool.any_due():
            return 0
        groups = decisions.at_most_candidates(run, run.recipe.intake(run.view(), run.memory))
        return max(0, groups - len(run.drawn) - rule.waiting(run.memory))

    def due_epoch(self) -> int | None:
        """The first epoch in which a prompt may be drawn: a loader that has gone beyond it has not offered that prompt.

        None where every prompt is in flight, waits for a version or is never drawn again.
        """
        return self._run.pool.due_epoch()

    # ---------------------------------------------------------------------------------------------------- the figures

    @property
    def recipe(self) -> Recipe:
        """What it does."""
        return self._run.recipe

    @property
    def table(self) -> PromptTable:
        """The data set."""
        return self._run.table

    @property
    def seed(self) -> int:
        """Of every draw."""
        return self._run.seed

    @property
    def version(self) -> int:
        """Of the weights, as last told."""
        return self._run.version

    @property
    def statistics(self) -> PromptStatistics:
        """The record of every prompt; read only."""
        return self._run.statistics

    @property
    def batch(self) -> Batch | None:
        """The batch handed out and not yet trained."""
        return self._run.batch

    @property
    def paid(self) -> int:
        """Rollouts ordered since the run began."""
        return self._run.budgets.paid

    @property
    def tokens_paid(self) -> int:
        """Tokens of the rollouts that ended."""
        return self._run.budgets.tokens

    @property
    def epoch(self) -> int:
        """Passes over the prompts begun, from 0."""
        return self._run.pool.epoch

    def prompt_figures(self) -> dict[str, float]:
        """What the prompt rule says of itself, such as how good its predictions were; empty where it says nothing."""
        return dict(self._run.recipe.prompts.figures(self._run.memory))

    def quarantined(self) -> list[int]:
        """The prompts that are not drawn again because their rollouts always failed."""
        return self._run.statistics.with_fate(QUARANTINED)

    def away(self) -> dict[str, int]:
        """Prompts `evicted` and `quarantined` now, and visits so far to prompts that had been evicted (`revived`)."""
        pool = self._run.pool
        return {"evicted": pool.evicted(), "revived": pool.revived, "quarantined": len(self.quarantined())}

    def few_prompts(self) -> str | None:
        """The line to be said after a batch was made where few prompts are left to draw; None: there is none to be said."""
        return endings.few_prompts(self._run) if self._run.pool.speaks else None

    @property
    def replayed(self) -> int:
        """Rows that were trained on again, over all batches; `accounts` has each rollout once."""
        return self._run.replayed

    def accounts(self) -> dict[str, int]:
        """Rollouts paid, by cause; the sum is what was ordered."""
        accounts = self._run.accounts
        return accounts | {"open": self.paid - sum(accounts.values())}

    @property
    def teaching(self) -> Teaching:
        """Whether the last rollouts still taught; read only."""
        return self._run.teaching

    @property
    def selection(self) -> Selection:
        """What the batch trains on beside what was sampled, until the next `Updated`; read only."""
        return self._run.selection

    def scoreless(self) -> bool:
        """Whether the run is over for want of scores: most rollouts failed, and none has a score, or none any more."""
        why, accounts = self._run.finished, self.accounts()
        if why is None or 2 * accounts["failed"] <= self.paid:
            return False
        without_score = sum(accounts[cause] for cause in ("failed", "cancelled", "open"))
        return without_score == self.paid or why.startswith("failed:")

    # --------------------------------------------------------------------------------------------- saving and loading

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON holds it: arrays as {dtype, shape, base64}."""
        return saving.dump(self._run)

    def load_state_dict(
        self, state: dict[str, Any], *, accept_recipe: bool = False, remap: ArrayLike | str | None = None
    ) -> None:
        """Go on from a saved state: all of it or, on an error, none.

        Args:
            state: what `state_dict` gave, also after a passage through JSON.
            accept_recipe: go on under this allocator's recipe although the state was saved under another.
            remap: for a data set that changed: "keys" to find each prompt by its key, or shape (N,), for each prompt its
                index in the saved data set, -1 where it is new. Groups in flight of prompts that are gone are dropped.

        Raises:
            ValueError: another schema, keys missing or unknown, another recipe, seed or data set, values that no run can
                have; says where and names the difference.
        """
        run = saving.load(state, self.recipe, self.table, self.seed, accept_recipe, remap)
        same_recipe = not any(saving.differences(state["recipe"], self.recipe.description))
        lifecycle.go_on(run, same_recipe=same_recipe, same_prompts=remap is None)
        self._run = run


__all__ = ["Allocator", "EventError", "GroupView", "MetricError", "NoProgress", "RuleError"]
