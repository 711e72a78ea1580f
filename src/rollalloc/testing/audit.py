"""The auditor records all events and answers, and checks them without using the core's own state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollalloc.core.events import Actions, Batch, Cancelled, Done, Event, Failed, Moved, Order, Row, Updated
from rollalloc.core.recipe import LEAST_RIGHT, RIGHT, Recipe
from rollalloc.core.rule import Act, Verdict


class ConformanceError(AssertionError):
    """A law was broken."""


def expect(law: int, kept: bool, otherwise: str) -> None:
    """Raise a ConformanceError if a law was broken."""
    if not kept:
        raise ConformanceError(f"law {law}: {otherwise}")


@dataclass
class Auditor:
    """Records and checks all events and answers of one run.

    Attributes:
        recipe: the recipe of the run.
        verdicts: the last verdict on each group, by its id, from the watched judges.
    """

    recipe: Recipe
    verdicts: Mapping[int, Verdict]
    order_of: dict[int, Order] = field(default_factory=dict[int, Order])
    live: set[int] = field(default_factory=set[int])
    done: dict[int, Done] = field(default_factory=dict[int, Done])
    failed: set[int] = field(default_factory=set[int])
    # Rollouts without a usable result: they failed, were cancelled, or ended after the decision to stop them.
    wasted: set[int] = field(default_factory=set[int])
    cancelled: set[int] = field(default_factory=set[int])
    released: set[int] = field(default_factory=set[int])
    trained: set[int] = field(default_factory=set[int])
    row_of: dict[int, Row] = field(default_factory=dict[int, Row])  # the last row of each trained rollout
    masked: set[int] = field(default_factory=set[int])  # rollouts that the trainer's loss left out
    replayed: int = 0
    left_out: int = 0
    replay_from: int = 0  # the first version whose batch may have replayed rows
    trained_groups: set[int] = field(default_factory=set[int])
    in_batch: set[int] = field(default_factory=set[int])
    too_old: set[int] = field(default_factory=set[int])  # groups that became too old with an update
    due: set[int] = field(default_factory=set[int])  # rows that were trained on and are not released yet
    tokens: int = 0
    right_lengths: list[int] = field(default_factory=list[int])  # tokens of right rollouts of groups without a limit
    version: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])
    groups: dict[int, list[int]] = field(default_factory=lambda: defaultdict[int, list[int]](list))
    visits: dict[int, list[int]] = field(default_factory=lambda: defaultdict[int, list[int]](list))  # groups by prompt

    def told(self, event: Event) -> None:
        """Record an event. Call this before the allocator receives the event."""
        match event:
            case Done() | Failed() | Cancelled():
                self.live.discard(event.rollout)
                self.tokens += event.tokens
                if isinstance(event, Done) and not self._stopped(event.rollout):
                    self.done[event.rollout] = event
                    if event.metric >= RIGHT and self.order_of[event.rollout].limit is None:
                        self.right_lengths.append(event.tokens)
                else:
                    self.wasted.add(event.rollout)
                    if isinstance(event, Failed) and event.rollout not in self.cancelled:
                        self.failed.add(event.rollout)
                    self.causes["failed" if isinstance(event, Failed) else "cancelled"] += 1
            case Updated():
                self.version = event.version
                self.masked.update(event.masked)
                self.due, self.in_batch = self.due | self.in_batch, set()
                self.too_old.update(group for group in self.groups if self._is_stale(group))
            case Moved() if self.recipe.gate is not None and event.share > self.recipe.gate.most:
                self._leave_out(self.recipe.gate.pause)
            case _:
                pass

    def _leave_out(self, pause: int) -> None:
        """The batch is trained without its replayed rows, which may come back after the pause."""
        again = [self.row_of[rollout] for rollout in self.in_batch if self.row_of[rollout].replays]
        self.row_of.update((row.rollout, row._replace(replays=row.replays - 1)) for row in again)
        self.in_batch -= {row.rollout for row in again}
        self.due |= {row.rollout for row in again}
        self.replayed -= len(again)
        self.left_out += len(again)
        self.replay_from = self.version + 1 + pause

    def _stopped(self, rollout: int) -> bool:
        """Whether a result is no longer needed: its rollout was cancelled, or its group is over or ready for a batch."""
        group = self.order_of[rollout].group
        verdict = self.verdicts.get(group)
        over = verdict is not None and verdict.act is not Act.NEXT
        return over or rollout in self.cancelled or group in self.too_old

    def _is_stale(self, group: int) -> bool:
        versions = [self.done[rollout].version for rollout in self.groups[group] if rollout in self.done]
        return bool(versions) and self.version - min(versions) > self.recipe.max_staleness

    def answered(self, actions: Actions, capacity: int | None) -> None:
        """Check and record an answer."""
        self._orders(actions.generate, capacity)
        for rollout in actions.cancel:
            expect(1, rollout in self.live, f"cancel names rollout {rollout}, which is not running")
            expect(1, rollout not in self.cancelled, f"rollout {rollout} is cancelled twice")
            self.cancelled.add(rollout)
        if actions.batch:
            self._batch(actions.batch)
        round_ends = bool(actions.finished) or (actions.batch is not None and self.recipe.max_staleness == 0)
        for rollout in actions.release:
            expect(5, rollout in self.order_of and rollout not in self.live, f"{rollout} is released while it runs")
            expect(5, rollout not in self.released, f"{rollout} is released twice")
            expect(5, rollout not in self.in_batch, f"{rollout} is released before its batch was trained")
            self.released.add(rollout)
            if rollout in self.done and rollout not in self.trained:
                self.causes[self._why_not_trained(rollout, round_ends)] += 1
        late = {rollout for rollout in self.due - self.released if not self._may_return(rollout)}
        expect(5, not late, "the update does not release the rows of its batch, although they cannot be replayed")
        self.due -= self.released
        if actions.finished and actions.batch is None:
            expect(5, not self.due, "rows are kept for replay after the end of the run")
        if actions.finished:
            held = set(self.order_of) - self.released - self.in_batch - self.due
            expect(2, not held or actions.batch is not None, f"the run is finished but {len(held)} rollouts are lost")

    def _may_return(self, rollout: int) -> bool:
        """Whether a row that was trained on may be replayed."""
        replay, row = self.recipe.replay, self.row_of[rollout]
        if replay is None or rollout in self.masked or self.version - row.version > replay.max_staleness:
            return False
        return (replay.times is None or row.replays < replay.times) and row.advantage > replay.above

    def _replay(self, row: Row, version: int) -> None:
        """Check law 12: a replayed row was trained on before, is unchanged, is not replayed too often and is not too old."""
        replay, last = self.recipe.replay, self.row_of.get(row.rollout)
        if replay is None or last is None:
            raise ConformanceError(f"law 12: rollout {row.rollout} is replayed, {last} was trained, replay is {replay}")
        expect(12, row == last._replace(replays=last.replays + 1), f"{row} is replayed, {last} was trained")
        expect(
            12,
            replay.times is None or row.replays <= replay.times,
            f"rollout {row.rollout} is replayed {row.replays} times",
        )
        age = version - row.version
        expect(12, age <= replay.max_staleness, f"rollout {row.rollout} is replayed with staleness {age}")
        expect(12, row.advantage > replay.above, f"{row} is replayed, its advantage is not above {replay.above}")
        expect(12, row.rollout not in self.released, f"rollout {row.rollout} was released before its replay")
        expect(12, row.rollout not in self.masked, f"rollout {row.rollout} is replayed, but the loss has left it out")

    def _why_not_trained(self, rollout: int, round_ends: bool) -> str:
        """The reason why a result was not trained on. Raise an error if no allowed reason holds."""
        group = self.order_of[rollout].group
        verdict = self.verdicts.get(group)
        if group in self.trained_groups:
            return "unselected"
        if verdict is not None and verdict.act is Act.DROP:
            return verdict.cause
        if self._is_stale(group):
            return "stale"
        expect(2, round_ends, f"rollout {rollout} of group {group} is lost: not dropped, not stale, and no round ended")
        return "surplus"

    def _orders(self, orders: Sequence[Order], capacity: int | None) -> None:
        count = sum(len(order.rollouts) for order in orders)
        expect(4, capacity is None or count <= capacity, f"{count} rollouts ordered with room for {capacity}")
        for order in orders:
            expect(4, bool(order.rollouts), "an order without rollouts")
            if order.group not in self.groups:
                expect(10, not self.always_failed(order.prompt), f"prompt {order.prompt} is drawn, but it always fails")
                self.visits[order.prompt].append(order.group)
                self._limit(order)
            else:
                first = self.order_of[self.groups[order.group][0]]
                expect(13, order.limit == first.limit, f"{order} has another limit than {first}")
            for rollout in order.rollouts:
                expect(4, rollout not in self.order_of, f"rollout {rollout} is ordered twice")
                self.order_of[rollout] = order
                self.live.add(rollout)
                self.groups[order.group].append(rollout)

    def _limit(self, order: Order) -> None:
        """Check law 13 for the first order of a group."""
        rule, limit = self.recipe.limit, order.limit
        if limit is None:
            return
        expect(13, rule is not None, f"{order} has a limit, and the recipe has none")
        turn = order.group // self.recipe.groups
        expect(13, rule is None or turn % rule.every != 0, f"{order} has a limit, although its turn has none")
        # When the group was opened is not known here: a limit of any earlier moment will do.
        known = limit in self.right_lengths and len(self.right_lengths) >= LEAST_RIGHT
        expect(13, known, f"{order}: {limit} is not the length of a known right rollout without a limit")

    def _batch(self, batch: Batch) -> None:
        expect(2, not self.in_batch, "a second batch is returned before the first was trained")
        expect(2, batch.version == self.version, f"a batch has version {batch.version}, the weights {self.version}")
        by_group: dict[int, list[Row]] = defaultdict(list)
        again = [row for row in batch.rows if row.replays]
        expect(12, [*batch.rows[len(batch.rows) - len(again) :]] == again, "rows that are replayed do not come last")
        for row in again:
            self._replay(row, batch.version)
        expect(12, not again or len(again) <= self.recipe.replay.rows, f"{len(again)} rows replayed")  # pyright: ignore
        expect(12, not again or batch.version >= self.replay_from, f"{len(again)} rows replayed in a pause of the gate")
        self.replayed += len(again)
        for row in batch.rows:
            self.row_of[row.rollout] = row
            self.due.discard(row.rollout)
            if row.replays:
                continue
            expect(2, row.rollout in self.done, f"row {row.rollout} has no result")
            expect(2, row.rollout not in self.trained, f"rollout {row.rollout} is trained twice")
            expect(2, row.rollout not in self.released, f"row {row.rollout} was released before")
            order, done = self.order_of[row.rollout], self.done[row.rollout]
            expect(
                2,
                (row.group, row.prompt) == (order.group, order.prompt),
                f"row {row.rollout} has another group or prompt",
            )
            expect(2, row.version == done.version, f"row {row.rollout} has version {row.version}, not {done.version}")
            age = batch.version - done.version
            expect(2, age <= self.recipe.max_staleness, f"row {row.rollout} has staleness {age}")
            self.trained.add(row.rollout)
            by_group[row.group].append(row)
        full = len(by_group) == self.recipe.groups
        expect(2, full == (batch.short_because is None), f"{len(by_group)} groups, {batch.short_because}")
        for group, group_rows in by_group.items():
            some = any(row.advantage for row in group_rows)
            self.causes["trained" if some else "zero_variance"] += len(group_rows)
            self.trained_groups.add(group)
        self.in_batch = {row.rollout for row in batch.rows}

    def accounts(self, accounts: Mapping[str, int]) -> None:
        """Compare the allocator's accounts with these records."""
        expect(8, sum(accounts.values()) == len(self.order_of), f"{accounts} do not sum to {len(self.order_of)}")
        told, booked = Counter(accounts), self.causes.copy()
        # If a result makes its own group too old, the core counts it as cancelled, and this class counts it as stale.
        for books in (told, booked):
            books["stale or cancelled"] = books.pop("stale", 0) + books.pop("cancelled", 0)
        for cause in told.keys() - {"open"}:
            expect(8, told[cause] == booked[cause], f"accounts of {cause}: {told[cause]}, expected {booked[cause]}")
        expect(8, accounts["open"] >= len(self.live), "open rollouts are missing")

    def always_failed(self, prompt: int) -> bool:
        """Whether the recipe must no longer draw the prompt, because rollouts failed in too many visits in a row."""
        limit, visits = self.recipe.quarantine_after, self.visits[prompt]
        if limit is None or len(visits) < limit:
            return False
        rollouts = [self.groups[group] for group in visits[-limit:]]
        return all(self.failed.intersection(ids) and self.done.keys().isdisjoint(ids) for ids in rollouts)
