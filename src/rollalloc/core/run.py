"""The state of a run. The modules of the core share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from operator import attrgetter
from typing import Any, cast

from rollalloc.core.budget_tracker import BudgetTracker
from rollalloc.core.events import Batch, Row
from rollalloc.core.flight import Flight
from rollalloc.core.group import Group
from rollalloc.core.prompt_pool import PromptPool
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import (
    CAUSES,
    Drawn,
    Memory,
    OfferedPromptRule,
    PromptRule,
    Rule,
    SizeRule,
    StopRule,
    View,
)
from rollalloc.core.selection import Selection
from rollalloc.core.statistics import PromptStatistics
from rollalloc.core.table import PromptTable
from rollalloc.core.teaching import Teaching


class Run:
    """The state of an allocator. It depends only on the recipe, the prompts, the seed and the events so far.

    Attributes:
        loader: the prompt rule, if its prompts come from a framework's own data loader; else None.
        reads_rate: whether a rule reads the metric as a success rate.
        patient_S: whether the core asks the judge of stage s only about complete groups.
        size_memory: memory of the size rule of each stage, by the stage's index as text.
        learns: whether the prompt rule learns from visits, so that it must be told of each.
        learning_S: the stages whose size rules learn from visits, by the stage's index as text.
        stops_from_S: number of scored rollouts that a group needs before the stop rule of stage s is asked; infinite if
            there is no stop rule.
        drawn: prompts that were drawn, with their epochs, but have no group because the budgets had no room.
        kl_sum: sum of `Updated.approx_kl` so far.
        kept: rows that may be replayed, by rollout. The rows of a batch are added when its `Updated` arrives.
        replayed: number of rows trained on again, summed over all batches.
        cancel: rollouts to stop, not yet listed in any `Actions`.
        release: rollouts whose payload may be freed, not yet listed in any `Actions`.
        batch: the batch that was handed out and for which `Updated` has not arrived yet.
        finished: why the run is over, or None.
        accounts: number of rollouts that are over, by cause.
        teaching: how many recent rollouts gave a learning signal.
        selection: compares the rows that are new in the batch with all rollouts since the last update, by mean length and
            difficulty.
        barren: number of candidates dropped since a group last became ready for a batch.
        failing: number of groups in a row that got no score because rollouts failed.
        asked_in_vain: True if the last `ask` had no capacity and nothing to do before `Updated`, without an event since.
        settled: True if nothing changed since the last decision, so that the decision still holds.
        on_close: called with the id and the fate of each group that ends; not part of the state.
    """

    def __init__(self, recipe: Recipe, table: PromptTable, seed: int) -> None:
        self.recipe, self.table, self.seed = recipe, table, seed
        self.loader = recipe.prompts if isinstance(recipe.prompts, OfferedPromptRule) else None
        self.reads_rate = bool(recipe.rate_readers)
        self.patient_S = tuple(stage.judge.traits.waits_for_all for stage in recipe.stages)
        self.version = 0
        # Only if a rule reads them, because they take 4 bytes for each prompt.
        recent = recipe.retire is not None or any(stage.judge.traits.reads_recent for stage in recipe.stages)
        self.statistics = PromptStatistics(len(table), recent=recent)
        self.pool = PromptPool(len(table))
        self.memory = _checked_memory(recipe.prompts, recipe.prompts.init(table))
        self.size_memory = {
            # By text, because JSON has no other keys.
            str(at): _checked_memory(stage.size, stage.size.init(table))
            for at, stage in enumerate(recipe.stages)
        }
        self.learns = type(recipe.prompts).observe is not PromptRule.observe
        sizes = {str(at): stage.size for at, stage in enumerate(recipe.stages)}
        self.learning_S = {at: size for at, size in sizes.items() if type(size).observe is not SizeRule.observe}
        self.budgets = BudgetTracker(recipe.budget)
        self.flight = Flight(len(recipe.stages))
        self.drawn: list[tuple[Drawn, int]] = []
        self.kl_sum = 0.0
        self.kept: dict[int, Row] = {}
        self.replayed = 0
        self.cancel: list[int] = []
        self.release: list[int] = []
        self.batch: Batch | None = None
        self.finished: str | None = None
        self.next_group = self.next_rollout = 0
        self.accounts: dict[str, int] = dict.fromkeys(CAUSES[:-1], 0)
        self.teaching, self.selection = Teaching(), Selection()
        self.barren = self.failing = 0
        self.asked_in_vain = self.settled = False
        self.on_close: Callable[[int, str], None] | None = None
        self._view: View | None = None
        self.stops_from_S = tuple(
            inf if stage.stop is None else _least_scored(stage.stop, self.view()) for stage in recipe.stages
        )
        # `self.view()` above was made for the stop rules. Without this, a saved state that is loaded into this run
        # would be seen through a view of an empty run.
        self.changed()

    def changed(self, *, settled: bool = False) -> None:
        """Invalidate the cached view and, unless `settled`, the last decision. Call this after a change that affects them.

        Args:
            settled: whether the last decision still holds.
        """
        self._view, self.settled = None, settled

    def view(self) -> View:
        """The run as rules see it. The `View` is rebuilt only after a change."""
        view = self._view
        if view is None:
            recipe, flight, budgets = self.recipe, self.flight, self.budgets
            held_S = tuple(map(len, flight.waiting_S))
            view = self._view = View(  # without keywords, which take half of the time; in the order of the fields
                self.version,
                self.pool.epoch,
                max(0, recipe.groups - held_S[-1]),
                held_S,
                tuple(flight.running_S),
                # As of the last change: orders and results without a verdict do not renew the view, which would cost
                # time at every event. The only rule that reads this number (`EveryRound`) asks whether a round is
                # over, and the last event of a round brings a verdict, which is a change.
                len(flight.owner),
                # With what is owed, so that handing out orders does not change it.
                budgets.paid + budgets.owed,
                budgets.room() if budgets.limited else None,
                self.statistics,
                self.table,
                self.kl_sum,
                recipe.groups,
                recipe.max_staleness,
                recipe.group_rows,
                self.memory,
            )
        return view

    def need(self) -> int:
        """Groups that the next batch still lacks."""
        return max(0, self.recipe.groups - len(self.flight.ready))

    def blocked(self) -> bool:
        """Whether every new rollout would be too old to train on, because no staleness is allowed and an update is due."""
        return self.batch is not None and self.recipe.max_staleness == 0

    def idle(self) -> bool:
        """Whether no rollout is running, all decided rollouts have been ordered, and the driver owes no event."""
        # Without `stopped`, a run could end before the last stopped rollout has, and nobody would account for it (law 2).
        return not (self.flight.owner or self.flight.stopped or self.budgets.owed or self.batch)

    def fresh(self, groups: Iterable[Group], updates: int) -> list[Group]:
        """The groups that are not too old after this many updates, sorted by id. Each must have a scored rollout."""
        oldest = self.version + updates - self.recipe.max_staleness
        # Sorted, because the order in which groups begin to wait depends on which rollouts end first.
        return sorted([group for group in groups if group.first_version >= oldest], key=_id)  # pyright: ignore

    def stale(self, group: Group) -> bool:
        """Whether the group is too old to train on."""
        first = group.first_version
        return first is not None and self.version - first > self.recipe.max_staleness


_id = attrgetter("id")


def _least_scored(rule: StopRule, view: View) -> int:
    """Number of scored rollouts that a group needs before the stop rule is asked."""
    scored = rule.least_scored(view)
    at_least(f"{rule!r}: least_scored(view)", scored, 0)
    return scored


def _checked_memory(rule: Rule, memory: Any) -> Memory:
    if not isinstance(memory, dict):
        raise TypeError(
            f"{rule!r} must keep its memory in a dict of arrays and plain data, which a checkpoint can hold, got "
            f"{type(memory).__name__}"
        )
    return cast("Memory", memory)
