"""A group is one visit of one prompt: the rollouts ordered for it and their results. Rules see it through a `GroupView`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from itertools import accumulate, groupby, pairwise
from math import isfinite, isnan
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.events import Done
from rollalloc.core.packing import amount, natural, naturals, number, pack, unpack
from rollalloc.core.prompts import NEXT_EPOCH, Epochs, PromptStatistics, Record, Until


class Phase(Enum):
    """The phase of a group."""

    DRAWN = "drawn"  # its prompt is drawn, no rollout is decided yet
    RUNNING = "running"  # rollouts of its stage are decided; the judge is asked as they end
    WAITING = "waiting"  # it passed a stage and waits for the next one
    READY = "ready"  # it waits for a batch; no more rollouts will come
    TRAINED = "trained"  # over: it was in a batch
    DROPPED = "dropped"  # over: none of its rollouts was trained on

    __hash__ = object.__hash__  # phases are looked up very often, and the hash of Enum is slow


OVER = frozenset({Phase.TRAINED, Phase.DROPPED})

# All legal transitions.
FOLLOWING: dict[Phase, frozenset[Phase]] = {
    Phase.DRAWN: frozenset({Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.READY, Phase.DROPPED}),
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.DROPPED}),
    Phase.READY: frozenset({Phase.TRAINED, Phase.DROPPED}),
    Phase.TRAINED: frozenset(),
    Phase.DROPPED: frozenset(),
}


class Drawn(NamedTuple):
    """A prompt that a prompt rule drew, with the rule's expectations.

    Attributes:
        prompt: index of the prompt.
        predicted: expected success rate (the expected mean metric), in [0, 1]. None: no expectation.
        baseline: expected reward, finite. None: no expectation.
        sampling_ratio: K · q, above 0. K is the number of candidates, and q is the probability that this prompt was drawn
            first. The ratio is 1 if all candidates were equally likely. None: unknown.
    """

    prompt: int
    predicted: float | None = None
    baseline: float | None = None
    sampling_ratio: float | None = None


class Group:
    """The allocator's own record of a group. Rules see it through a `GroupView`."""

    __slots__ = (
        "awaited", "cancelled", "done", "drawn", "epoch", "failed", "first_version", "id", "kept", "limit", "owed", "phase",
        "prompt", "running", "size", "spans", "stage", "stopped", "tokens", "until", "view",
    )  # fmt: skip

    def __init__(self, group: int, drawn: Drawn, epoch: int, statistics: PromptStatistics) -> None:
        self.id = group
        self.prompt, self.drawn = drawn.prompt, drawn
        self.epoch = epoch  # epoch in which the prompt was drawn
        self.phase = Phase.DRAWN
        self.limit: int | None = None  # maximum tokens of its rollouts, where the recipe has a limit
        self.stage = 0  # the stage of the group, or the last stage that it passed
        self.spans: list[int] = []  # first rollout id ordered by each stage
        self.size = 0  # rollouts decided so far, in all stages
        self.owed: list[int] = []  # rollouts that are decided and not ordered yet
        self.running: dict[int, None] = {}  # ordered rollouts without a terminal event; dict keys keep their order
        self.done: list[Done] = []
        self.cancelled = self.failed = 0
        self.kept: dict[int, float] = {}  # maps a rollout to the probability with which a stop rule kept it
        self.awaited = 0  # number of cancelled rollouts without a terminal event
        self.stopped: list[int] = []  # number of tokens of each cancelled rollout that had generated tokens
        self.tokens = 0  # tokens paid for its rollouts
        # Kept up to date by `add`, because every event asks for it.
        self.first_version: int | None = None  # lowest `version` of the rollouts in `done`
        self.until: Until = NEXT_EPOCH
        self.view = GroupView(self, statistics)

    @property
    def unfinished(self) -> int:
        """Number of rollouts that are still to come."""
        return len(self.running) + len(self.owed)

    def extend(self, first: int, count: int) -> None:
        """Add `count` decided rollouts to the group's stage. Their ids start at `first`."""
        self.spans.append(first)
        self.size += count
        self.owed.extend(range(first, first + count))

    def hand_out(self, most: int) -> Sequence[tuple[int, tuple[int, ...]]]:
        """Mark at most `most` decided rollouts as running. Return these rollouts, grouped by the stage that ordered them."""
        now, running = self.owed[:most], self.running
        del self.owed[:most]
        for rollout in now:
            running[rollout] = None
        return self.by_stage(now)

    def stage_of(self, rollout: int) -> int:
        """Index of the stage that ordered this rollout."""
        return bisect_right(self.spans, rollout) - 1

    def by_stage(self, rollouts: list[int]) -> Sequence[tuple[int, tuple[int, ...]]]:
        """Group ascending rollout ids by the stage that ordered them."""
        if rollouts and rollouts[0] >= self.spans[-1]:  # fast path: all belong to the last stage
            return ((len(self.spans) - 1, tuple(rollouts)),)
        return [(stage, tuple(ids)) for stage, ids in groupby(rollouts, self.stage_of)]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout that ended. For a stopped rollout, the number is a lower bound of its full length."""
        return [*map(_tokens, self.done), *self.stopped]

    def add(self, done: Done) -> None:
        """Add a scored rollout."""
        self.done.append(done)
        if self.first_version is None or done.version < self.first_version:
            self.first_version = done.version

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON data."""
        done_G8 = np.array([_packed(done) for done in self.done], np.float64).reshape(-1, 8)
        until = {"epochs": self.until.count} if isinstance(self.until, Epochs) else {"version": self.until}
        return {
            "id": self.id, "drawn": list(self.drawn), "epoch": self.epoch, "stage": self.stage, "phase": self.phase.value,
            "spans": list(self.spans), "owed": list(self.owed), "running": list(self.running),
            "done": pack(done_G8), "cancelled": self.cancelled, "failed": self.failed, "tokens": self.tokens, "until": until,
            "kept": list(self.kept.items()), "stopped": list(self.stopped), "size": self.size, "limit": self.limit,
        }  # fmt: skip

    @staticmethod
    def of_state(state: dict[str, Any], drawn: Drawn, statistics: PromptStatistics) -> Group:
        """Restore a group from its `state_dict`. `drawn` replaces the entry "drawn"."""
        group = Group(natural(state["id"], "id"), drawn, natural(state["epoch"], "epoch"), statistics)
        for name in ("stage", "cancelled", "failed", "tokens", "size"):
            setattr(group, name, natural(state[name], name))
        for name in ("stopped", "spans", "owed"):
            setattr(group, name, naturals(state[name], name))
        if state["limit"] is not None:
            number(state["limit"], "limit", "at least 1, or null", lambda value: value >= 1)
            group.limit = natural(state["limit"], "limit")
        group.running = dict.fromkeys(naturals(state["running"], "running"))
        for rollout, share in state["kept"]:
            group.kept[natural(rollout, "kept")] = number(share, "kept", "in (0, 1]", lambda value: 0 < value <= 1)
        group.phase = Phase(state["phase"])
        for rollout, reward, metric, tokens, version, last, truncated, known in unpack(state["done"]).tolist():
            uncertainty = None if isnan(known) else amount(known, "uncertainty")
            done = Done(
                int(rollout), reward, metric, int(tokens), int(version), int(last), bool(truncated), uncertainty
            )
            group.add(done)
        until = state["until"]
        group.until = natural(until["version"], "until") if "version" in until else Epochs(until["epochs"])
        return group


def _packed(done: Done) -> tuple[float | None, ...]:
    """A scored rollout as a row of numbers; unknown values become NaN."""
    first = done.rollout, done.reward, done.metric, done.tokens, done.version
    return *first, last_version(done), done.truncated, done.uncertainty


def last_version(done: Done) -> int:
    """Version of the weights at the rollout's last token."""
    return done.version if done.last_version is None else done.last_version


def _of_group(name: str) -> Any:
    """Make a property that returns the attribute `name` of the view's `Group`."""
    return property(attrgetter(f"_group.{name}"))


def _column(field: str, dtype: type) -> Any:
    """Make a property that returns one array of the view's `_Columns`."""
    return property(lambda view: view._columns(field, dtype))


class GroupView:
    """A group as rules see it. The arrays contain the scored rollouts, sorted by rollout id.

    Decisions made from the arrays cannot depend on the order in which the rollouts ended.

    Attributes:
        prompt: index of the prompt.
        group: id of the group. Groups that were drawn later have higher ids.
        stage: index of the stage of the group, or of the last stage that it passed.
        running: ids of the rollouts still to come.
        unfinished: number of rollouts still to come.
        scored: number of rollouts in the arrays.
        cancelled: number of rollouts of this group that a stop rule stopped, including rollouts that were not ordered.
        lengths: tokens of each rollout that ended, in no particular order. For a stopped rollout, the number is a lower
            bound of its full length.
        kept: maps a rollout's id to the probability with which a stop rule kept it; empty if no rule chose at random.
        limit: maximum tokens of the group's rollouts, where the recipe's `Limit` gives the group one; else None.
        size: number of rollouts decided for the group so far, in all stages, including failed and stopped rollouts.
        predicted: success rate that the prompt rule predicted when it drew the prompt; None without a prediction.
        baseline: reward that the prompt rule expected when it drew the prompt; None without an expectation.
        sampling_ratio: the probability of the draw, divided by the probability of a uniform draw (see `Drawn`); None if
            unknown.
        record: the prompt's record in the statistics, from its earlier visits.
        rollouts_G: rollout ids, shape (G,), ascending.
        rewards_G: the rewards, for training, shape (G,).
        metrics_G: the metrics, for selection, shape (G,).
        tokens_G: lengths in tokens, shape (G,).
        truncated_G: whether each rollout stopped at the length limit, shape (G,).
        uncertainties_G: the uncertainty of each rollout (see `Done`), shape (G,); NaN if unknown.
        stages_G: index of the stage that ordered each rollout, shape (G,).
    """

    prompt: int = _of_group("prompt")
    group: int = _of_group("id")
    stage: int = _of_group("stage")
    predicted: float | None = _of_group("drawn.predicted")
    baseline: float | None = _of_group("drawn.baseline")
    sampling_ratio: float | None = _of_group("drawn.sampling_ratio")
    unfinished: int = _of_group("unfinished")
    cancelled: int = _of_group("cancelled")
    kept: Mapping[int, float] = _of_group("kept")
    limit: int | None = _of_group("limit")
    size: int = _of_group("size")
    lengths: Sequence[int] = _of_group("lengths")
    rollouts_G: NDArray[np.int64] = _column("rollout", np.int64)
    rewards_G: NDArray[np.float64] = _column("reward", np.float64)
    metrics_G: NDArray[np.float64] = _column("metric", np.float64)
    tokens_G: NDArray[np.int64] = _column("tokens", np.int64)
    truncated_G: NDArray[np.bool_] = _column("truncated", np.bool_)
    uncertainties_G: NDArray[np.float64] = _column("uncertainty", np.float64)
    stages_G: NDArray[np.int64] = _column("stage", np.int64)

    __slots__ = ("_cached", "_group", "_sorted_at", "_statistics")

    def __init__(self, group: Group, statistics: PromptStatistics) -> None:
        self._group, self._statistics = group, statistics
        self._sorted_at = -1

    @staticmethod
    def of(
        metrics: Sequence[float],
        *,
        rewards: Sequence[float] | None = None,
        tokens: Sequence[int] | None = None,
        truncated: Sequence[bool] | None = None,
        versions: Sequence[int] | None = None,
        uncertainties: Sequence[float | None] | None = None,
        stages: Sequence[int] | None = None,
        running: int = 0,
        cancelled: int = 0,
        kept: Mapping[int, float] | None = None,
        prompt: int = 0,
        group: int = 0,
        predicted: float | None = None,
        baseline: float | None = None,
        sampling_ratio: float | None = None,
        visits: Sequence[Sequence[float]] = (),
        limit: int | None = None,
    ) -> GroupView:
        """Make a view by hand, for tests and for trying out a rule.

        Args:
            metrics: the metric of each scored rollout; the other sequences have the same length.
            rewards: equal to `metrics` by default.
            tokens: 1 each by default.
            truncated: none by default.
            versions: 0 each by default.
            uncertainties: unknown by default.
            stages: index of the stage that ordered each rollout, in ascending order; all 0 by default.
            running: number of rollouts still to come.
            cancelled: number of rollouts that were stopped.
            kept: maps a rollout's position in `metrics` to the probability with which a stop rule kept it. Rollouts
                still to come have the positions after the end of `metrics`. None: no rule chose at random.
            prompt: index of the prompt.
            group: id of the group.
            predicted: success rate that the prompt rule predicted.
            baseline: reward that the prompt rule expected.
            sampling_ratio: the probability of the draw, divided by the probability of a uniform draw.
            visits: metrics of each earlier visit of the prompt.
            limit: maximum tokens of the group's rollouts.
        """
        count = len(metrics)

        def column(given: Sequence[Any] | None, usual: Any) -> Sequence[Any]:
            return [usual] * count if given is None else given

        stage_G = column(stages, 0)
        statistics = PromptStatistics(prompt + 1, recent=True)
        for earlier in visits:
            statistics.close_visit(prompt, "trained", 0, list(earlier))
        made = Group(group, Drawn(prompt, predicted, baseline, sampling_ratio), 0, statistics)
        made.spans = [sum(stage < wanted for stage in stage_G) for wanted in range(max(stage_G, default=0) + 1)]
        made.stage, made.cancelled, made.kept = len(made.spans) - 1, cancelled, dict(kept or {})
        columns = [column(tokens, 1), column(versions, 0), column(truncated, False), column(uncertainties, None)]
        for g, (reward, metric, length, version, cut, uncertainty) in enumerate(
            zip(metrics if rewards is None else rewards, metrics, *columns, strict=True)
        ):
            made.add(Done(g, float(reward), float(metric), length, version, None, cut, uncertainty))
        made.running = dict.fromkeys(range(count, count + running))
        made.size, made.limit = count + running + cancelled, limit
        return made.view

    @property
    def scored(self) -> int:
        """Number of scored rollouts. Reading it does not build the arrays."""
        return len(self._group.done)

    @property
    def whole(self) -> int:
        """Number of scored rollouts of the current stage that were not truncated."""
        first = self._group.spans[-1]
        return sum(not done.truncated for done in self._group.done if done.rollout >= first)

    @property
    def running(self) -> Sequence[int]:
        return [*self._group.running, *self._group.owed]

    @property
    def kept_G(self) -> NDArray[np.float64]:
        """Probability with which a stop rule kept each rollout, shape (G,). It is 1 if no stop rule chose at random."""
        kept = self._group.kept
        return np.array([kept.get(done.rollout, 1.0) for done in self.in_order], np.float64)

    @property
    def record(self) -> Record:
        return self._statistics.record(self._group.prompt)

    @property
    def first_version(self) -> int:
        """Version of the weights at the first token of the oldest scored rollout; -1 without a scored rollout."""
        oldest = self._group.first_version
        return -1 if oldest is None else oldest

    @property
    def in_order(self) -> Sequence[Done]:
        """The scored rollouts as `Done` events, sorted by rollout id."""
        return self._columns.done

    @property
    def _columns(self) -> _Columns:
        group = self._group
        # Results are only ever added, so the arrays are valid while their number is the same.
        if self._sorted_at != len(group.done):
            self._sorted_at = len(group.done)
            self._cached = _Columns(sorted(group.done, key=_rollout), group.spans)
        return self._cached


_FIELDS = {field.name: attrgetter(field.name) for field in fields(Done)}
_rollout, _tokens = _FIELDS["rollout"], _FIELDS["tokens"]


class _Columns:
    """The scored rollouts as arrays. Each array is built when it is first read."""

    __slots__ = ("_made", "_spans", "done")

    def __init__(self, done: list[Done], spans: list[int]) -> None:
        self.done, self._spans = done, spans  # spans of later stages begin after every rollout in `done`
        self._made: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, dtype: Any) -> NDArray[Any]:
        """The array of one field of `Done`, or, for "stage", the index of the stage that ordered each rollout."""
        column = self._made.get(name)
        if column is None:
            if name == "stage":
                values = [bisect_right(self._spans, done.rollout) - 1 for done in self.done]
            else:
                values = list(map(_FIELDS[name], self.done))
            column = self._made[name] = np.array(values, dtype)
            column.flags.writeable = False
        return column


def parts(flat_R: ArrayLike, sizes: Sequence[int], dtype: Any = None) -> list[NDArray[Any]]:
    """Split values over a whole batch into one array for each group, of these sizes."""
    flat_R = np.asarray(flat_R, dtype)
    return [flat_R[first:end] for first, end in pairwise(accumulate(sizes, initial=0))]


def as_floats(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return the values as a finite float array with one axis.

    Raises:
        ValueError: the number of axes is not one, or a value is not finite.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    if not isfinite(array.dot(array)) and not np.isfinite(array).all():  # the first test is fast, but may overflow
        raise ValueError(
            f"{name} must be finite, got {array[~np.isfinite(array)][0]} at {int(np.flatnonzero(~np.isfinite(array))[0])}"
        )
    return array
