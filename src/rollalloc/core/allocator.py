"""The one stateful class of the core: a driver tells it what happened and asks it what to do.

`rollalloc.core` explains how the core works. This class only dispatches. `lifecycle` takes a group from its draw to its end.
`decisions` decides what to order, makes the batches, and explains why a run ends. `saved_state` turns the
state into plain data. These modules share the state in a `Run`. The time of a call depends on the number of groups that it
touches, not on the number of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from numpy.typing import ArrayLike

from rollalloc.core import decisions, lifecycle, saved_state
from rollalloc.core.events import (
    NOTHING,
    Actions,
    Batch,
    Cancelled,
    Done,
    Event,
    EventError,
    Failed,
    MetricError,
    Moved,
    NoProgress,
    Offered,
    Order,
    RuleError,
    Updated,
)
from rollalloc.core.group import GroupView
from rollalloc.core.prompts import QUARANTINED, PromptStatistics, PromptTable
from rollalloc.core.recipe import Recipe, refuse_other, refuse_unteachable
from rollalloc.core.rule import called
from rollalloc.core.run import Ends, Halt, Run
from rollalloc.core.teaching import Selection, Teaching


def _of_run(name: str) -> Any:
    """Make a property that returns the attribute `name` of the allocator's `Run`."""
    return property(attrgetter(f"_run.{name}"))


class Allocator:
    """Decides which rollouts to generate, stop, release and train on.

    Its state depends only on the recipe, the prompts, the seed and the events so far.

    Args:
        recipe: the method to follow.
        prompts: the data set, as a `PromptTable` or as a number of prompts.
        seed: 0 or more.

    Attributes:
        recipe: the recipe that decides.
        table: the data set.
        seed: the seed of every random draw.
        version: version of the weights, from the last `Updated`.
        statistics: the record of every prompt; read only.
        batch: the batch that was handed out and is not trained on yet, or None.
        paid: rollouts ordered since the run began.
        tokens_paid: tokens of all rollouts that have ended.
        epoch: number of the current pass over the prompts, from 0.
        replayed: number of rows that were trained on again, summed over all batches.
        left_out: number of rows that the gate of the recipe's replay left out, summed over all batches.
        teaching: how many recent rollouts gave a learning signal; read only.
        selection: compares the rows that are new in the batch with all rollouts since the last `Updated`, by mean length
            and difficulty; read only.

    Raises:
        TypeError: `recipe` is not a recipe.
        ValueError: the recipe can never teach, it trains on more groups per batch than there are prompts, or the seed is
            negative.
    """

    recipe: Recipe = _of_run("recipe")
    table: PromptTable = _of_run("table")
    seed: int = _of_run("seed")
    version: int = _of_run("version")
    statistics: PromptStatistics = _of_run("statistics")
    batch: Batch | None = _of_run("batch")
    paid: int = _of_run("budgets.paid")
    tokens_paid: int = _of_run("budgets.tokens")
    epoch: int = _of_run("pool.epoch")
    replayed: int = _of_run("replayed")
    left_out: int = _of_run("left_out")
    teaching: Teaching = _of_run("teaching")
    selection: Selection = _of_run("selection")

    def __init__(self, recipe: Recipe, prompts: int | PromptTable, seed: int) -> None:
        refuse_other(recipe)
        refuse_unteachable(recipe)
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
        """Record what happened.

        Args:
            events: what happened since the last call, in order.

        Raises:
            EventError: an event names a rollout that is unknown or already over, contains an impossible number, or has a
                version out of order. Only the events before the wrong event were processed.
            MetricError: a metric is outside [0, 1], and a rule of the recipe reads metrics as success rates.
        """
        run, on_done = self._run, lifecycle.on_done
        lifecycle.prepare(run)
        for number, event in enumerate(events):
            run.asked_in_vain = False
            try:
                # Nearly every event is a `Done`, and `match` tries its cases one by one, so this test comes first.
                if isinstance(event, Done):
                    on_done(run, event)
                else:
                    self._on_other(event)
            except EventError as error:
                # The same class again: drivers catch `MetricError` to say what the reward function should return.
                raise type(error)(f"event {number}, {error}") from None

    def _on_other(self, event: Event) -> None:
        match event:
            case Failed() | Cancelled():
                lifecycle.on_lost(self._run, event)
            case Updated():
                lifecycle.on_updated(self._run, event)
            case Moved():
                lifecycle.on_moved(self._run, event)
            case Offered():
                lifecycle.on_offered(self._run, event)
            case _:
                raise EventError(f"expected an event of rollalloc.core.events, got {type(event).__name__}")

    def ask(self, capacity: int | None = None) -> Actions:
        """Return what to do now. Each action is returned only once.

        Args:
            capacity: maximum number of rollouts to order now. Later calls order the remaining rollouts. None: no limit. A
                driver that polls while a batch is trained must give a number.

        Raises:
            NoProgress: no rollout is running, and the core can neither order a rollout nor make a batch nor end the run. Or
                `Updated` is missing: no rollout is running, a batch is out, and `ask` was called again without a capacity
                and without an event, although it had nothing to do.
            RuleError: a rule of the recipe broke its contract.
        """
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity must be 0 or more rollouts, or None for no limit, got {capacity}")
        run, flight, budgets = self._run, self._run.flight, self._run.budgets
        lifecycle.prepare(run)
        if run.settled and flight.owner and not (flight.touched or run.cancel or run.release):
            if not budgets.owed:  # fast path: most calls of an asynchronous driver end here
                return NOTHING
            if not budgets.limited:  # second fast path: only the capacity changed
                return Actions(decisions.hand_out(run, capacity))
        # Before orders are handed out, because a stop rule may take back rollouts that were not ordered yet.
        if flight.touched:
            lifecycle.stop_early(run)
        # Tokens are counted when a rollout ends, so a budget can run out after rollouts were decided and before they
        # are ordered.
        if budgets.limited and budgets.overdrawn():
            lifecycle.withhold(run)
        batch, orders = None, ()
        if not (run.settled and flight.owner):  # if settled, the last decision still holds
            # Settled and nothing running: no batch became possible, but `_resolve` below is due.
            batch = None if run.settled else decisions.full_batch(run)
            if batch is None and run.finished is None:
                halt = decisions.decide(run)
                if not flight.owner and run.idle():
                    batch = self._resolve(halt)
        # No orders beside a batch, so that a synchronous driver generates them with the weights that the batch makes.
        if budgets.owed and batch is None and run.finished is None:
            orders = decisions.hand_out(run, capacity)
        cancel = release = ()
        if run.cancel:  # leave out rollouts that ended after the decision to stop them
            cancel = tuple(rollout for rollout in run.cancel if rollout in flight.stopped)
            run.cancel = []
        if run.release:
            release, run.release = tuple(run.release), []
        actions = Actions(orders, cancel, release, batch, run.finished)
        # Only without a capacity: with one, a driver may poll while another thread trains.
        if capacity is None and run.batch is not None and actions == NOTHING:
            self._await_update()
        return actions

    def rest(self) -> None:
        """Do long computations that the next draws need, such as a fit of predictions, if any are due.

        Call this where the driver waits anyway: after it has passed on an answer of `ask`, while rollouts are generated or
        weights are trained. Otherwise the next `tell` or `ask` does the same. The decisions are equal in both cases.
        """
        lifecycle.prepare(self._run)

    def _await_update(self) -> None:
        """Raise `NoProgress` if a synchronous driver asks a second time where nothing can happen before `Updated`."""
        run = self._run
        # While a stopped rollout has not ended, the driver owes its event, and may ask as often as it likes until
        # then.
        idle = not (run.flight.owner or run.flight.stopped)
        if idle and run.asked_in_vain:
            raise NoProgress(
                "the batch that ask returned is not trained, and nothing else can be done before it is: train on its rows, "
                f"then tell Updated({run.version + 1}). To poll while another thread trains, ask with a capacity"
            )
        run.asked_in_vain = idle

    def _resolve(self, halt: Halt | None) -> Batch | None:
        """Make a short batch, draw more prompts for it, end the run, or raise `NoProgress`.

        Called if no rollout is running and no rollout could be ordered.
        """
        run = self._run
        # Before the groups that are ready are looked at: with more prompts, they may become a full batch.
        if halt is not None and halt.ends is Ends.NOTHING:
            raise NoProgress(halt.why)
        if run.flight.ready:
            why = halt.why if halt else f"the intake rule {called(run.recipe.intake)} opens no more groups"
            if batch := decisions.make_batch(run, why):
                return batch
            raise NoProgress(f"{called(run.recipe.stages[-1].promote)} promotes no group although nothing is running")
        if halt is not None and halt.ends is Ends.BATCH:
            run.budgets.batch_opened = 0  # allows `max_candidates` further prompts for this batch
            halt = decisions.decide(run)
            if not run.idle():
                return None
        if halt is None or halt.ends is not Ends.RUN:
            raise NoProgress(halt.why if halt else decisions.no_progress(run))
        # Law 5: all payloads are released by the end of the run, those of waiting groups and of rows kept for replay
        # too.
        lifecycle.discard_waiting(run)
        lifecycle.forget(run, list(run.kept.values()))
        run.finished = halt.why
        return None

    def outstanding(self) -> Actions:
        """Return the orders in flight, the cancelled rollouts that have not ended, and the untrained batch.

        A driver calls this once after it has loaded a state, to learn which actions are still to be done.
        """
        run = self._run
        orders = [
            Order(group.id, group.prompt, stage, rollouts, group.limit)
            for group in run.flight.groups.values()
            for stage, rollouts in group.by_stage(sorted(group.running))
        ]
        # The next `ask` lists these. Each action is returned once (law 4), so they are left out here.
        not_handed_out = set(run.cancel)
        cancel = tuple(rollout for rollout in run.flight.stopped if rollout not in not_handed_out)
        return Actions(tuple(orders), cancel, (), run.batch, run.finished)

    def wanted(self) -> int:
        """Number of prompts that a data loader should offer now; 0 if the recipe draws its own prompts."""
        run, rule = self._run, self._run.loader
        lifecycle.prepare(run)
        if rule is None or rule.ended(run.memory):
            return 0
        if run.blocked() or run.finished or decisions.opening_halt(run) or not run.pool.any_due():
            return 0
        # The same numbers as in `decisions._intake`. If this were larger, a driver would read prompts that no group
        # is opened for.
        groups = decisions.at_most_candidates(run, run.recipe.intake(run.view(), run.memory))
        return max(0, groups - len(run.drawn) - rule.waiting(run.memory))

    def due_epoch(self) -> int | None:
        """The first epoch in which at least one prompt may be drawn. A data loader in a later epoch has skipped a prompt.

        None if every prompt is in flight, waits for new weights, or may never be drawn again.
        """
        return self._run.pool.due_epoch()

    # ---------------------------------------------------------------------------------------------------- the figures

    @property
    def limit(self) -> int | None:
        """Maximum tokens of a rollout in groups that have a limit now; None if there is none or it is not known yet."""
        return self._run.limit

    def prompt_figures(self) -> dict[str, float]:
        """The numbers that the prompt rule reports, such as the log-loss of its predictions; empty if there are none."""
        lifecycle.prepare(self._run)
        return dict(self._run.recipe.prompts.figures(self._run.memory))

    def quarantined(self) -> list[int]:
        """The prompts that are no longer drawn because several visits in a row had no score."""
        return self._run.statistics.with_fate(QUARANTINED)

    def prompt_counts(self) -> dict[str, int]:
        """Count prompts and visits.

        "evicted" and "quarantined" are the numbers of such prompts now. "revived" is the number of visits so far to prompts
        that had been evicted.
        """
        pool = self._run.pool
        return {"evicted": pool.evicted(), "revived": pool.revived, "quarantined": len(self.quarantined())}

    def few_prompts(self) -> str | None:
        """A warning to log after a batch if few prompts are left to draw, or None."""
        return decisions.few_prompts(self._run) if self._run.pool.should_warn else None

    def shut_gate(self) -> str | None:
        """A warning to log after `Moved` if the gate has left out all replayed rows for many batches, or None."""
        return decisions.shut_gate(self._run)

    def watch(self, on_close: Callable[[int, str], None]) -> None:
        """Call a function with the id and the fate of each group that ends, such as "trained" or "out_of_band/solved".

        The function may only record what it is told. It is not part of the state.
        """
        self._run.on_close = on_close

    def accounts(self) -> dict[str, int]:
        """Number of rollouts by the cause of their end. "open" counts all other rollouts that were ordered."""
        accounts = self._run.accounts
        # As a difference, so that the causes always sum to what was ordered (law 8).
        return accounts | {"open": self.paid - sum(accounts.values())}

    def scoreless(self) -> bool:
        """Whether the run ended because scores were missing.

        True if more than half of the rollouts failed, and one of two conditions holds: no rollout has a score; or the run
        ended because many prompts in a row gave no score.
        """
        why, accounts = self._run.finished, self.accounts()
        if why is None or 2 * accounts["failed"] <= self.paid:
            return False
        without_score = sum(accounts[cause] for cause in ("failed", "cancelled", "open"))
        return without_score == self.paid or why.startswith("failed:")

    # --------------------------------------------------------------------------------------------- saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state as JSON data. Arrays are stored as {dtype, shape, base64}."""
        lifecycle.prepare(self._run)
        return saved_state.dump(self._run)

    def load_state_dict(
        self, state: dict[str, Any], *, accept_recipe: bool = False, remap: ArrayLike | str | None = None
    ) -> None:
        """Continue from a saved state. If an error is raised, this allocator is unchanged.

        Args:
            state: the result of `state_dict`, directly or after a round trip through JSON.
            accept_recipe: continue under this allocator's recipe even if another recipe saved the state.
            remap: for a data set that has changed. "keys" finds each prompt by its key. An array of shape (N,) gives the
                index of each prompt in the saved data set, -1 for a new prompt. Groups in flight are dropped if their
                prompts are not in the new data set.

        Raises:
            ValueError: the state has another schema, missing or unknown keys, another recipe, seed or data set, or
                impossible values. The message names the place and the difference.
        """
        # The state is loaded into a new run, so that an error leaves the present one as it is.
        run = saved_state.load(state, self.recipe, self.table, self.seed, accept_recipe, remap)
        same_recipe = not any(saved_state.differences(state["recipe"], self.recipe.description))
        lifecycle.adapt_after_load(run, same_recipe=same_recipe, same_prompts=remap is None)
        run.on_close = self._run.on_close
        self._run = run


__all__ = ["Allocator", "EventError", "GroupView", "MetricError", "NoProgress", "RuleError"]
