"""The state of a run: what the rooms of the core share. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from operator import attrgetter
from typing import Any, cast

from rollalloc.core.budget_tracker import BudgetTracker
from rollalloc.core.events import Batch, Row
from rollalloc.core.flight import Flight
from rollalloc.core.group import Group
from rollalloc.core.latency import Curve
from rollalloc.core.prompt_pool import PromptPool
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import CAUSES, Drawn, Memory, OfferedPromptRule, StopRule, View
from rollalloc.core.selection import Selection
from rollalloc.core.statistics import PromptStatistics
from rollalloc.core.table import PromptTable
from rollalloc.core.teaching import Teaching


class Run:
    """Everything an allocator knows; a function of the recipe, the seed and the events told so far.

    Attributes:
        loader: the prompt rule where a framework's own loader feeds it, else None.
        reads_rate: whether a rule takes the metric for a success rate.
        patient_S: whether the judge of stage s is asked only when nothing of a group is to come.
        longest: rows of a group that are trained on for being the longest, at most.
        stops_from_S: scored rollouts of a group from which on the stop rule of stage s is asked; infinite without one.
        drawn: prompts drawn for which no budget had room yet, and the epoch of each.
        kl_sum: how far `Updated` told that the weights went, in all.
        latency: how fast it last told that the engine decodes.
        kept: rows trained that may be replayed, by rollout; those of the batch handed out are not among them yet.
        replayed: rows trained on again, in all.
        cancel: rollouts to stop, not handed out yet.
        release: payloads that may be freed, not handed out yet.
        batch: handed out, not yet followed by `Updated`.
        finished: why the run is over.
        accounts: rollouts that are over, by cause.
        teaching: whether the last of them still taught.
        selection: what is trained on beside what was sampled, since the last update.
        barren: candidates dropped since a group last became ready.
        failing: groups that ended without a score, because rollouts failed, since a rollout last had one.
        settled: nothing changed since the last decision, which need not be taken again.
    """

    def __init__(self, recipe: Recipe, table: PromptTable, seed: int) -> None:
        self.recipe, self.table, self.seed = recipe, table, seed
        self.loader = recipe.prompts if isinstance(recipe.prompts, OfferedPromptRule) else None
        self.reads_rate = bool(recipe.rate_readers)
        self.patient_S = tuple(stage.judge.traits.waits_for_all for stage in recipe.stages)
        self.longest = recipe.rows.traits.longest
        self.version = 0
        recent = any(stage.judge.traits.reads_recent for stage in recipe.stages)
        self.statistics = PromptStatistics(len(table), recent=recent)
        self.pool = PromptPool(len(table))
        self.memory = _checked_memory(recipe, recipe.prompts.init(table))
        self.budgets = BudgetTracker(recipe.budget)
        self.flight = Flight(len(recipe.stages))
        self.drawn: list[tuple[Drawn, int]] = []
        self.kl_sum = 0.0
        self.latency: Curve | None = None
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
        self.settled = False
        self._view: View | None = None
        self.stops_from_S = tuple(
            inf if stage.stop is None else _least_scored(stage.stop, self.view()) for stage in recipe.stages
        )
        self.changed()

    def changed(self, *, settled: bool = False) -> None:
        """Something changed that rules may see, and that a decision may depend on; every cache of a run ends here.

        Args:
            settled: whether the last decision holds all the same.
        """
        self._view, self.settled = None, settled

    def view(self) -> View:
        """What rules may know about the run; made anew only after a change."""
        view = self._view
        if view is None:
            view = self._view = View(
                version=self.version,
                epoch=self.pool.epoch,
                need=self.need(),
                held_S=tuple(map(len, self.flight.waiting_S)),
                running_S=tuple(self.flight.running_S),
                in_flight=len(self.flight.owner),
                paid=self.budgets.paid + self.budgets.owed,
                left=self.budgets.room(),
                statistics=self.statistics,
                table=self.table,
                kl_sum=self.kl_sum,
                latency=self.latency,
                groups=self.recipe.groups,
                max_staleness=self.recipe.max_staleness,
                rows=self.recipe.group_rows,
                longest=self.longest,
                row_rule=self.recipe.rows,
                memory=self.memory,
            )
        return view

    def need(self) -> int:
        """Groups still lacking for the next batch."""
        return max(0, self.recipe.groups - len(self.flight.ready))

    def blocked(self) -> bool:
        """Whether a new rollout could only be too old: its batch comes after the update that is awaited."""
        return self.batch is not None and self.recipe.max_staleness == 0

    def idle(self) -> bool:
        """Whether nothing is running, owed to the driver or awaited from it."""
        return not (self.flight.owner or self.flight.stopped or self.budgets.owed or self.batch)

    def fresh(self, groups: Iterable[Group], updates: int = 0) -> list[Group]:
        """Those that are not stale, in order of id; each has a scored rollout."""
        oldest = self.version + updates - self.recipe.max_staleness
        return sorted([group for group in groups if group.first_version >= oldest], key=_id)  # pyright: ignore

    def stale(self, group: Group, updates: int = 0) -> bool:
        """Whether it is too old to train on, or will be after so many more updates."""
        first = group.first_version
        return first is not None and self.version + updates - first > self.recipe.max_staleness


_id = attrgetter("id")


def _least_scored(rule: StopRule, view: View) -> int:
    """Scored rollouts of a group from which on a stop rule is asked.

    Raises:
        ValueError: it answers with no whole number of 0 or more.
    """
    scored = rule.least_scored(view)
    at_least(f"{rule!r}: least_scored(view)", scored, 0)
    return scored


def _checked_memory(recipe: Recipe, memory: Any) -> Memory:
    if not isinstance(memory, dict):
        raise TypeError(
            f"{recipe.prompts!r} must keep its memory in a dict of arrays and plain data, which a checkpoint can hold, got "
            f"{type(memory).__name__}"
        )
    return cast("Memory", memory)
