"""A group: one visit of one prompt, the rollouts ordered for it, what came back, and what rules see of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isfinite, isnan
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.events import Done
from rollalloc.core.packing import amount, chance, exact_keys, natural, naturals, pack, rate, sampling_ratio, unpack
from rollalloc.core.phase import Phase
from rollalloc.core.prompt_pool import NEXT_EPOCH, Epochs, Until
from rollalloc.core.statistics import PromptStatistics, Record
from rollalloc.core.table import place


class Group:
    """The allocator's own record of a group. Rules see it through a `GroupView`."""

    __slots__ = (
        "awaited", "baseline", "cancelled", "done", "epoch", "failed", "first_version", "id", "kept", "longest", "owed",
        "phase", "predicted", "prompt", "running", "sampling_ratio", "spans", "stage", "stopped", "tokens", "until", "view",
    )  # fmt: skip

    def __init__(
        self,
        group: int,
        prompt: int,
        epoch: int,
        statistics: PromptStatistics,
        predicted: float | None = None,
        baseline: float | None = None,
        sampling_ratio: float | None = None,
    ) -> None:
        self.id = group
        self.prompt = prompt
        self.predicted, self.baseline, self.sampling_ratio = predicted, baseline, sampling_ratio  # when it was drawn
        self.epoch = epoch  # in which the prompt was drawn
        self.phase = Phase.DRAWN
        self.stage = 0  # that it is in, or has passed last
        self.spans: list[int] = []  # first rollout id ordered by each stage
        self.owed: list[int] = []  # decided, not yet handed out
        self.running: dict[int, None] = {}  # handed out, no terminal event; a set in the order of hand-out
        self.done: list[Done] = []
        self.cancelled = self.failed = 0
        self.kept: dict[int, float] = {}  # rollouts that a stop rule kept -> the probability with which it did
        self.longest: int | None = None  # of its rows, for being that; None: as many as the recipe says
        self.awaited = 0  # cancelled rollouts without a terminal event; the group may be over
        self.stopped: list[int] = []  # tokens of the cancelled rollouts that had any
        self.tokens = 0  # paid for its rollouts
        self.first_version: int | None = None  # oldest first-token version among `done`
        self.until: Until = NEXT_EPOCH
        self.view = GroupView(self, statistics)

    @property
    def unfinished(self) -> int:
        """Rollouts that are still to come."""
        return len(self.running) + len(self.owed)

    def extend(self, first: int, count: int) -> None:
        """Decide `count` more rollouts with ids from `first`, for the group's stage."""
        self.spans.append(first)
        self.owed.extend(range(first, first + count))

    def hand_out(self, most: int) -> Sequence[tuple[int, tuple[int, ...]]]:
        """The next rollouts owed, at most so many, which now run, by the stage that ordered them."""
        now = self.owed[:most]
        del self.owed[:most]
        self.running.update(dict.fromkeys(now))
        return self.by_stage(now)

    def stage_of(self, rollout: int) -> int:
        """Index of the stage that ordered it."""
        return bisect_right(self.spans, rollout) - 1

    def by_stage(self, rollouts: list[int]) -> Sequence[tuple[int, tuple[int, ...]]]:
        """Ascending rollout ids, by the stage that ordered them."""
        if rollouts and rollouts[0] >= self.spans[-1]:  # the common case, without a look at each
            return ((len(self.spans) - 1, tuple(rollouts)),)
        return [(stage, tuple(ids)) for stage, ids in groupby(rollouts, self.stage_of)]

    def cut(self, tokens: int) -> None:
        """A cancelled rollout ended after so many tokens; one that had none says nothing of its length."""
        if tokens:
            self.stopped.append(tokens)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout that ended; of those that were stopped, at least what they would have had."""
        return [*map(_tokens, self.done), *self.stopped]

    def add(self, done: Done) -> None:
        """Take a scored rollout."""
        self.done.append(done)
        if self.first_version is None or done.version < self.first_version:
            self.first_version = done.version

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        done_G8 = np.array([_packed(done) for done in self.done], np.float64).reshape(-1, 8)
        until = {"epochs": self.until.count} if isinstance(self.until, Epochs) else {"version": self.until}
        return {
            "id": self.id, "prompt": self.prompt, "epoch": self.epoch, "stage": self.stage, "phase": self.phase.value,
            "spans": list(self.spans), "owed": list(self.owed), "running": list(self.running),
            "done": pack(done_G8), "cancelled": self.cancelled, "failed": self.failed, "tokens": self.tokens, "until": until,
            "predicted": self.predicted, "baseline": self.baseline, "sampling_ratio": self.sampling_ratio,
            "kept": list(self.kept.items()), "stopped": list(self.stopped), "longest": self.longest,
        }  # fmt: skip

    _SAVED = (
        "id", "prompt", "epoch", "stage", "phase", "spans", "owed", "running", "done", "cancelled", "failed", "tokens",
        "until", "predicted", "baseline", "sampling_ratio", "kept", "stopped",
        "longest",
    )  # fmt: skip

    @staticmethod
    def of_state(state: dict[str, Any], statistics: PromptStatistics) -> Group:
        """The group that `state_dict` was taken of."""
        exact_keys(state, Group._SAVED, "group")
        number, epoch, prompt = natural(state["id"], "id"), natural(state["epoch"], "epoch"), place(state["prompt"])
        predicted, baseline = rate(state["predicted"], "predicted"), amount(state["baseline"], "baseline")
        group = Group(
            number,
            prompt,
            epoch,
            statistics,
            predicted,
            baseline,
            sampling_ratio(state["sampling_ratio"], "sampling_ratio"),
        )
        for name in ("stage", "cancelled", "failed", "tokens"):
            setattr(group, name, natural(state[name], name))
        group.stopped = naturals(state["stopped"], "stopped")
        group.kept = {natural(rollout, "kept"): chance(share, "kept") for rollout, share in state["kept"]}
        group.longest = None if state["longest"] is None else natural(state["longest"], "longest")
        group.phase, group.spans = Phase(state["phase"]), naturals(state["spans"], "spans")
        group.owed = naturals(state["owed"], "owed")
        group.running = dict.fromkeys(naturals(state["running"], "running"))
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
    """A scored rollout as a row of numbers; what is unknown becomes NaN there."""
    first = done.rollout, done.reward, done.metric, done.tokens, done.version
    return *first, last_version(done), done.truncated, done.uncertainty


def last_version(done: Done) -> int:
    """Version of the weights at the rollout's last token."""
    return done.version if done.last_version is None else done.last_version


class GroupView:
    """What a rule may know about a group. Arrays hold the scored rollouts in order of rollout id.

    The order of completion is not visible in the arrays: a rule that reads them decides alike whatever finished first.

    Attributes:
        prompt: index of the prompt.
        running: rollouts still to come.
        unfinished: their number.
        scored: rollouts that are in the arrays.
        cancelled: rollouts of this group that a stop rule stopped, those it kept from being handed out included.
        kept: rollouts that a stop rule let go on, where it chose at random which -> the probability with which each was to.
        longest: rows of it that are trained on for being the longest, decided with its rollouts; None: as many as the view
            says.
        predicted: the success rate that the prompt rule expected when it drew the prompt, None where it expected nothing.
        baseline: the reward that it expected, None where it expected none.
        sampling_ratio: how many times likelier it drew the prompt than a uniform draw would have, None where it is unknown.
        record: the prompt's line in the statistics, from its visits before this one.
    """

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
        longest: int | None = None,
        prompt: int = 0,
        group: int = 0,
        predicted: float | None = None,
        baseline: float | None = None,
        sampling_ratio: float | None = None,
        visits: Sequence[Sequence[float]] = (),
    ) -> GroupView:
        """A view made by hand, for tests and for trying a rule at the prompt.

        Args:
            metrics: one a scored rollout; the other sequences have its length.
            rewards: `metrics` by default.
            tokens: 1 each by default.
            truncated: none by default.
            versions: 0 each by default.
            uncertainties: unknown by default.
            stages: index of the stage that ordered each, not decreasing; 0 each by default.
            running: number of rollouts still to come.
            cancelled: number of rollouts stopped.
            kept: rollouts that a stop rule let go on -> probability, by their place in `metrics` or, those still to come,
                after it; none by default.
            longest: rows of it for being the longest, where the row rule decides that for each group.
            prompt: index of the prompt.
            group: id of the group.
            predicted: the success rate that the prompt rule expected.
            baseline: the reward that it expected.
            sampling_ratio: how many times likelier it was drawn than by a uniform draw.
            visits: the metrics of each of the prompt's visits before this one.
        """
        count = len(metrics)
        stage_G = list(stages) if stages is not None else [0] * count
        statistics = PromptStatistics(prompt + 1, recent=True)
        for earlier in visits:
            statistics.close_visit(prompt, "trained", 0, list(earlier))
        made = Group(group, prompt, 0, statistics, predicted, baseline, sampling_ratio)
        made.spans = [sum(stage < wanted for stage in stage_G) for wanted in range(max(stage_G, default=0) + 1)]
        made.stage, made.cancelled, made.kept = len(made.spans) - 1, cancelled, dict(kept or {})
        made.longest = longest
        for g in range(count):
            reward = metrics[g] if rewards is None else rewards[g]
            made.add(
                Done(
                    rollout=g,
                    reward=float(reward),
                    metric=float(metrics[g]),
                    tokens=1 if tokens is None else tokens[g],
                    version=0 if versions is None else versions[g],
                    truncated=False if truncated is None else truncated[g],
                    uncertainty=None if uncertainties is None else uncertainties[g],
                )
            )
        made.running = dict.fromkeys(range(count, count + running))
        return made.view

    @property
    def prompt(self) -> int:
        return self._group.prompt

    @property
    def predicted(self) -> float | None:
        return self._group.predicted

    @property
    def baseline(self) -> float | None:
        return self._group.baseline

    @property
    def sampling_ratio(self) -> float | None:
        return self._group.sampling_ratio

    @property
    def group(self) -> int:
        """The group's id: a higher one was drawn later."""
        return self._group.id

    @property
    def stage(self) -> int:
        """Index of the stage it is in, or has passed last."""
        return self._group.stage

    @property
    def unfinished(self) -> int:
        return self._group.unfinished

    @property
    def scored(self) -> int:
        """Number of scored rollouts: what the arrays hold, without making them."""
        return len(self._group.done)

    @property
    def whole(self) -> int:
        """Number of scored rollouts of the stage it is in that were not truncated."""
        first = self._group.spans[-1]
        return sum(not done.truncated for done in self._group.done if done.rollout >= first)

    @property
    def running(self) -> Sequence[int]:
        return [*self._group.running, *self._group.owed]

    @property
    def cancelled(self) -> int:
        return self._group.cancelled

    @property
    def kept(self) -> Mapping[int, float]:
        return self._group.kept

    @property
    def longest(self) -> int | None:
        return self._group.longest

    @property
    def kept_G(self) -> NDArray[np.float64]:
        """Probability with which each was kept when late ones were stopped at random, shape (G,); 1 for the others."""
        kept = self._group.kept
        return np.array([kept.get(done.rollout, 1.0) for done in self.in_order], np.float64)

    @property
    def record(self) -> Record:
        return self._statistics.record(self._group.prompt)

    @property
    def first_version(self) -> int:
        """Version of the weights at the first token of its oldest scored rollout; -1 without any."""
        oldest = self._group.first_version
        return -1 if oldest is None else oldest

    @property
    def rollouts_G(self) -> NDArray[np.int64]:
        """Rollout ids, shape (G,), ascending."""
        return self._columns("rollout", np.int64)

    @property
    def rewards_G(self) -> NDArray[np.float64]:
        """What training uses, shape (G,)."""
        return self._columns("reward", np.float64)

    @property
    def metrics_G(self) -> NDArray[np.float64]:
        """What selection looks at, shape (G,)."""
        return self._columns("metric", np.float64)

    @property
    def tokens_G(self) -> NDArray[np.int64]:
        """Lengths in tokens, shape (G,)."""
        return self._columns("tokens", np.int64)

    @property
    def truncated_G(self) -> NDArray[np.bool_]:
        """Whether each hit the length limit, shape (G,)."""
        return self._columns("truncated", np.bool_)

    @property
    def uncertainties_G(self) -> NDArray[np.float64]:
        """What the variance of each one's gradient goes by (see `Done`), shape (G,); NaN where that is unknown."""
        return self._columns("uncertainty", np.float64)

    @property
    def stages_G(self) -> NDArray[np.int64]:
        """Index of the stage that ordered each, shape (G,)."""
        return self._columns("stage", np.int64)

    @property
    def in_order(self) -> Sequence[Done]:
        """The scored rollouts as they were told, in order of rollout id."""
        return self._columns.done

    @property
    def _columns(self) -> _Columns:
        if self._sorted_at != len(self._group.done):
            self._sorted_at = len(self._group.done)
            self._cached = _Columns(sorted(self._group.done, key=_rollout), self._group.spans)
        return self._cached


_rollout, _tokens = map(attrgetter, ("rollout", "tokens"))


class _Columns:
    """The scored rollouts as arrays, each made when first read."""

    __slots__ = ("_made", "_spans", "done")

    def __init__(self, done: list[Done], spans: list[int]) -> None:
        self.done, self._spans = done, list(spans)
        self._made: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, dtype: Any) -> NDArray[Any]:
        """The column of that field of `Done`; "stage" is the number of the stage that ordered each."""
        column = self._made.get(name)
        if column is None:
            if name == "stage":
                values = [bisect_right(self._spans, done.rollout) - 1 for done in self.done]
            else:
                values = list(map(attrgetter(name), self.done))
            column = self._made[name] = np.array(values, dtype)
            column.flags.writeable = False
        return column


def as_floats(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """The values as a finite float array of one axis.

    Raises:
        ValueError: another number of axes, or an entry that is not finite.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    if not isfinite(array.dot(array)) and not np.isfinite(array).all():  # the sum of finite squares may overflow
        raise ValueError(
            f"{name} must be finite, got {array[~np.isfinite(array)][0]} at {int(np.flatnonzero(~np.isfinite(array))[0])}"
        )
    return array
