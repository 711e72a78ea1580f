"""A simulated run: the real allocator orders rollouts, simulated replicas generate them, a simulated trainer trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from operator import attrgetter

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import NOTHING, Actions, Batch, Event, Order, Updated
from rollalloc.core.recipe import Recipe
from rollalloc.generate.outcomes import RolloutResult, event_of, stopped
from rollalloc.rewards.function import Scored
from rollalloc_lab.simulate.cluster import Scenario
from rollalloc_lab.simulate.fleet import Fleet
from rollalloc_lab.simulate.result import Books, Result
from rollalloc_lab.simulate.workload import SimulatedOutcome, within

# In the tail, no rollout waits, and the number of running rollouts is below this share of its maximum for the batch.
TAIL = 0.1

TOGETHER = 1e-9  # seconds; events closer than this happen at the same time, and differ only by rounding


def simulate(
    recipe: Recipe,
    scenario: Scenario,
    seed: int,
    *,
    max_staleness: int | None = None,
) -> Result:
    """Simulate training under a recipe.

    Args:
        recipe: the recipe whose cost is estimated.
        scenario: the workload, the hardware and the other conditions of the run.
        seed: seed of the allocator, the prompts and the rollouts' outcomes. An outcome depends only on the seed, the prompt
            and the rollout's id. So if a recipe orders the same rollouts on two clusters, it gets the same outcomes.
        max_staleness: replaces the recipe's own value, see `Scenario.fitting`.

    Raises:
        ValueError: the scenario or the recipe cannot be simulated.
        RuntimeError: the run ended before the first measured batch.
    """
    return Simulation(recipe, scenario, seed, max_staleness=max_staleness, allocator=Allocator).run()


class Simulation:
    """The state of one simulated run."""

    def __init__(
        self, recipe: Recipe, scenario: Scenario, seed: int, *, max_staleness: int | None, allocator: type[Allocator]
    ) -> None:
        self.scenario, self.cluster, self.costs = scenario, scenario.cluster, scenario.charges
        self.world = scenario.workload.world(seed)
        self.allocator = allocator(scenario.fitting(recipe, max_staleness), self.world.prompts, seed)
        self.seed = seed
        self.fleet = Fleet(self.cluster.replicas, scenario.pace)
        self.trainer = SimulatedTrainer(scenario)
        self.queue: deque[tuple[int, Order]] = deque()  # rollouts waiting for a slot
        self.queued: set[int] = set()
        # For each rollout that the core has not released: its outcome, and the version at its first token.
        self.made: dict[int, tuple[SimulatedOutcome, int]] = {}
        # When the slots of stopped rollouts become free. All delays are equal, so the times are in order.
        self.stopping: deque[tuple[float, int]] = deque()
        self.peak = 0  # maximum number of rollouts that ran at once since the last update
        self.tail = self.unused = 0.0
        self.stopped = self.rows = self.row_tokens = 0
        self.books = [self._books()]
        self.why: str | None = None

    def run(self) -> Result:
        """Run the simulation to its end."""
        step = self._asynchronously if self.cluster.schedule == "async" else self._synchronously
        warmup = self.scenario.warmup
        while len(self.books) <= warmup + self.scenario.batches and self.why is None:
            step()
        if len(self.books) < warmup + 2:
            raise RuntimeError(
                f"the run ended after {len(self.books) - 1} batches, {warmup} of which are warm-up: {self.why}; give "
                "it more prompts, less warm-up, or a recipe that accepts more prompts"
            )
        cluster = self.cluster
        return Result.of(self.books[warmup:], seed=self.seed, gpus=cluster.gpus, slots=self.fleet.slots, why=self.why)

    # ------------------------------------------------------------------------------------------------------- schedules

    def _synchronously(self) -> None:
        """Run one wave, as our own trainer does: all ordered rollouts end before more are ordered or a batch is trained.

        If a stage has a stop rule, each end is reported to the allocator at once, and the allocator is asked what to stop.
        Otherwise all ends are reported together, in the order of their ids.
        """
        actions = self.allocator.ask()
        self._take(actions)
        at_once = bool(self.allocator.recipe.stopping)
        held: list[Event] = []
        while self.fleet.place or self.queued:
            if at_once:
                self.allocator.tell(self._next() or ())
                self._take(self.allocator.ask(capacity=0))
            else:
                held += self._next() or ()
            self._fill()  # after all stops of this moment, because they may remove waiting rollouts
        held.sort(key=_rollout)
        self.allocator.tell(held)
        if (batch := self.allocator.batch) is not None:
            self.fleet.lend(self.trainer.begin(batch, self.made, self.fleet.now) + self.costs.weight_sync)
            self._update(batch)
        elif not (actions.generate or actions.cancel or self.why):
            raise RuntimeError(f"nothing runs and the allocator orders nothing: {self.allocator.accounts()}")

    def _asynchronously(self) -> None:
        """Ask the allocator once for as many rollouts as slots are free, then process the next event."""
        actions = self.allocator.ask(capacity=max(0, self.fleet.free - len(self.queued)))
        self._take(actions)
        self._fill()  # also start rollouts for which there was no memory earlier
        if actions.batch is not None:
            self.trainer.begin(actions.batch, self.made, self.fleet.now)
        elif self.why is None:
            events = self._next()
            if events is not None:
                self.allocator.tell(events)
            elif (batch := self.allocator.batch) is not None:
                self._update(batch)
                for at in range(self.cluster.replicas):
                    self.fleet.pause(at, self.costs.weight_sync)

    # ---------------------------------------------------------------------------------------------------------- actions

    def _take(self, actions: Actions) -> None:
        """Carry out the allocator's actions, except training the batch."""
        if actions is NOTHING:
            return
        for rollout in actions.release:
            self.made.pop(rollout, None)
        unbegun: list[Event] = []
        for rollout in actions.cancel:
            if rollout in self.queued:
                self.queued.discard(rollout)
                unbegun.append(event_of(stopped(rollout, self.allocator.version)))
            else:
                self.stopping.append((self.fleet.now + self.costs.abort, rollout))
        for order in actions.generate:
            self.queue.extend((rollout, order) for rollout in order.rollouts)
            self.queued.update(order.rollouts)
        self.stopped += len(unbegun)
        if unbegun:
            self.allocator.tell(unbegun)
        if self.queue:
            self._fill()
        self.why = actions.finished

    def _fill(self) -> None:
        """Start waiting rollouts in order, as far as slots and memory allow, each on the least loaded replica."""
        fleet, version = self.fleet, self.allocator.version
        prompt = self.scenario.prompt_tokens
        prefill = self.fleet.pace.prefill * prompt
        prefilled: set[tuple[int, int]] = set()
        while self.queue and fleet.free:
            rollout, order = self.queue[0]
            at = fleet.least_loaded()
            if rollout in self.queued and not fleet.fits(at, prompt):
                return
            self.queue.popleft()
            if rollout not in self.queued:  # it was stopped before it started
                continue
            self.queued.discard(rollout)
            if prefill and (order.group, at) not in prefilled:
                prefilled.add((order.group, at))
                fleet.pause(at, prefill)
            outcome = within(self.world.outcome(order.prompt, rollout), order.limit)
            self.made[rollout] = (outcome, version)
            fleet.start(rollout, outcome.tokens, at, prompt)

    # ----------------------------------------------------------------------------------------------------------- events

    def _next(self) -> list[Event] | None:
        """Process the next event. Return what to tell the allocator, or None when the trainer has finished."""
        ends = self.fleet.next_end()
        stops = self.stopping[0][0] if self.stopping else inf
        moment = min(ends, stops, self.trainer.until)
        if moment == inf:
            raise RuntimeError(f"nothing runs and the allocator orders nothing: {self.allocator.accounts()}")
        self._pass_to(moment)
        if moment == ends:
            events: list[Event] = []
            while self.fleet.next_end() <= moment + TOGETHER:  # all ends of this moment, on any replica
                events += map(self._done, self.fleet.end())
        elif moment == stops:
            events = self._stop()
        else:
            return None
        return events

    def _pass_to(self, moment: float) -> None:
        passed = moment - self.fleet.now
        running = len(self.fleet.place)
        self.peak = max(self.peak, running)
        # If so few rollouts run, none waits, because rollouts wait only while all slots are taken.
        if 0 < running < TAIL * self.peak:
            self.tail += passed
        self.unused += passed * self.cluster.unused
        self.fleet.pass_to(moment)

    def _done(self, rollout: int) -> Event:
        outcome, version = self.made[rollout]
        if self.cluster.overlap:
            self.trainer.look_at(outcome, self.fleet.now)
        right = float(outcome.right)
        return event_of(
            RolloutResult(
                rollout=rollout,
                outcome=Scored(right, right),
                tokens=outcome.tokens,
                version=version,
                last_version=self.allocator.version,
                truncated=outcome.truncated,
            )
        )

    def _stop(self) -> list[Event]:
        """Cancellations of the rollouts whose slots become free now. A rollout that ended in the meantime was already
        reported as done.
        """
        events: list[Event] = []
        while self.stopping and self.stopping[0][0] <= self.fleet.now:
            rollout = self.stopping.popleft()[1]
            if rollout in self.fleet.place:
                outcome, version = self.made[rollout]
                tokens = min(self.fleet.stop(rollout), outcome.tokens)
                events.append(event_of(stopped(rollout, version, tokens)))
        self.stopped += len(events)
        return events

    def _update(self, batch: Batch) -> None:
        """Switch to the new weights."""
        self.rows += len(batch.rows)
        self.row_tokens += sum(self.made[row.rollout][0].tokens for row in batch.rows)
        self.trainer.end()
        self.allocator.tell([Updated(self.allocator.version + 1)])
        self.peak = 0
        self.books.append(self._books())

    def _books(self) -> Books:
        fleet, trainer, cluster = self.fleet, self.trainer, self.cluster
        fleet.advance()
        share = cluster.gpus_per_replica
        # Under "sync", all GPUs are occupied while weights are sent, and no GPU waits for the trainer.
        together = cluster.schedule == "sync"
        syncing = self.costs.weight_sync * self.allocator.version * cluster.gpus if together else 0.0
        waiting = 0.0 if together else trainer.idle * cluster.trainers
        return Books(
            clock=fleet.now,
            decoding=sum(replica.decoding for replica in fleet.replicas) * share,
            pausing=sum(replica.paused for replica in fleet.replicas) * share + syncing,
            training=trainer.busy * cluster.trainers,
            idle=sum(replica.empty for replica in fleet.replicas) * share + waiting,
            unused=self.unused,
            slot_seconds=fleet.slot_seconds,
            tail=self.tail,
            paid=self.allocator.paid,
            stopped=self.stopped,
            preempted=fleet.preemptions,
            tokens=self.allocator.tokens_paid,
            rows=self.rows,
            row_tokens=self.row_tokens,
            accounts=self.allocator.accounts(),
        )


_rollout = attrgetter("rollout")


class SimulatedTrainer:
    """The GPUs that train, one batch at a time.

    Attributes:
        until: when the training of the current batch will be finished; infinity if there is no batch.
        busy: seconds spent working.
        idle: seconds spent waiting.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.until = inf
        self.busy = self.idle = 0.0
        self._scenario = scenario
        self._free_since = 0.0
        self._ahead = 0.0  # the time at which log-probabilities of all finished rollouts will be computed
        self._looked = 0.0  # seconds of log-probabilities requested since the last batch

    def look_at(self, outcome: SimulatedOutcome, now: float) -> None:
        """Compute the log-probabilities of a rollout, before it is known whether they are needed."""
        seconds = self._forward(outcome.tokens + self._scenario.prompt_tokens)
        self._ahead = max(self._ahead, now) + seconds
        self._looked += seconds

    def begin(self, batch: Batch, made: Mapping[int, tuple[SimulatedOutcome, int]], now: float) -> float:
        """Start to train a batch. Return the time at which it will be finished."""
        costs, cluster = self._scenario.charges, self._scenario.cluster
        tokens = sum(made[row.rollout][0].tokens + self._scenario.prompt_tokens for row in batch.rows)
        left = max(0.0, self._ahead - now)
        seconds = left if cluster.overlap else self._forward(tokens)
        seconds += (tokens * costs.train + len(batch.rows) * costs.train_row) / cluster.trainers + costs.update
        # With "sync", the same GPUs train and decode, and `decoding` already includes their time since the last update.
        if cluster.schedule == "async":
            looked = self._looked - left
            self.busy += looked
            self.idle += now - self._free_since - looked
        self.busy += seconds
        self._looked = 0.0
        self.until = self._ahead = now + seconds
        return self.until

    def end(self) -> None:
        """Finish the batch."""
        self._free_since, self.until = self.until, inf

    def _forward(self, tokens: int) -> float:
        return tokens * self._scenario.charges.logprob / self._scenario.cluster.trainers
