"""Rounds of rollouts: the core's orders as verl's submissions, what came of them as the core's events.

Nothing here imports verl. A `Crew` generates and holds the rows; a `Loader` hands prompts over in verl's order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollalloc.core.allocator import Allocator, NoProgress
from rollalloc.core.events import Actions, Batch, Cancelled, Offered, Order, Row, Updated
from rollalloc.core.packing import exact_keys
from rollalloc.drivers.verl.figures import Step
from rollalloc.generate.outcomes import RolloutResult, mostly_unscored, no_scores, tell
from rollalloc.rewards.function import Scored, Unscored
from rollalloc.runs.metrics import of_batch, prediction, scalars, totals


@dataclass(frozen=True, slots=True)
class Submission:
    """One order as verl generates it: a prompt under a fresh uid, session i of which is the i-th rollout.

    Attributes:
        uid: never used before, without the underscore that verl's row keys are split at.
        prompt: index of the prompt.
        rollouts: the core's ids.
    """

    uid: str
    prompt: int
    rollouts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a session of a submission ended.

    Attributes:
        uid: of the submission.
        session: index of the session.
        tokens: generated.
        reward: as trained; None: there is no score.
        metric: what selection looks at.
        version: of the weights at the first token; None: not known, taken for the latest.
        last_version: at the last token.
        truncated: it hit the length limit.
        rows: rows it left, under the keys `uid_session_0` and on.
        reason: why there is no score.
        cancelled: it was stopped because the core said so.
        uncertainty: see `rollalloc.core.events.Done`; None where verl was not asked for log-probabilities.
    """

    uid: str
    session: int
    tokens: int = 0
    reward: float | None = None
    metric: float = 0.0
    version: int | None = None
    last_version: int | None = None
    truncated: bool = False
    rows: int = 0
    reason: str = ""
    cancelled: bool = False
    uncertainty: float | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """verl's keys of its rows."""
        return tuple(f"{self.uid}_{self.session}_{row}" for row in range(self.rows))


Session = tuple[str, int]  # uid, index


class Crew(Protocol):
    """Who generates, scores, and holds the rows."""

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Start them."""
        ...

    def cancel(self, sessions: Sequence[Session]) -> None:
        """Stop those that still generate; each still has its outcome."""
        ...

    def outcomes(self, wait: bool = True) -> Sequence[Outcome]:
        """Outcomes since the last call; waits for one, or else may have none. Every session submitted has one in the end,
        also one whose worker died."""
        ...

    def copy(self, keys: Mapping[str, str]) -> None:
        """Keep a copy of each of these rows, as it is now, under another key: verl frees a batch's rows after its update."""
        ...

    def release(self, keys: Sequence[str]) -> None:
        """These rows are not needed any more."""
        ...


class Loader(Protocol):
    """A framework's own order of the prompts."""

    def next_prompts(self) -> tuple[Sequence[int], int]:
        """The next prompts and the epoch they belong to; never ends."""
        ...

    def __len__(self) -> int:
        """Prompts in an epoch."""
        ...


class Finished(RuntimeError):
    """There will be no further batch; says why."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """A batch in verl's terms.

    Attributes:
        batch: the core's.
        keys: verl's keys; a rollout of several outputs has several.
        rows: the core's row for each key.
    """

    batch: Batch
    keys: tuple[str, ...]
    rows: tuple[Row, ...]

    def factors(self, own: bool, within_group: bool) -> dict[str, float]:
        """What the row of each key is multiplied with.

        Args:
            own: the recipe's advantages are used, and the factor is for the mask; else for the estimator's advantage.
            within_group: the estimator compares a group's rollouts. One that has no other to be compared with tells
                nothing, where verl's estimators take its reward for its advantage.
        """
        if own:
            return {key: row.advantage * row.weight for key, row in self._held}
        rollouts = Counter(group for group, _ in {(row.group, row.rollout) for row in self.rows})
        return {key: 0.0 if within_group and rollouts[row.group] == 1 else row.weight for key, row in self._held}

    @property
    def _held(self) -> Iterator[tuple[str, Row]]:
        return zip(self.keys, self.rows, strict=True)


class Rounds:
    """Asks the core, lets the crew generate, tells the core, until there is a batch.

    A batch is handed out when nothing is generated any more: on a colocated engine the update takes the same devices. What
    ends after the batch was made stays for the next one, where the recipe allows it. Where rollouts may go on over an update
    a batch is handed out at once, with orders for the next one beside it.

    Args:
        allocator: decides.
        crew: generates.
        loader: offers prompts, for a recipe whose prompt rule is `AsOffered`; None otherwise.
        overlaps: whether rollouts may go on over an update.
    """

    def __init__(self, allocator: Allocator, crew: Crew, loader: Loader | None, overlaps: bool = False) -> None:
        self.allocator, self.crew, self.loader, self.overlaps = allocator, crew, loader, overlaps
        self.seconds = 0.0  # of own work, waiting for the crew excluded
        self.reasons: Counter[str] = Counter()  # why rollouts failed, from the last batch but one to the last
        self._failing: Counter[str] = Counter()  # since the last batch
        self._step = Step()
        self._figures: dict[str, Any] = {}  # of the last batch's step
        self._broken_off: tuple[Order, ...] = ()  # by the end of the process that was saved; generated again
        self._running: dict[Session, int] = {}  # -> rollout
        self._stopped: set[int] = set()  # of those that run
        self._keys: dict[int, tuple[str, ...]] = {}  # rollout -> rows that are held
        self._kept: dict[int, tuple[str, ...]] = {}  # rollout -> copies of rows trained, which may be replayed
        self._unneeded: list[str] = []  # rows to release, all at once when the round is over
        self._reading_since: int | None = None  # the loader's epoch at the first offer since something was ordered
        self._gave_up = False  # the loader was said to have ended, for the sake of one batch
        self._at_work = False  # a batch was handed over and is not trained yet

    def next_batch(self, last: bool = False) -> TrainingRows:
        """Generate until there is a batch.

        Args:
            last: no batch will be asked for after it, so that nothing is ordered beside it.

        Raises:
            Finished: there is none, and there will be none.
            NoScores: for want of scores: the reward or the engine fails.
            NoProgress: nothing can be done although the run is not over; the message says what would help.
            MetricError: a metric outside [0, 1] where the recipe takes it for a success rate; says which key gives it.
            RuntimeError: the last batch was not told as `trained`; the core gives no other before.
        """
        if self._at_work:
            raise RuntimeError("the last batch is still to be trained: call trained(version) before next_batch()")
        started, waited = time.perf_counter(), 0.0
        self._submit(self._broken_off, again=f"a{self.allocator.version}")  # rows of the first time may be held
        self._broken_off = ()
        batch: Batch | None = None
        while True:
            actions = self._ask() if batch is None else self.allocator.ask(capacity=0)
            self._carry_out(actions)
            batch = batch or actions.batch
            if (batch and self.overlaps) or (not self._running and (batch or actions.finished)):
                break
            if self._running:
                before = time.perf_counter()
                outcomes = self.crew.outcomes()
                waited += time.perf_counter() - before
                self._tell(outcomes)
        self._release()
        if batch is None:
            if self.allocator.scoreless():
                failing = self._failing or self.reasons
                raise no_scores(
                    mostly_unscored(str(actions.finished), max(failing, key=failing.__getitem__, default=None))
                )
            raise Finished(actions.finished)
        rows = self._hand_over(batch)
        self._order_beside(last)
        self._end_step(batch)
        self._at_work = True
        self.seconds = time.perf_counter() - started - waited
        return rows

    def attend(self, last: bool = False) -> None:
        """While the batch is trained: tell what ended, without waiting, and carry out what follows from it.

        Args:
            last: as for `next_batch`.
        """
        if self._running and (outcomes := self.crew.outcomes(wait=False)):
            self._tell(outcomes)
            self._order_beside(last)

    def _order_beside(self, last: bool) -> None:
        """What the core wants done while the batch is trained."""
        if self.overlaps:
            only_stops = last or self._gave_up  # a loader that was said to have ended is read again after the update
            self._carry_out(self.allocator.ask(capacity=0) if only_stops else self._ask())
            self._release()

    def trained(self, version: int) -> None:
        """The batch was trained: the weights are of this version now."""
        self.allocator.tell([Updated(version)])
        self._at_work = False

    def held(self) -> set[str]:
        """Keys of the rows that a later batch may need."""
        return {key for held in (self._keys, self._kept) for keys in held.values() for key in keys}

    def _held_groups(self) -> set[int]:
        """Groups of which rows wait for their batch."""
        return {_group_of(key) for keys in self._keys.values() for key in keys}

    def _running_groups(self) -> set[int]:
        """Groups of which a rollout runs that is not to be stopped."""
        return {_group_of(uid) for (uid, _), rollout in self._running.items() if rollout not in self._stopped}

    # ------------------------------------------------------------------------------------------------------- the round

    def _ask(self) -> Actions:
        """The core's actions, prompts offered as it wants them."""
        if self._gave_up:  # what came back with the update may be offered now, within a whole pass from here
            self._reading_since = None
            self._offer()
        while True:
            while self.loader is not None and self.allocator.wanted() and not self._passed_over():
                self._offer()
            try:
                actions = self.allocator.ask()
            except NoProgress:
                if self.loader is None or not self.allocator.wanted():
                    raise
                if self._passed_over():  # for this batch; nothing runs that could bring a prompt back
                    self.allocator.tell([Offered((), self.allocator.epoch)])
                    self._gave_up = True
                continue
            if actions.generate:
                self._reading_since = None
            return actions

    def _offer(self) -> None:
        assert self.loader is not None
        prompts, epoch = self.loader.next_prompts()
        self.allocator.tell([Offered(tuple(prompts), epoch)])
        self._gave_up = False
        if self._reading_since is None:
            self._reading_since = epoch

    def _passed_over(self) -> bool:
        """Whether a whole epoch in which a prompt was due had none that may be drawn; a loader may leave some out."""
        since, now = self._reading_since, self.allocator.epoch
        if since is None or now < since + 2:
            return False
        due = self.allocator.due_epoch()
        return due is None or now >= due + 2

    def _carry_out(self, actions: Actions) -> None:
        held = (self._keys, self._kept)
        self._unneeded += [key for rollout in actions.release for of in held for key in of.pop(rollout, ())]
        if actions.generate:
            self._step.order(actions.generate)
            self._submit(actions.generate)
        if actions.cancel:
            self._stop(set(actions.cancel))

    def _submit(self, orders: Sequence[Order], again: str = "") -> None:
        submissions = [_submission(order, again) for order in orders]
        for submission in submissions:
            self._running |= {(submission.uid, at): rollout for at, rollout in enumerate(submission.rollouts)}
        if submissions:
            self.crew.submit(submissions)

    def _stop(self, rollouts: set[int]) -> None:
        """Have rollouts stopped; one that nobody generates, since the process that did is gone, has ended."""
        sessions = [session for session, rollout in self._running.items() if rollout in rollouts]
        gone = rollouts.difference(self._running.values())
        self.allocator.tell([Cancelled(rollout, 0) for rollout in sorted(gone)])
        self._stopped |= rollouts - gone
        if sessions:
            self.crew.cancel(sessions)

    def _release(self) -> None:
        if self._unneeded:
            self.crew.release(self._unneeded)
            self._unneeded = []

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            rollout = self._running.pop((outcome.uid, outcome.session), None)
            if rollout is None:  # its worker was given up for dead before
                self._unneeded += outcome.keys
                continue
            self._stopped.discard(rollout)
            self._keys[rollout] = outcome.keys
            tell(self.allocator, [self._result(rollout, outcome)])

    def _result(self, rollout: int, outcome: Outcome) -> RolloutResult:
        if outcome.reward is None and not outcome.cancelled:
            self._failing[outcome.reason] += 1
        return RolloutResult(
            rollout=rollout,
            outcome=Unscored(outcome.reason) if outcome.reward is None else Scored(outcome.reward, outcome.metric),
            tokens=outcome.tokens,
            version=self.allocator.version if outcome.version is None else outcome.version,
            last_version=outcome.last_version,
            truncated=outcome.truncated,
            cancelled=outcome.cancelled,
            uncertainty=outcome.uncertainty,
        )

    def _hand_over(self, batch: Batch) -> TrainingRows:
        """The batch's rows; from here on they are verl's, which frees them after the update.

        What may be replayed is copied before verl writes into it: a copy is a row as it was generated.
        """
        replay, copies = self.allocator.recipe.replay, dict[str, str]()
        held: list[tuple[str, Row]] = []
        for row in batch.rows:
            keys = (self._kept if row.replays else self._keys).pop(row.rollout)
            held += [(key, row) for key in keys]
            if replay is not None and replay.takes(row, batch.version + 1):
                self._kept[row.rollout] = tuple(_again(key, row.replays + 1) for key in keys)
                copies |= zip(keys, self._kept[row.rollout], strict=True)
        if copies:
            self.crew.copy(copies)
        return TrainingRows(batch, tuple(key for key, _ in held), tuple(row for _, row in held))

    # ------------------------------------------------------------------------------------------------ figures and state

    def _end_step(self, batch: Batch) -> None:
        """What was done for the batch is known; what is done from here on is the next one's."""
        held, running = self._held_groups(), self._running_groups()
        trained = {row.group for row in batch.rows if not row.replays}
        recipe, statistics = self.allocator.recipe, self.allocator.statistics
        self._figures = self._step.metrics(recipe.stages, statistics, trained, held, running)
        self._step = self._step.following(held, running)
        self.reasons, self._failing = self._failing, Counter()

    def metrics(self, batch: Batch) -> dict[str, float]:
        """What the run paid so far and for what, the state of its prompts, and what this step did; under `rollalloc/`."""
        own = {"streaming": {"in_flight": len(self._running)}, "driver_seconds": self.seconds}
        run = totals(self.allocator) | prediction(self.allocator)
        return scalars(run | of_batch(self.allocator, batch) | self._figures | own)

    def state_dict(self) -> dict[str, Any]:
        """The core's state and the keys of the rows held, taken after `trained`. What runs is ordered again after a load."""
        return {
            "allocator": self.allocator.state_dict(),
            "keys": [[rollout, list(keys)] for rollout, keys in self._keys.items() if keys],
            "kept": [[rollout, list(keys)] for rollout, keys in self._kept.items()],
            "reading_since": self._reading_since,
            "gave_up": self._gave_up,
        }

    def load_state_dict(self, state: dict[str, Any], present: set[str]) -> set[str]:
        """Go on from a saved state: all of it or, on an error, none.

        Args:
            state: what `state_dict` gave.
            present: keys of the rows that were restored.

        Returns:
            Those of them that nobody needs.

        Raises:
            ValueError: rows are missing, or the state is of another recipe, seed or data set.
        """
        exact_keys(state, ("allocator", "keys", "kept", "reading_since", "gave_up"), "state of the verl driver")
        keys, kept = ({rollout: tuple(held) for rollout, held in state[name]} for name in ("keys", "kept"))
        needed = {key for of in (keys, kept) for held in of.values() for key in held}
        if missing := needed - present:
            raise ValueError(
                f"{len(missing)} of {len(needed)} rows that the checkpoint's state holds are not in its TransferQueue, "
                f"e.g. {min(missing)}; the checkpoint is corrupt: resume from another one"
            )
        self.allocator.load_state_dict(state["allocator"])
        self._keys, self._kept = keys, kept
        self._reading_since, self._gave_up = state["reading_since"], state["gave_up"]
        self._step = Step(self._held_groups())
        left = self.allocator.outstanding()
        self._broken_off = left.generate
        self._stop(set(left.cancel))
        return present - needed


def _again(key: str, replays: int) -> str:
    """The key of a row's copy for its next time, of the same form, under a uid of its own."""
    uid, session, row = key.rsplit("_", 2)
    return f"{uid.partition('x')[0]}x{replays}_{session}_{row}"


def _submission(order: Order, again: str) -> Submission:
    uid = f"g{order.group}s{order.stage}r{order.rollouts[0]}{again}"  # an order may be split: its first rollout is its own
    return Submission(uid, order.prompt, order.rollouts)


def _group_of(uid: str) -> int:
    """The group of a submission, or of a row of it."""
    return int(uid[1 : uid.index("s")])


__all__ = ["Crew", "Finished", "Loader", "Outcome", "Rounds", "Session", "Submission", "TrainingRows"]
