"""The conformance kit: puts a recipe, or an allocator, through the laws of docs/design.md.

    from rollalloc.testing import check_recipe

    check_recipe(my_recipe)   # returns quietly, or raises ConformanceError naming the law, the seed and the mode

A simulated world answers every order: prompts of all difficulties, failures, spontaneous cancellations, results that come
after their cancellation, a trainer that takes its time, completion in random order, capacities down to one rollout. An
auditor that shares no code with the core keeps its own books of what was told and answered. `mutants` breaks the laws on
purpose, one at a time: a kit that passes one of them is broken itself.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import combinations
from typing import Any

import numpy as np

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import (
    Actions,
    Batch,
    Cancelled,
    Done,
    Event,
    Failed,
    Offered,
    Order,
    Progress,
    Row,
    Updated,
)
from rollalloc.core.recipe import Act, Budget, OfferedPromptRule, Recipe, Verdict, View
from rollalloc.rules import judges, prompts, rows, sizes


class ConformanceError(AssertionError):
    """A law was broken."""


def check_recipe(
    recipe: Recipe,
    *,
    prompts: int | None = None,
    seeds: Sequence[int] = (0, 1),
    batches: int = 6,
    allocator: type[Allocator] = Allocator,
    like: Recipe | None = None,
) -> None:
    """Put a recipe through every law, in synchronous and asynchronous runs, with and without trouble.

    Args:
        recipe: the recipe.
        prompts: size of the simulated data set; eight times what the first ask opens, by default.
        seeds: of the runs; each must be 0 or more.
        batches: to train in each run, at least 2.
        allocator: a driver's own subclass, or a broken one.
        like: the recipe whose promises the batches must keep; the recipe itself by default.

    Raises:
        ConformanceError: names the law, the seed and the mode.
    """
    first = sum(1 for _ in _first_orders(recipe))
    count = prompts or 8 * max(first, recipe.groups)
    paid_a_batch = _check_runs(recipe, count, seeds, batches, allocator, like or recipe)
    _check_back_pressure(recipe, count, seeds[0], batches, allocator, first)
    _check_budgets(recipe, count, seeds[0], allocator, paid_a_batch)
    _check_quarantine(recipe, 2 * max(first, recipe.groups), seeds[0], allocator)


def trace(recipe: Recipe, prompts: int, seed: int, batches: int = 4) -> str:
    """Digest of everything a troubled asynchronous run was told to do; equal in every process and under any hash seed."""
    run = _Run(Allocator(recipe, prompts, seed), World(seed), recipe)
    digest = blake2b(digest_size=16)
    for actions in run.asynchronous(batches, trouble=0.05):
        digest.update(repr(actions).encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------- the world


@dataclass(frozen=True)
class World:
    """What a rollout comes to, as a pure function of (seed, prompt, rollout).

    Attributes:
        seed: of the world.
        hard: every reward differs within a group as far as it can: prompts of success rate 1/2.
        limit: length in tokens at which a rollout is truncated.
        failing: every so-manyth prompt never gets a score; 0: none.
    """

    seed: int
    hard: bool = False
    limit: int = 300
    failing: int = 0

    def end(self, rollout: int, prompt: int, version: int, last_version: int) -> Done | Failed:
        if self.failing and prompt % self.failing == 0:
            return Failed(rollout, "simulated", 3)
        rate_draw = np.random.default_rng([self.seed, 1, prompt])
        rate = 0.5 if self.hard else float(rate_draw.choice([0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]))
        draw = np.random.default_rng([self.seed, 2, rollout])
        metric = float(draw.random() < rate)
        tokens = min(int(draw.geometric(0.01)), self.limit)
        reward = metric - 0.1 * (tokens == self.limit)
        return Done(rollout, reward, metric, tokens, version, last_version, truncated=tokens == self.limit)


# ----------------------------------------------------------------------------------------------------------- the auditor


@dataclass
class _Auditor:
    """Books of everything told and answered, kept without the core's help."""

    recipe: Recipe
    order_of: dict[int, Order] = field(default_factory=dict[int, Order])
    live: set[int] = field(default_factory=set[int])
    done: dict[int, Done] = field(default_factory=dict[int, Done])
    failed: set[int] = field(default_factory=set[int])
    wasted: set[int] = field(default_factory=set[int])  # failed, cancelled, or done after the cancellation
    cancelled: set[int] = field(default_factory=set[int])
    released: set[int] = field(default_factory=set[int])
    trained: set[int] = field(default_factory=set[int])
    in_batch: set[int] = field(default_factory=set[int])
    due: set[int] = field(default_factory=set[int])  # rows whose update was told: to be released by the next answer
    tokens: int = 0
    version: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])
    groups: dict[int, list[int]] = field(default_factory=lambda: defaultdict[int, list[int]](list))
    visits: dict[int, list[int]] = field(default_factory=lambda: defaultdict[int, list[int]](list))  # groups by prompt

    def told(self, event: Event) -> None:
        match event:
            case Done() | Failed() | Cancelled():
                self.live.discard(event.rollout)
                self.tokens += event.tokens
                if isinstance(event, Done) and event.rollout not in self.cancelled:
                    self.done[event.rollout] = event
                else:
                    self.wasted.add(event.rollout)
                    if isinstance(event, Failed) and event.rollout not in self.cancelled:
                        self.failed.add(event.rollout)
                    self.causes["failed" if isinstance(event, Failed) else "cancelled"] += 1
            case Updated():
                self.version = event.version
                self.due, self.in_batch = self.in_batch, set()
            case _:
                pass

    def answered(self, actions: Actions, capacity: int | None) -> None:
        self._orders(actions.generate, capacity)
        for rollout in actions.cancel:
            expect(1, rollout in self.live, f"cancel names rollout {rollout}, which is not running")
            expect(1, rollout not in self.cancelled, f"rollout {rollout} is cancelled twice")
            self.cancelled.add(rollout)
        if actions.batch:
            self._batch(actions.batch)
        for rollout in actions.release:
            expect(5, rollout in self.order_of and rollout not in self.live, f"{rollout} is released while it runs")
            expect(5, rollout not in self.released, f"{rollout} is released twice")
            expect(5, rollout not in self.in_batch, f"{rollout} is released before its batch was trained")
            self.released.add(rollout)
        expect(5, self.due <= self.released, "rows of a trained batch are not released after the update")
        self.due = set()
        if actions.finished:
            held = set(self.order_of) - self.released - self.in_batch
            expect(2, not held or actions.batch is not None, f"the run is finished but {len(held)} rollouts are lost")

    def _orders(self, orders: Sequence[Order], capacity: int | None) -> None:
        count = sum(len(order.rollouts) for order in orders)
        expect(4, capacity is None or count <= capacity, f"{count} rollouts ordered with room for {capacity}")
        for order in orders:
            expect(4, bool(order.rollouts), "an order without rollouts")
            if order.group not in self.groups:
                expect(10, not self.always_failed(order.prompt), f"prompt {order.prompt} is drawn, which always fails")
                self.visits[order.prompt].append(order.group)
            for rollout in order.rollouts:
                expect(4, rollout not in self.order_of, f"rollout {rollout} is ordered twice")
                self.order_of[rollout] = order
                self.live.add(rollout)
                self.groups[order.group].append(rollout)

    def _batch(self, batch: Batch) -> None:
        expect(2, not self.in_batch, "a second batch before the first was trained")
        expect(2, batch.version == self.version, f"a batch of version {batch.version} at version {self.version}")
        by_group: dict[int, list[Row]] = defaultdict(list)
        for row in batch.rows:
            expect(2, row.rollout in self.done, f"row {row.rollout} has no result")
            expect(2, row.rollout not in self.trained, f"rollout {row.rollout} is trained twice")
            expect(2, row.rollout not in self.released, f"row {row.rollout} was released before")
            order, done = self.order_of[row.rollout], self.done[row.rollout]
            expect(2, (row.group, row.prompt) == (order.group, order.prompt), f"row {row.rollout} is booked elsewhere")
            expect(2, row.version == done.version, f"row {row.rollout} carries version {row.version}")
            age = batch.version - done.version
            expect(2, age <= self.recipe.max_staleness, f"row {row.rollout} has staleness {age}")
            self.trained.add(row.rollout)
            by_group[row.group].append(row)
        full = len(by_group) == self.recipe.groups
        expect(2, full == (batch.short_because is None), f"{len(by_group)} groups, short because {batch.short_because}")
        for group, group_rows in by_group.items():
            some = any(row.advantage for row in group_rows)
            self.causes["trained" if some else "zero_variance"] += len(group_rows)
            rest = [r for r in self.groups[group] if r in self.done and r not in self.trained]
            self.causes["unselected"] += len(rest)
        self.in_batch = {row.rollout for row in batch.rows}

    def accounts(self, accounts: dict[str, int]) -> None:
        expect(8, sum(accounts.values()) == len(self.order_of), f"{accounts} do not sum to {len(self.order_of)}")
        for cause in ("trained", "failed"):
            expect(8, accounts[cause] == self.causes[cause], f"{cause}: {accounts[cause]}, really {self.causes[cause]}")
        # A result may come between the decision to stop its rollout, which is not visible here, and its `cancel`: then it
        # is booked as cancelled, and looks unselected, or merely done, from outside.
        expect(8, accounts["cancelled"] >= self.causes["cancelled"], "cancelled rollouts are missing")
        expect(8, accounts["unselected"] <= self.causes["unselected"], "more rollouts are unselected than there are")
        stopped = accounts["cancelled"] + accounts["unselected"]
        expect(8, stopped >= self.causes["cancelled"] + self.causes["unselected"], "unselected rollouts are missing")
        expect(8, accounts["zero_variance"] >= self.causes["zero_variance"], "zero-variance rows are missing")
        expect(8, accounts["open"] >= len(self.live) >= 0, "open rollouts are missing")

    def always_failed(self, prompt: int) -> bool:
        """Whether as many visits in a row as the recipe allows gave no score because rollouts failed."""
        limit, visits = self.recipe.quarantine_after, self.visits[prompt]
        if limit is None or len(visits) < limit:
            return False
        rollouts = [self.groups[group] for group in visits[-limit:]]
        return all(self.failed.intersection(ids) and self.done.keys().isdisjoint(ids) for ids in rollouts)

    def metrics(self, group: int, stage: int | None = None) -> list[float]:
        """Metrics of a group's scored rollouts, all or of one stage."""
        return [
            self.done[rollout].metric
            for rollout in self.groups[group]
            if rollout in self.done and (stage is None or self.order_of[rollout].stage == stage)
        ]


def expect(law: int, kept: bool, otherwise: str) -> None:
    """Raise unless a law was kept.

    Raises:
        ConformanceError: it was not.
    """
    if not kept:
        raise ConformanceError(f"law {law}: {otherwise}")


# ---------------------------------------------------------------------------------------------------------------- a run


class _Run:
    """One simulated run under audit. With `reload`, a second allocator that is saved and loaded must answer alike."""

    def __init__(
        self, allocator: Allocator, world: World, promises: Recipe, reload: float = 0.0, seed: int = 0
    ) -> None:
        self.allocator, self.world, self.promises = allocator, world, promises
        self.audit = _Auditor(allocator.recipe)
        self.rng = np.random.default_rng([world.seed, 3, seed])
        self.reload = reload
        self.twin = self._copy(allocator) if reload else None
        self.running: dict[int, tuple[int, int]] = {}  # rollout -> prompt, version at its first token
        self.trouble = False
        self.finished: str | None = None
        self.offered = isinstance(allocator.recipe.prompts, OfferedPromptRule)
        self.next_offer = 0

    def synchronous(self, batches: int) -> Iterator[Actions]:
        """Waves: everything ordered ends before the next ask; no trouble."""
        while batches and not self.finished:
            actions = self.ask(None)
            yield actions
            batches -= actions.batch is not None
            events = [self.end(rollout) for rollout in list(self.running)]
            self.tell(events + [Updated(self.allocator.version + 1)] * (actions.batch is not None))

    def asynchronous(self, batches: int, trouble: float, slots: int = 24) -> Iterator[Actions]:
        """One or a few completions at a time, in random order, with failures, cancellations and a slow trainer."""
        self.trouble = trouble > 0
        training = False
        while batches and not self.finished:
            room = slots - len(self.running)
            actions = self.ask(int(self.rng.integers(0, room + 1)) if self.running and room > 0 else max(room, 0))
            yield actions
            training |= actions.batch is not None
            events = [self.terminal(trouble) for _ in range(min(len(self.running), int(self.rng.integers(1, 5))))]
            if self.running and self.rng.random() < 0.3:
                events.append(Progress(self.some(), int(self.rng.integers(1, 50))))
            if training and (self.rng.random() < 0.2 or not events):
                events.append(Updated(self.allocator.version + 1))
                training, batches = False, batches - 1
            elif not training and self.rng.random() < trouble / 4:
                events.append(Updated(self.allocator.version + 1))  # weights that changed without a batch of ours
            self.tell(events)

    def ask(self, capacity: int | None) -> Actions:
        while wanted := self.allocator.wanted():
            epoch, at = divmod(self.next_offer, len(self.allocator.table))
            offered = range(at, min(at + wanted, len(self.allocator.table)))
            self.next_offer += len(offered)
            self.tell([Offered(tuple(offered), epoch)])
        if self.twin is not None and self.rng.random() < self.reload:
            self.twin = self._copy(self.twin)
        actions = self.allocator.ask(capacity)
        if self.twin is not None:
            expect(6, self.twin.ask(capacity) == actions, "an allocator that was saved and loaded answers otherwise")
            self._check_outstanding(actions)
        self.audit.answered(actions, capacity)
        self.audit.accounts(self.allocator.accounts())
        if actions.batch:
            _keep_promises(self.promises, self.audit, actions.batch, trouble=self.trouble)
        for order in actions.generate:
            self.running |= dict.fromkeys(order.rollouts, (order.prompt, self.allocator.version))
        self.finished = actions.finished if actions.batch is None and not self.audit.in_batch else None
        return actions

    def tell(self, events: list[Event]) -> None:
        self.allocator.tell(events)
        if self.twin is not None:
            self.twin.tell(events)
        for event in events:
            self.audit.told(event)

    def terminal(self, trouble: float) -> Event:
        """The end of some running rollout: mostly its result, sometimes a failure or a cancellation."""
        rollout = self.some()
        named = rollout in self.audit.cancelled
        if self.rng.random() < (0.7 if named else trouble):
            del self.running[rollout]
            failed = self.rng.random() < 0.5
            return Failed(rollout, "simulated", 3) if failed else Cancelled(rollout, 5)
        return self.end(rollout)

    def end(self, rollout: int) -> Event:
        prompt, version = self.running.pop(rollout)
        return self.world.end(rollout, prompt, version, self.allocator.version)

    def some(self) -> int:
        return list(self.running)[int(self.rng.integers(len(self.running)))]

    def _copy(self, allocator: Allocator) -> Allocator:
        """The allocator after a passage through JSON."""
        copy = type(allocator)(allocator.recipe, allocator.table, allocator.seed)
        copy.load_state_dict(json.loads(json.dumps(allocator.state_dict())))
        return copy

    def _check_outstanding(self, actions: Actions) -> None:
        """What was handed out and is not over must be repeated after a load."""
        repeated = self._copy(self.allocator).outstanding()
        ordered = {rollout for order in repeated.generate for rollout in order.rollouts}
        now = {rollout for order in actions.generate for rollout in order.rollouts}
        stopped = (self.audit.cancelled & self.audit.live) | set(actions.cancel)
        expect(4, ordered == (self.audit.live | now) - stopped, "outstanding() does not repeat the orders in flight")
        expect(4, set(repeated.cancel) == stopped, "outstanding() does not repeat the cancellations")
        expect(4, actions.batch in (None, repeated.batch), "outstanding() does not repeat the batch")


# ------------------------------------------------------------------------------------------------------------- the checks


def _first_orders(recipe: Recipe) -> Iterator[Order]:
    """What a recipe orders first, on a data set that does not limit it."""
    run = _Run(Allocator(recipe, 4096 + recipe.groups, 0), World(0), recipe)
    yield from run.ask(None).generate


def _check_runs(
    recipe: Recipe, prompts: int, seeds: Sequence[int], batches: int, allocator: type[Allocator], promises: Recipe
) -> int:
    """Audit whole runs; returns the rollouts paid for a batch, on average."""
    paid: list[int] = []
    for seed in seeds:
        for mode, trouble, reload in (
            ("synchronous", 0.0, 0.0),
            ("asynchronous", 0.0, 0.0),
            ("asynchronous, one slot", 0.02, 0.0),
            ("asynchronous, trouble and reloads", 0.06, 0.25),
        ):
            try:
                made = allocator(recipe, prompts, seed)
                run = _Run(made, World(seed), promises, reload, seed)
                if mode == "synchronous":
                    steps = run.synchronous(batches)
                else:
                    steps = run.asynchronous(
                        2 if "slot" in mode else batches, trouble, slots=1 if "slot" in mode else 24
                    )
                made_batches = sum(actions.batch is not None for actions in steps)
                expect(4, made_batches > 0 or bool(run.finished), "no batch and no reason")
                paid.append(made.paid // max(1, made_batches))
            except ConformanceError as error:
                raise ConformanceError(f"{error} (seed {seed}, {mode})") from None
    return max(paid)


def _check_back_pressure(
    recipe: Recipe, prompts: int, seed: int, batches: int, allocator: type[Allocator], first: int
) -> None:
    """Law 3 where every group survives: what is alive stays within a few batches and a few intakes."""
    run = _Run(allocator(recipe, prompts, seed), World(seed, hard=True), recipe)
    bound = 3 * recipe.groups + 2 * first
    for _ in run.synchronous(4 * batches):
        alive = set(run.audit.order_of) - run.audit.released - run.audit.in_batch
        groups = {run.audit.order_of[rollout].group for rollout in alive}
        expect(3, len(groups) <= bound, f"{len(groups)} groups are held and running, of batches of {recipe.groups}")


def _check_budgets(recipe: Recipe, prompts: int, seed: int, allocator: type[Allocator], paid_a_batch: int) -> None:
    """Law 7, and law 2 to the end of a run: a budget ends it, is never exceeded, and nothing is lost."""
    limits = (
        Budget(run_rollouts=3 * paid_a_batch + 1),
        Budget(run_tokens=100 * paid_a_batch),
        Budget(run_rollouts=4 * paid_a_batch, batch_rollouts=paid_a_batch // 2 + 1),
    )
    for budget in limits:
        run = _Run(allocator(replace(recipe, budget=budget), prompts, seed), World(seed), recipe, 0.1, seed)
        in_batch = 0
        for actions in run.asynchronous(10_000, trouble=0.03):
            in_batch += sum(len(order.rollouts) for order in actions.generate)
            ordered = len(run.audit.order_of)
            within = budget.run_rollouts is None or ordered <= budget.run_rollouts
            expect(7, within, f"{ordered} rollouts ordered under {budget}")
            expect(
                7, in_batch <= (budget.batch_rollouts or in_batch), f"{in_batch} rollouts for one batch under {budget}"
            )
            if budget.run_tokens is not None and actions.generate:
                before = run.audit.tokens
                expect(7, before < budget.run_tokens, f"rollouts ordered after {before} tokens under {budget}")
            in_batch = 0 if actions.batch else in_batch
        expect(7, run.finished is not None, f"{budget} does not end the run")
        open_rollouts = run.allocator.accounts()["open"]
        expect(8, open_rollouts == 0, f"{open_rollouts} rollouts are open after the end of the run")


def _check_quarantine(recipe: Recipe, prompts: int, seed: int, allocator: type[Allocator]) -> None:
    """Law 10 where every third prompt always fails: it is drawn as often as the recipe allows, the others go on."""
    if isinstance(recipe.prompts, OfferedPromptRule):
        return  # a loader of so few prompts soon offers none but those in flight
    run = _Run(allocator(recipe, prompts, seed), World(seed, hard=True, failing=3), recipe, 0.1, seed)
    for _ in run.synchronous(8 * prompts // recipe.groups):
        pass
    expect(10, recipe.quarantine_after is None or run.allocator.epoch > recipe.quarantine_after, "too few visits")
    found = {prompt for prompt in range(prompts) if run.audit.always_failed(prompt)}
    given_up = set(run.allocator.quarantined())
    expect(10, found == given_up, f"prompts {sorted(found ^ given_up)[:5]} are wrongly quarantined, or wrongly not")


# Judges under which a group's results are just those that came: another one may decide before the last is in.
_WAIT_FOR_ALL = (judges.Complete, judges.NonzeroVariance, judges.Band)


def _keep_promises(recipe: Recipe, audit: _Auditor, batch: Batch, *, trouble: bool) -> None:
    """What the recipe's own rules promise of every batch."""
    by_group: dict[int, list[Row]] = defaultdict(list)
    for row in batch.rows:
        by_group[row.group].append(row)
    for group, group_rows in by_group.items():
        done = [audit.done[rollout] for rollout in audit.groups[group] if rollout in audit.done]
        for index, stage in enumerate(recipe.stages):
            judge = stage.judge
            if isinstance(judge, judges.Band) and not trouble:
                mean = float(np.mean(audit.metrics(group, index)))
                inside = judge.p_lower - 1e-9 <= mean <= 1 - judge.p_upper + 1e-9 and mean < judge.p_solve
                expect(9, inside, f"group {group} with mean {mean} is outside the window of {judge}")
            if isinstance(judge, judges.NonzeroVariance):
                metrics = audit.metrics(group)
                expect(9, len(set(metrics)) > 1, f"group {group} has no variance although {judge} promises it")
        rewards = {audit.done[row.rollout].reward for row in group_rows}
        expect(
            9, len(rewards) > 1 or not any(row.advantage for row in group_rows), f"group {group}: advantage of nothing"
        )
        if all(isinstance(stage.judge, _WAIT_FOR_ALL) for stage in recipe.stages):
            _keep_row_promise(recipe, group_rows, done, trouble=trouble)


def _keep_row_promise(recipe: Recipe, group_rows: list[Row], done: list[Done], *, trouble: bool) -> None:
    """The rows are those that the row rule names, recomputed from its definition."""
    kept = {row.rollout for row in group_rows}
    rule, planned = recipe.rows, _planned(recipe)
    if isinstance(rule, rows.Everything):
        expect(9, len(kept) == len(done), f"{len(done) - len(kept)} rollouts are left out")
        expect(9, trouble or planned is None or len(kept) == planned, f"{len(kept)} rows, not {planned}")
    elif isinstance(rule, rows.ShortestAndLongest):
        whole = sorted((d.tokens, d.rollout) for d in done if not d.truncated)
        wanted = rule.shortest + rule.longest
        expect(9, len(kept) == min(wanted, len(done)), f"{len(kept)} rows, not {wanted} of {len(done)}")
        if len(whole) >= wanted:
            best = whole[: rule.shortest] + whole[len(whole) - rule.longest :]
            expect(
                9, kept == {rollout for _, rollout in best}, "not the shortest and the longest that were not truncated"
            )
        else:
            expect(9, {rollout for _, rollout in whole} <= kept, "a truncated rollout is kept and a whole one is not")
    elif isinstance(rule, rows.MaxVariance):
        rewards = np.array([d.reward for d in done])
        expect(9, len(kept) == min(rule.m, len(done)), f"{len(kept)} rows, not {rule.m} of {len(done)}")
        variance = np.var([d.reward for d in done if d.rollout in kept])
        if rule.m < len(done) <= 9:
            best = max(np.var(rewards[list(subset)]) for subset in combinations(range(len(done)), rule.m))
            expect(9, bool(variance >= best - 1e-12), f"a subset of variance {best} exists, {variance} is kept")


def _planned(recipe: Recipe) -> int | None:
    """Rollouts of a complete group, where the recipe fixes their number."""
    planned = [stage.size.n for stage in recipe.stages if isinstance(stage.size, sizes.Fixed)]
    return sum(planned) if len(planned) == len(recipe.stages) else None


# ----------------------------------------------------------------------------------------------------------------- mutants


def mutants(recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to break the laws, each a name and the arguments of a `check_recipe` that must fail.

    Args:
        recipe: a sound recipe; those mutants that its own rules allow are made of it.
    """
    for broken in (
        _ForgetfulLoad,
        _DoubleRelease,
        _EarlyRelease,
        _Loses,
        _TwiceTrained,
        _Deaf,
        _Spender,
        _Unaccounted,
        _Random,
        _StaleRows,
        _Stubborn,
        _Impatient,
    ):
        yield broken.__name__.strip("_"), {"recipe": recipe, "allocator": broken}
    yield "HiddenMemory", {"recipe": replace(recipe, prompts=_HiddenMemory())}
    last = recipe.stages[-1]
    promise = replace(recipe, stages=(*recipe.stages[:-1], replace(last, judge=judges.NonzeroVariance())))
    liar = replace(recipe, stages=(*recipe.stages[:-1], replace(last, judge=_Liar())))
    if len(recipe.stages) == 1:
        yield "GRPO that calls itself DAPO", {"recipe": liar, "like": promise}
        yield "judge that lies", {"recipe": liar}
    else:
        first = replace(recipe.stages[0], judge=_OpenBand(0.3, 0.3, 1.0))
        hoarder = _Hoarder(3 * recipe.groups)
        yield "Hoarder", {"recipe": replace(recipe, intake=hoarder, max_staleness=9)}
        yield "window that lets all through", {"recipe": replace(recipe, stages=(first, *recipe.stages[1:]))}
    if isinstance(recipe.rows, rows.ShortestAndLongest):
        yield (
            "last to finish for the longest",
            {"recipe": replace(recipe, rows=_LastToFinish(recipe.rows.shortest, recipe.rows.longest))},
        )


class _ForgetfulLoad(Allocator):
    def load_state_dict(self, state: dict[str, Any], **how: Any) -> None:
        super().load_state_dict(state, **how)
        for group in [group for waiting in self._waiting for group in waiting.values()]:
            self._drop(group, "surplus", 0)
        self._memory = self.recipe.prompts.init(self.table)


class _DoubleRelease(Allocator):
    def ask(self, capacity: int | None = None) -> Actions:
        actions = super().ask(capacity)
        return replace(actions, release=actions.release * 2)


class _EarlyRelease(Allocator):
    def ask(self, capacity: int | None = None) -> Actions:
        actions = super().ask(capacity)
        rows = () if actions.batch is None else tuple(row.rollout for row in actions.batch.rows)
        return replace(actions, release=actions.release + rows)


class _Loses(Allocator):
    def ask(self, capacity: int | None = None) -> Actions:
        actions = super().ask(capacity)
        return replace(actions, release=tuple(rollout for rollout in actions.release if rollout % 7))


class _TwiceTrained(Allocator):
    def _train(self, group: Any) -> list[Row]:
        rows = super()._train(group)
        return [*rows, rows[0]]


class _Deaf(Allocator):
    def ask(self, capacity: int | None = None) -> Actions:
        return super().ask(None)


class _Spender(Allocator):
    def __init__(self, recipe: Recipe, prompts: Any, seed: int) -> None:
        super().__init__(recipe, prompts, seed)
        self._purse.room = lambda: None
        self._purse.budget = Budget()


class _Unaccounted(Allocator):
    def accounts(self) -> dict[str, int]:
        return super().accounts() | {"open": 0}


class _Random(Allocator):
    def _pick(self, k: int, already: int) -> list[int]:
        self.seed = int(np.random.default_rng().integers(1 << 30))
        return super()._pick(k, already)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seed": self._first_seed}

    def __init__(self, recipe: Recipe, prompts: Any, seed: int) -> None:
        self._first_seed = seed
        super().__init__(recipe, prompts, seed)


class _StaleRows(Allocator):
    def _stale(self, group: Any, updates: int = 0) -> bool:
        return False


class _Stubborn(Allocator):
    def _fail(self, prompt: int) -> bool:
        return False


class _Impatient(Allocator):
    def _fail(self, prompt: int) -> bool:
        return super()._fail(prompt) or True


@dataclass(frozen=True)
class _Hoarder:
    groups: int

    def __call__(self, view: View, memory: Any) -> int:
        return 0 if view.running_S[0] else self.groups


_hidden_cursor = [0]


@dataclass(frozen=True)
class _HiddenMemory(prompts.Shuffled):
    def pick(self, memory: Any, k: int, free_N: Any, rng: np.random.Generator) -> Sequence[int]:
        _hidden_cursor[0] += 1
        return super().pick(memory, k, free_N, np.random.default_rng(_hidden_cursor[0]))


@dataclass(frozen=True)
class _Liar(judges.NonzeroVariance):
    def __call__(self, group: Any, view: View) -> Verdict | None:
        return None if group.unfinished else Verdict(Act.TRAIN)


@dataclass(frozen=True)
class _OpenBand(judges.Band):
    def __call__(self, group: Any, view: View) -> Verdict | None:
        return None if group.unfinished else Verdict(Act.NEXT)


@dataclass(frozen=True)
class _LastToFinish(rows.ShortestAndLongest):
    def __call__(self, group: Any, view: View, rng: np.random.Generator) -> Any:
        chosen = np.arange(group.rewards_G.size)[-(self.shortest + self.longest) :]
        return chosen, np.ones(chosen.size)
