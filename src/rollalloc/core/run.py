"""The state of a run, which the modules of the core share.

`BudgetTracker` counts what was spent, and says how much the budgets still allow. `Flight` has the groups that are not over.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from operator import attrgetter
from typing import Any, cast

from rollalloc.core.events import Batch, Row
from rollalloc.core.group import FOLLOWING, OVER, Group, Phase
from rollalloc.core.packing import exact_keys, natural
from rollalloc.core.prompts import PromptPool, PromptStatistics, PromptTable
from rollalloc.core.recipe import Budget, Recipe, at_least
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
from rollalloc.core.teaching import Selection, Teaching


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


_DRAWN, _RUNNING, _READY = Phase.DRAWN, Phase.RUNNING, Phase.READY  # attribute lookup on an Enum is slow


class Flight:
    """All groups between the draw of their prompt and their end.

    Attributes:
        groups: the groups, by id.
        owner: maps each rollout that was ordered and has not ended to its group.
        stopped: maps each cancelled rollout that has not ended to its group. The group itself may be over.
        waiting_S: groups that passed stage s and wait, by id. The last entry has the groups that are ready for a
            batch.
        running_S: number of groups in stage s.
        owing_S: groups with rollouts of stage s that are decided but not ordered yet, as a queue in the order in which the
            groups entered the stage. A group without such rollouts is removed when it reaches the front.
        touched: groups that changed since the stop rule was last asked about them.
    """

    def __init__(self, stages: int) -> None:
        self.groups: dict[int, Group] = {}
        self.owner: dict[int, Group] = {}
        self.stopped: dict[int, Group] = {}
        self.waiting_S: list[dict[int, Group]] = [{} for _ in range(stages)]
        self.running_S = [0] * stages
        self.owing_S: list[deque[Group]] = [deque() for _ in range(stages)]
        self.touched: dict[int, Group] = {}

    @property
    def ready(self) -> dict[int, Group]:
        """Groups that wait for a batch, by id."""
        return self.waiting_S[-1]

    def move(self, group: Group, phase: Phase, stage: int | None = None) -> None:
        """Move a group to another phase; `stage` is the stage that it enters.

        Raises:
            RuntimeError: the transition is not legal, which is a bug in the core.
        """
        if phase not in FOLLOWING[group.phase]:
            raise RuntimeError(f"group {group.id} cannot go from {group.phase.value} to {phase.value}")
        self._leave(group)
        group.phase = phase
        if stage is not None:
            group.stage = stage
        self._enter(group)

    def _leave(self, group: Group) -> None:
        if group.phase is _RUNNING:
            self.running_S[group.stage] -= 1
        # A group that is only drawn is in no index.
        elif group.phase is not _DRAWN:
            del self.waiting_S[self._passed(group)][group.id]

    def _enter(self, group: Group) -> None:
        if group.phase in OVER:
            del self.groups[group.id]
            self.touched.pop(group.id, None)
        elif group.phase is _RUNNING:
            self.groups[group.id] = group
            self.running_S[group.stage] += 1
        else:
            self.waiting_S[self._passed(group)][group.id] = group

    def _passed(self, group: Group) -> int:
        """The index in `waiting_S` for this group. A ready group has the last index, even if it skipped stages."""
        return -1 if group.phase is _READY else group.stage

    def waiting(self) -> list[Group]:
        """All groups that wait, ready or not, sorted by stage and id."""
        return [waiting[group] for waiting in self.waiting_S for group in sorted(waiting)]

    def trailing(self) -> list[Group]:
        """Groups that are over, but have cancelled rollouts without a terminal event; sorted by id."""
        over = {group.id: group for group in self.stopped.values() if group.phase in OVER}
        return [over[group] for group in sorted(over)]

    def restore(self, groups: Iterable[Group]) -> None:
        """Add saved groups to all tables, except `stopped` and `touched`."""
        for group in groups:
            self.groups[group.id] = group
            self.owner.update(dict.fromkeys(group.running, group))
            self._enter(group)
            for stage in sorted({group.stage_of(rollout) for rollout in group.owed}):
                self.owing_S[stage].append(group)
        for stage, owing in enumerate(self.owing_S):
            # By the first id that the stage ordered, because ids rise in the order in which groups entered.
            self.owing_S[stage] = deque(sorted(owing, key=lambda group, at=stage: group.spans[at]))


class Run:
    """The state of an allocator. It depends only on the recipe, the prompts, the seed and the events so far.

    Attributes:
        loader: the prompt rule, if its prompts come from a framework's own data loader; else None.
        reads_rate: whether a rule reads the metric as a success rate.
        patient_S: whether the core asks the judge of stage s only about complete groups.
        size_memory: memory of the size rule of each stage, by the stage's index as text.
        learns: whether the prompt rule learns from visits, so that it must be told of each.
        prepares: whether the prompt rule prepares its draws, so that each batch makes `unprepared` true.
        unprepared: whether a batch was handed out, and the prompt rule has not prepared the next draws since.
        learning_S: the stages whose size rules learn from visits, by the stage's index as text.
        stops_from_S: number of scored rollouts that a group needs before the stop rule of stage s is asked; infinite if
            there is no stop rule.
        drawn: prompts that were drawn, with their epochs, but have no group because the budgets had no room.
        kl_sum: sum of `Updated.approx_kl` so far.
        right_lengths: id and tokens of the newest right rollouts of groups without a limit, sorted by id; empty if the
            recipe has no limit.
        kept: rows that may be replayed, by rollout. The rows of a batch are added when its `Updated` arrives.
        replayed: number of rows trained on again, summed over all batches.
        left_out: number of rows that were to be trained on again and that the gate left out, summed over all batches.
        shut: number of batches in a row whose replayed rows the gate left out.
        replay_from: the first version whose batch may have replayed rows.
        unmeasured: whether the batch was made with replayed rows behind a gate, and `Moved` has not arrived yet. Not saved:
            whether `Moved` is still to be told after a load, the driver knows.
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
        self.prepares = type(recipe.prompts).prepare is not PromptRule.prepare
        sizes = {str(at): stage.size for at, stage in enumerate(recipe.stages)}
        self.learning_S = {at: size for at, size in sizes.items() if type(size).observe is not SizeRule.observe}
        self.budgets = BudgetTracker(recipe.budget)
        self.flight = Flight(len(recipe.stages))
        self.drawn: list[tuple[Drawn, int]] = []
        self.kl_sum = 0.0
        self.right_lengths: list[tuple[int, int]] = []
        self.kept: dict[int, Row] = {}
        self.replayed = self.left_out = self.shut = self.replay_from = 0
        self.cancel: list[int] = []
        self.release: list[int] = []
        self.batch: Batch | None = None
        self.finished: str | None = None
        self.next_group = self.next_rollout = 0
        self.accounts: dict[str, int] = dict.fromkeys(CAUSES[:-1], 0)
        self.teaching, self.selection = Teaching(), Selection()
        self.barren = self.failing = 0
        self.asked_in_vain = self.settled = self.unprepared = self.unmeasured = False
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

    @property
    def limit(self) -> int | None:
        """Maximum tokens of a rollout, by what is known now; None if the recipe has no limit or too little is known."""
        rule = self.recipe.limit
        return None if rule is None else rule.of([tokens for _, tokens in self.right_lengths])

    def learn_limit(self, group: Group, rollout: int, tokens: int) -> None:
        """Take the length of a right rollout into account, if the recipe has a limit and the group has none."""
        if self.recipe.limit is not None and group.limit is None:
            # By id and not as they end, so that the limit does not depend on which rollout of a batch ended first.
            insort(self.right_lengths, (rollout, tokens))
            del self.right_lengths[: -self.recipe.limit.last]

    def limit_of(self, group: int) -> int | None:
        """Maximum tokens of the rollouts of a new group; None if it has no limit."""
        rule = self.recipe.limit
        # By the group's number, so that the groups of a batch mostly have the same: the batch takes as long as the
        # longest.
        if rule is None or group // self.recipe.groups % rule.every == 0:
            return None
        return self.limit

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
