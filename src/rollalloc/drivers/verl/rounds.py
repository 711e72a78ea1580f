"""Translates between the core and verl: orders become submissions, and outcomes become events of the core.

This module does not import verl. A `Crew` generates rollouts and stores their rows. A `Loader` gives the prompts in verl's
order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollalloc.core.allocator import Allocator, NoProgress
from rollalloc.core.events import Actions, Batch, Cancelled, Done, Moved, Offered, Order, Row, Updated
from rollalloc.core.packing import exact_keys
from rollalloc.drivers.verl.step_metrics import Step
from rollalloc.generate.outcomes import RolloutResult, event_of, mostly_unscored, no_scores, tell
from rollalloc.rewards.function import Scored, Unscored
from rollalloc.runs.metrics import away, of_batch, prediction, scalars, totals


@dataclass(frozen=True, slots=True)
class Submission:
    """An order for verl: a prompt with a new uid. Each rollout is a session of verl: session i generates `rollouts[i]`.

    Attributes:
        uid: a uid that is never used again. It has no underscore, because verl splits row keys at underscores.
        prompt: index of the prompt in the data set.
        rollouts: ids of the rollouts in the core.
        limit: maximum number of generated tokens of a rollout; None: verl's own.
    """

    uid: str
    prompt: int
    rollouts: tuple[int, ...]
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """How a session of a submission ended.

    Attributes:
        uid: uid of the submission.
        session: index of the session in the submission.
        tokens: number of generated tokens.
        reward: reward for training. None: there is no score.
        metric: metric for selection.
        version: version of the weights at the first token. None: unknown; the latest version is assumed.
        last_version: version of the weights at the last token; None if unknown.
        truncated: whether the session reached the length limit.
        rows: number of rows that the session stored. Their keys are `uid_session_0`, `uid_session_1`, ...
        reason: why there is no score.
        cancelled: whether the session was stopped at the core's request.
        uncertainty: see `rollalloc.core.events.Done`; None if verl does not compute log-probabilities.
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
        """verl's keys of the rows that the session stored."""
        return tuple(f"{self.uid}_{self.session}_{row}" for row in range(self.rows))


Session = tuple[str, int]  # uid, index


class Crew(Protocol):
    """Generates and scores rollouts, and stores their rows."""

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Start generating."""
        ...

    def cancel(self, sessions: Sequence[Session]) -> None:
        """Stop these sessions, if they are still running. Each session still gets an outcome."""
        ...

    def outcomes(self, wait: bool = True) -> Sequence[SessionOutcome]:
        """The outcomes since the last call. Every submitted session gets exactly one outcome, even if its worker dies.

        Args:
            wait: True: wait until there is at least one outcome. False: the result may be empty.
        """
        ...

    def copy(self, keys: Mapping[str, str]) -> None:
        """Copy rows to new keys. This is needed for replay, because verl frees a batch's rows after its update.

        Args:
            keys: the new key of each row, by its present key.
        """
        ...

    def release(self, keys: Sequence[str]) -> None:
        """Delete these rows."""
        ...


class Loader(Protocol):
    """Gives the prompts in the order of the framework's own data loader."""

    def next_prompts(self) -> tuple[Sequence[int], int]:
        """The indices of the next prompts, and their epoch. Epochs follow one another without end."""
        ...

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        ...


class Finished(RuntimeError):
    """There will be no further batch. The message says why."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """A batch for verl.

    Attributes:
        batch: the core's batch.
        keys: keys of the rows in verl. A rollout with several outputs has several keys.
        rows: the core's row of each key.
        left_out: keys of replayed rows that the recipe's gate has left out, although verl has them in the batch.
    """

    batch: Batch
    keys: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: frozenset[str] = frozenset()

    def factors(self, own: bool, within_group: bool) -> dict[str, float]:
        """For each key, the factor by which the response mask or the advantage of its row is multiplied.

        Args:
            own: True: the core computes the advantages. The factor of the response mask is advantage · weight. False: verl's
                estimator computes the advantages. The factor of the advantage is the weight.
            within_group: True: verl's estimator compares the rollouts of a group. With `own` False, a rollout that is alone
                in its group gets the factor 0, because verl would use its reward as the advantage.
        """
        held = zip(self.keys, self.rows, strict=True)
        if own:
            factors = {key: row.advantage * row.weight for key, row in held}
        else:
            rollouts = Counter(group for group, _ in {(row.group, row.rollout) for row in self.rows})
            factors = {key: 0.0 if within_group and rollouts[row.group] == 1 else row.weight for key, row in held}
        return factors | dict.fromkeys(self.left_out, 0.0)


class Rounds:
    """Generates the rollouts that the core orders, and reports their outcomes to the core, until there is a batch.

    Without `overlaps`, a batch is returned only when no rollout is running, because the update needs the same devices.
    Rollouts that are not in the batch are kept for the next batch, if the recipe allows this. With `overlaps`, the batch is
    returned at once, unless `patience` delays the update, and rollouts for the next batch are started.

    Args:
        allocator: the core.
        crew: generates rollouts and stores their rows.
        loader: gives prompts in verl's order, if the recipe's prompt rule is `AsOffered`; otherwise None.
        overlaps: whether rollouts may continue during an update.
        patience: minimum age, in updates, of a running group that delays the next update; at least 1
            (`modes.Overlap.patience`). None: no update is delayed, and groups that get too old are dropped.

    Attributes:
        seconds: duration of the last call of `next_batch`, without the time spent waiting for rollouts.
        reasons: number of failed rollouts in the last step, by reason.
    """

    def __init__(
        self,
        allocator: Allocator,
        crew: Crew,
        loader: Loader | None,
        overlaps: bool = False,
        patience: int | None = None,
    ) -> None:
        self.allocator, self.crew, self.loader, self.overlaps = allocator, crew, loader, overlaps
        self.patience = patience
        self.seconds = 0.0
        self.reasons: Counter[str] = Counter()
        self._failing: Counter[str] = Counter()  # number of failed rollouts since the last batch, by reason
        self._step = Step()
        self._figures: dict[str, Any] = {}  # metrics of the last step
        # Orders that were running when the state was saved. They must be submitted again.
        self._broken_off: tuple[Order, ...] = ()
        self._running: dict[Session, int] = {}  # the rollout of each running session
        self._begun: dict[int, int] = {}  # for each group that is running or held: the version at its first order
        self._stopped: set[int] = set()  # running rollouts that were told to stop
        self._keys: dict[int, tuple[str, ...]] = {}  # keys of the stored rows of each rollout
        self._kept: dict[int, tuple[str, ...]] = {}  # for each rollout to replay: keys of the copies of its rows
        self._unneeded: list[str] = []  # keys of rows to release at the end of the round
        self._reading_since: int | None = None  # epoch of the first prompts read after the last order
        self._gave_up = False  # whether the core was told to make the batch without further prompts
        self._at_work = False  # whether a batch was returned and is not trained yet

    def next_batch(self, last: bool = False) -> TrainingRows:
        """Generate until there is a batch.

        Args:
            last: True: this is the last batch, so no rollouts for a later batch are started.

        Raises:
            Finished: the run is over, and there is no batch.
            NoScores: the run is over because no rollout could be scored; the reward or the engine fails.
            NoProgress: nothing runs or can start, although the run is not over. The message says what to change.
            MetricError: the recipe reads the metric as a success rate, but a metric is outside [0, 1]. The message says
                what the reward function should return.
            RuntimeError: `trained` was not called for the last batch.
        """
        if self._at_work:
            raise RuntimeError("the last batch is still to be trained: call trained(version) before next_batch()")
        started, waited = time.perf_counter(), 0.0
        # Orders that are submitted again get new keys, because rows of the first attempt may still be stored.
        self._submit(self._broken_off, again=f"a{self.allocator.version}")
        self._broken_off = ()
        batch: Batch | None = None
        while True:
            # When there is a batch, nothing new is ordered, which would prolong the wait; a capacity of 0 only stops
            # and frees.
            actions = self._ask() if batch is None else self.allocator.ask(capacity=0)
            self._carry_out(actions)
            # `ask` returns the batch once, and the loop may go on until the last rollout has ended.
            batch = batch or actions.batch
            if (batch and self.overlaps and (last or not self._awaited())) or (
                not self._running and (batch or actions.finished)
            ):
                break
            if self._running:
                before = time.perf_counter()
                outcomes = self.crew.outcomes()
                waited += time.perf_counter() - before
                self._tell(outcomes)
        self._release()
        if batch is None:
            # A run in which nothing was scored did not end, it failed. verl would otherwise report success.
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

    def admit(self, rows: TrainingRows, moved: float) -> TrainingRows:
        """Let the recipe's gate decide whether the replayed rows are trained on, before the update.

        Args:
            rows: the outstanding batch, with replayed rows.
            moved: share of the replayed rows' tokens that have moved.

        Returns:
            The batch. If the replayed rows are left out, verl still has their keys, and `factors` makes their advantage 0.
        """
        self.allocator.tell([Moved(moved)])
        batch = self.allocator.batch or rows.batch
        admitted = {row.rollout for row in batch.rows}
        left_out = frozenset(key for key, row in zip(rows.keys, rows.rows, strict=True) if row.rollout not in admitted)
        return replace(rows, batch=batch, left_out=left_out)

    def attend(self, last: bool = False) -> None:
        """During an update, report finished rollouts to the core without waiting, and carry out the core's actions.

        Args:
            last: True: no rollouts for a later batch are started.
        """
        if self._running and (outcomes := self.crew.outcomes(wait=False)):
            self._tell(outcomes)
            self._order_beside(last)

    def _awaited(self) -> bool:
        """Whether a running group is so old that the next update must wait until it has ended."""
        if self.patience is None:
            return False
        return any(self.allocator.version - self._begun[group] >= self.patience for group in self._running_groups())

    def _order_beside(self, last: bool) -> None:
        """Start and stop rollouts at the core's request while the batch is trained."""
        if self.overlaps:
            only_stops = last or self._gave_up  # if `_gave_up`, the loader is read again only after the update
            self._carry_out(self.allocator.ask(capacity=0) if only_stops else self._ask())
            self.allocator.rest()  # while these rollouts are generated
            self._release()

    def trained(self, version: int) -> None:
        """Tell the core that the batch was trained, and that the weights now have this version."""
        self.allocator.tell([Updated(version)])
        self._at_work = False
        alive = self._running_groups() | self._held_groups()
        self._begun = {group: begun for group, begun in self._begun.items() if group in alive}

    def held(self) -> set[str]:
        """Keys of all rows that a later batch may need."""
        return {key for held in (self._keys, self._kept) for keys in held.values() for key in keys}

    def _held_groups(self) -> set[int]:
        """Groups with rows that wait for a batch."""
        return {_group_of(key) for keys in self._keys.values() for key in keys}

    def _running_groups(self) -> set[int]:
        """Groups with a running rollout that was not told to stop."""
        return {_group_of(uid) for (uid, _), rollout in self._running.items() if rollout not in self._stopped}

    # ------------------------------------------------------------------------------------------------------- the round

    def _ask(self) -> Actions:
        """Offer the core the prompts that it wants, then ask the core for actions."""
        if self._gave_up:  # the update may have made prompts available, so read the loader for another whole epoch
            self._reading_since = None
            self._offer()
        while True:
            # Several offers: the loader gives as many prompts as it likes, and some of them may not be free.
            while self.loader is not None and self.allocator.wanted() and not self._passed_over():
                self._offer()
            try:
                actions = self.allocator.ask()
            except NoProgress:
                # Only if the core waits for prompts can another offer help. Any other cause is the user's to mend.
                if self.loader is None or not self.allocator.wanted():
                    raise
                if self._passed_over():  # no prompt is left for this batch: report the loader's end
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
        """Whether the loader was read for a whole epoch, and offered no prompt that may be drawn.

        Part of an epoch is not enough, because a loader may offer the prompts of an epoch in any order. If no
        prompt may be drawn before a certain epoch, only later epochs count.
        """
        since, now = self._reading_since, self.allocator.epoch
        # The epochs `since` and `now` may have been read in part. An epoch between them was read completely.
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
        submissions: list[Submission] = []
        for order in orders:
            self._begun.setdefault(order.group, self.allocator.version)
            # An order may come in parts. The id of the first rollout makes the uid of each part unique.
            uid = f"g{order.group}s{order.stage}r{order.rollouts[0]}{again}"
            submissions.append(Submission(uid, order.prompt, order.rollouts, order.limit))
            self._running |= {(uid, at): rollout for at, rollout in enumerate(order.rollouts)}
        if submissions:
            self.crew.submit(submissions)

    def _stop(self, rollouts: set[int]) -> None:
        """Stop rollouts. Rollouts that are no longer running, because their process ended, are reported as cancelled."""
        sessions = [session for session, rollout in self._running.items() if rollout in rollouts]
        # Nobody will report these, but the core waits for an event of each (law 1).
        gone = rollouts.difference(self._running.values())
        self.allocator.tell([Cancelled(rollout, 0) for rollout in sorted(gone)])
        self._stopped |= rollouts - gone
        if sessions:
            self.crew.cancel(sessions)

    def _release(self) -> None:
        if self._unneeded:
            self.crew.release(self._unneeded)
            self._unneeded = []

    def _tell(self, outcomes: Sequence[SessionOutcome]) -> None:
        for outcome in outcomes:
            rollout = self._running.pop((outcome.uid, outcome.session), None)
            if rollout is None:  # too late: the worker was declared dead, and the rollout was reported as failed
                self._unneeded += outcome.keys
                continue
            self._stopped.discard(rollout)
            # Before the core is told, because it may release the rollout at once.
            self._keys[rollout] = outcome.keys
            result = self._result(rollout, outcome)
            if isinstance(done := event_of(result), Done):
                self._step.see(_stage_of(outcome.uid), _group_of(outcome.uid), done)
            tell(self.allocator, [result])

    def _result(self, rollout: int, outcome: SessionOutcome) -> RolloutResult:
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
        """Pass the batch's rows to verl.

        Rows that may be replayed are copied first, because verl writes into the rows, and frees them after the update.
        """
        replay, copies = self.allocator.recipe.replay, dict[str, str]()
        held: list[tuple[str, Row]] = []
        for row in batch.rows:
            # verl frees the keys that it trains on, so they are no longer ours to release.
            keys = (self._kept if row.replays else self._keys).pop(row.rollout)
            held += [(key, row) for key in keys]
            # As the core will decide at the `Updated` that follows. A row that the gate leaves out keeps this replay.
            last = row._replace(replays=max(0, row.replays - 1)) if replay is not None and replay.gate else row
            if replay is not None and replay.takes(last, batch.version + 1):
                self._kept[row.rollout] = tuple(_again(key, batch.version) for key in keys)
                copies |= zip(keys, self._kept[row.rollout], strict=True)
        if copies:
            self.crew.copy(copies)
        return TrainingRows(batch, tuple(key for key, _ in held), tuple(row for _, row in held))

    # ------------------------------------------------------------------------------------------------ figures and state

    def _end_step(self, batch: Batch) -> None:
        """Compute the metrics of this step and begin the next."""
        held, running = self._held_groups(), self._running_groups()
        trained = {row.group for row in batch.rows if not row.replays}
        recipe, statistics = self.allocator.recipe, self.allocator.statistics
        self._figures = self._step.metrics(recipe.stages, statistics, trained, held, running)
        self._step = self._step.following(held, running)
        self.reasons, self._failing = self._failing, Counter()

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Metrics under `rollalloc/`: rollouts by cause, the state of the prompts, and the metrics of this step."""
        own = {"streaming": {"in_flight": len(self._running)}, "driver_seconds": self.seconds}
        own |= away(self.allocator)
        run = totals(self.allocator) | prediction(self.allocator)
        return scalars(run | of_batch(self.allocator, batch) | self._figures | own)

    def groups_table(self) -> list[tuple[Any, ...]]:
        """The rows of the table of groups for the last step, with the columns of `step_metrics.COLUMNS`."""
        return list(self._figures.get("groups_table", ()))

    def state_dict(self) -> dict[str, Any]:
        """The core's state, and the keys of stored rows. Call this after `trained`.

        After loading, rollouts that were running are generated from the beginning.
        """
        return {
            "allocator": self.allocator.state_dict(),
            "keys": [[rollout, list(keys)] for rollout, keys in self._keys.items() if keys],
            "kept": [[rollout, list(keys)] for rollout, keys in self._kept.items()],
            "reading_since": self._reading_since,
            "gave_up": self._gave_up,
        }

    def load_state_dict(self, state: dict[str, Any], present: set[str]) -> set[str]:
        """Restore a saved state. After an error nothing is changed.

        Args:
            state: the result of `state_dict`.
            present: keys of the rows that verl restored.

        Returns:
            Keys of the restored rows that are not needed.

        Raises:
            ValueError: rows are missing, or the recipe, seed or data set differs.
        """
        exact_keys(state, ("allocator", "keys", "kept", "reading_since", "gave_up"), "state of the verl driver")
        keys, kept = ({rollout: tuple(held) for rollout, held in state[name]} for name in ("keys", "kept"))
        needed = {key for of in (keys, kept) for held in of.values() for key in held}
        if missing := needed - present:
            raise ValueError(
                f"{len(missing)} of {len(needed)} rows that the checkpoint's state holds are not in its TransferQueue, "
                f"e.g. {min(missing)}; the checkpoint is corrupt: resume from another checkpoint"
            )
        self.allocator.load_state_dict(state["allocator"])
        self._keys, self._kept = keys, kept
        self._reading_since, self._gave_up = state["reading_since"], state["gave_up"]
        self._step = Step(self._held_groups())
        left = self.allocator.outstanding()
        self._broken_off = left.generate
        # The checkpoint does not say when these groups began, so they get the largest age that may still be trained on.
        groups = self._held_groups().union(order.group for order in left.generate)
        self._begun = dict.fromkeys(groups, self.allocator.version - self.allocator.recipe.max_staleness)
        self._stop(set(left.cancel))
        return present - needed


def _again(key: str, version: int) -> str:
    """The key of a copy of this row, made before this version's batch for the next replay. It has a new uid."""
    # Not by the number of replays, which does not grow if the gate leaves the row out.
    uid, session, row = key.rsplit("_", 2)
    return f"{uid.partition('x')[0]}x{version}_{session}_{row}"


def _stage_of(uid: str) -> int:
    """The stage of a submission, from its uid."""
    return int(uid[uid.index("s") + 1 : uid.index("r")])


def _group_of(uid: str) -> int:
    """The group of a submission, from its uid or the key of one of its rows."""
    return int(uid[1 : uid.index("s")])
