"""A recipe: a frozen value that says which prompts get how many rollouts, which are stopped, and which are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from math import isnan
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.events import Row
from rollalloc.core.group import GroupView
from rollalloc.core.packing import describe
from rollalloc.core.prompt_pool import NEXT_EPOCH, Until
from rollalloc.core.statistics import PromptStatistics
from rollalloc.core.table import PromptTable

_MOST_FAILURES = 255  # the statistics counts no further

Memory = dict[str, Any]  # what a prompt rule remembers: numpy arrays, numbers, strings and lists of them


class Act(Enum):
    """What becomes of a group after a verdict."""

    NEXT = "next"  # it waits for the next stage; rollouts still running go on
    TRAIN = "train"  # it waits for a batch; rollouts still running are stopped
    DROP = "drop"  # it is over; rollouts still running are stopped


CAUSES = ("trained", "zero_variance", "out_of_band", "stale", "surplus", "unselected", "cancelled", "failed", "open")
_DROPS = tuple(cause for cause in CAUSES if cause not in ("trained", "open"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's decision about a group.

    Attributes:
        act: NEXT, TRAIN or DROP.
        reason: for DROP the cause under which its rollouts are accounted, "zero_variance" or "out_of_band", with an
            optional detail that only the statistics keeps, e.g. "out_of_band/solved". For the other acts a free word.
        until: when the prompt may be drawn again, counted from the epoch in which it was drawn: `NOW`, `NEXT_EPOCH`,
            `NEVER`, `Epochs(k)`, or an int, the version of the weights from which on.

    Raises:
        ValueError: a DROP whose reason is not a cause.
    """

    act: Act
    reason: str = ""
    until: Until = NEXT_EPOCH

    def __post_init__(self) -> None:
        if self.act is Act.DROP and self.cause not in _DROPS:
            raise ValueError(f"a DROP's reason must begin with one of {', '.join(_DROPS)}, got {self.reason!r}")

    @property
    def cause(self) -> str:
        """The reason without its detail."""
        return self.reason.partition("/")[0]


class View(NamedTuple):
    """What a rule may know about the run, and of the recipe as a whole: no rule has a copy of what is another's.

    Attributes:
        version: of the weights, as last told.
        epoch: passes over the prompts begun, from 0.
        need: groups still lacking for the next batch; those still running are not counted as there.
        held_S: groups that passed stage s and wait, shape (S,); the last entry are those ready for a batch.
        running_S: groups in stage s with rollouts still to come, shape (S,).
        paid: rollouts decided since the run began; those not handed out yet are among them.
        left: rollouts that the budgets still allow, None without a limit.
        statistics: the record of every prompt; read only.
        table: the data set, with its features.
        kl_sum: what `Updated` told of the way the weights went, in all, in nats per token; 0 where it told nothing.
        groups: in a full batch.
        max_staleness: the recipe's.
        rows: of each group that are trained on at most, as the recipe's row rule says; None: every scored one.
        longest: how many of those are the longest, as it says; 0 where it does not choose by length.
        memory: the prompt rule's; read only for all others.
    """

    version: int
    epoch: int
    need: int
    held_S: tuple[int, ...]
    running_S: tuple[int, ...]
    paid: int
    left: int | None
    statistics: PromptStatistics
    table: PromptTable
    kl_sum: float
    groups: int
    max_staleness: int
    rows: int | None
    longest: int
    memory: Memory

    @staticmethod
    def of(
        table: int | PromptTable = 1,
        *,
        version: int = 0,
        epoch: int = 0,
        need: int = 0,
        held_S: tuple[int, ...] = (0,),
        running_S: tuple[int, ...] = (0,),
        paid: int = 0,
        left: int | None = None,
        statistics: PromptStatistics | None = None,
        kl_sum: float = 0.0,
        groups: int = 1,
        max_staleness: int = 0,
        rows: int | None = None,
        longest: int = 0,
        memory: Memory | None = None,
    ) -> View:
        """A view made by hand, for tests and for trying a rule at the prompt; nothing has happened yet, by default."""
        table = PromptTable.of(table)
        statistics = PromptStatistics(len(table)) if statistics is None else statistics
        made = (version, epoch, need, held_S, running_S, paid, left, statistics, table, kl_sum)
        return View(*made, groups, max_staleness, rows, longest, {} if memory is None else memory)

    @property
    def on_the_way(self) -> int:
        """Groups that are neither ready nor over."""
        return sum(self.running_S) + sum(self.held_S[:-1])


class Drawn(NamedTuple):
    """A prompt that a prompt rule drew, with what the rule thought of it. Both travel with the group, and are saved with it.

    Attributes:
        prompt: its index.
        predicted: the success rate expected of it, in [0, 1]: what its metrics should come to; None: nothing is expected.
        baseline: the reward expected of it, finite; None: nothing is expected.
        sampling_ratio: how many times likelier it was to be drawn, first, than if all K candidates looked at were alike:
            K · q, above 0; 1: uniformly. None: unknown.
    """

    prompt: int
    predicted: float | None = None
    baseline: float | None = None
    sampling_ratio: float | None = None


class PromptRule(Protocol):
    """Which prompts are drawn next, before any rollout. Its memory is data, owned and saved by the allocator.

    Arrays of the memory whose name ends in `N`, such as `hits_N` or `beliefs_EN`, have the prompts for their last axis: they
    follow the prompts when the data set changes; everything else begins anew then, unless the rule has a method `remap`
    (see `MovablePromptRule`). What of it is no array is looked at after a load by a method `check` (`CheckedPromptRule`).
    """

    def init(self, table: PromptTable) -> Memory:
        """The memory before the first draw."""
        ...

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int | Drawn]:
        """At most k different prompts among the free ones; fewer say that nothing more is there in this epoch."""
        ...

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        """A visit ended."""
        ...


@runtime_checkable
class MovablePromptRule(Protocol):
    """A prompt rule that takes its memory over to another data set by itself."""

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """The memory for another data set, `table`; `source_N` has each prompt's index in the old one, -1 for a new one."""
        ...


@runtime_checkable
class CheckedPromptRule(Protocol):
    """A prompt rule whose memory holds more than arrays, and that looks at a saved one before it goes on with it."""

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Refuse, by any exception, a memory that the rule cannot have written; its arrays have their shapes already."""
        ...


@runtime_checkable
class OfferedPromptRule(Protocol):
    """A prompt rule fed by a framework's own loader through `Offered`."""

    def offer(self, memory: Memory, prompts: Sequence[int]) -> None:
        """The loader hands these over, in this order."""
        ...

    def waiting(self, memory: Memory) -> int:
        """Number of prompts offered and not yet drawn."""
        ...

    def ended(self, memory: Memory) -> bool:
        """Whether the loader said, by an empty offer, that it has no more."""
        ...


class IntakeRule(Protocol):
    """How many groups to open now; `memory` is the prompt rule's."""

    def __call__(self, view: View, memory: Memory) -> int: ...


class SizeRule(Protocol):
    """How many rollouts each of these groups gets in a stage, decided jointly; each at least 1.

    A size or stop rule with an attribute `reads_rows` that is true needs a row rule that says how many it takes.
    """

    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]: ...


class Sample(NamedTuple):
    """What a stop rule decided that chose at random which of a group's rollouts go on.

    Attributes:
        cancel: rollouts to stop.
        kept: the others that it chose among -> the probability with which each was to be kept, in (0, 1]; 1 where there
            was nothing to choose; of one that was kept before, the product of both. Stored and saved with the group; row
            rules see it as `group.kept` and `group.kept_G`.
    """

    cancel: Sequence[int]
    kept: Mapping[int, float]


class StopRule(Protocol):
    """Which rollouts of a group to cancel. Asked after something ended or went on, before anything new is ordered.

    A rule that chooses at random answers with a `Sample`, so that what goes on can stand for what was stopped. A rule with a
    method `least_scored(view)` is not asked before a group has so many scored rollouts; that is asked for once, as a run
    begins, and what it reads of the view must be the recipe's.
    """

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int] | Sample: ...


class JudgeRule(Protocol):
    """What becomes of a group; None: not yet. Asked after every terminal event of the group while it is in the stage.

    A rule with an attribute `waits_for_all` that is true is asked only when none of the group's rollouts is still to come.
    One with an attribute `reads_rows` that is true needs a row rule that says how many it takes.
    It is not asked about a group without a score, whose prompt comes back at the next epoch, or when the rule's attribute
    `after_failure` says.
    """

    def __call__(self, group: GroupView, view: View) -> Verdict | None: ...


class PromoteRule(Protocol):
    """Which of the groups that passed a stage go on, at most k: into the next stage or, after the last, into a batch."""

    def __call__(
        self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator
    ) -> Sequence[GroupView]: ...


class RowRule(Protocol):
    """Which scored rollouts of a group are trained on: indices into its arrays, and a loss weight for each.

    A rule with an attribute `rows` takes at most so many of a group, and one with an attribute `longest` takes that many for
    being the longest: the rules for sizes and stops read both from the view.
    """

    def __call__(
        self, group: GroupView, view: View, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]: ...


class AdvantageRule(Protocol):
    """The advantage of each chosen rollout, shape (M,)."""

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]: ...


class BatchRule(Protocol):
    """What the batch as a whole makes of its groups' own advantages: a baseline or a scale over all rows.

    Asked once a batch, with the advantages of each group's chosen rows, shape (M,) each, and the groups, in order of group.
    """

    def __call__(
        self, advantages: Sequence[NDArray[np.float64]], groups: Sequence[GroupView], view: View
    ) -> Sequence[NDArray[np.float64]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Rows of earlier batches that are trained on again, beside the fresh ones.

    Attributes:
        rows: replayed in a batch, at most; at least 1.
        times: a rollout is replayed at most so often, at least 1: with its first time it is trained 1 + `times` times.
            None: as often as it is young enough.
        max_staleness: a rollout is replayed while `version - its first-token version` is at most this, at least 1.
        above: only rows whose advantage is above this are kept for replay: 0 for what did better than expected,
            -inf for all.

    Raises:
        ValueError: a number out of its range.
    """

    rows: int
    times: int | None = None
    max_staleness: int
    above: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rows", "max_staleness", *(("times",) if self.times is not None else ())):
            at_least(name, getattr(self, name), 1)
        if isnan(self.above):
            raise ValueError("above must be a number, got nan")

    def takes(self, row: Row, version: int) -> bool:
        """Whether a row that was trained may be trained on again under weights of that version.

        Args:
            row: as it was trained last.
            version: of the weights of the batch that it would be in.
        """
        young = version - row.version <= self.max_staleness
        return young and (self.times is None or row.replays < self.times) and row.advantage > self.above


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits that are never exceeded, not by one rollout; in tokens, by no more than what was running. None: no limit.

    Attributes:
        run_rollouts: rollouts ordered in the whole run.
        run_tokens: generated tokens in the whole run.
        batch_rollouts: rollouts ordered between two batches. A batch they do not fill is short; where they give no group to
            train on at all, the run is finished.
        batch_tokens: generated tokens between two batches, likewise.

    Raises:
        ValueError: a limit below 1.
    """

    run_rollouts: int | None = None
    run_tokens: int | None = None
    batch_rollouts: int | None = None
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("run_rollouts", "run_tokens", "batch_rollouts", "batch_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, or None for no limit, got {limit}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a group's way.

    Attributes:
        name: for reports, e.g. "pilot".
        size: rollouts for each group that enters it.
        judge: what becomes of a group whose results come in.
        stop: which rollouts to cancel; None: nothing is stopped early.
        promote: which of the groups that passed it go on, into the next stage or, after the last, into a batch.
    """

    name: str
    size: SizeRule
    judge: JudgeRule
    stop: StopRule | None
    promote: PromoteRule


@dataclass(frozen=True)
class Recipe:
    """A whole method as one value: comparable, with a readable repr and a fingerprint.

    Closed: what one field says no other one copies. Rules read it from the `View`, so that a recipe with a field replaced is
    the recipe that would have been made so.

    Attributes:
        groups: groups in a full batch, at least 1.
        stages: at least one; a group goes through them in order.
        prompts: which prompts are drawn.
        intake: how many groups are opened.
        rows: which scored rollouts of a group are trained on.
        advantage: their advantages.
        max_staleness: a rollout is trained while `version - its first-token version` is at most this, 0 or more.
        max_candidates: groups opened for one batch at most; None: no limit. Then the batch is short; where not one group is
            ready, the count begins anew.
        budget: limits on rollouts and tokens.
        quarantine_after: a prompt is not drawn again after so many visits in a row that gave no score because rollouts
            failed, in [1, 255]; None: it is tried for ever.
        over_batch: what the whole batch makes of the advantages; None: nothing.
        replay: rows of earlier batches that are trained on again; None: none.

    Raises:
        TypeError: a rule that is a lambda or a closure, which no checkpoint could name.
        ValueError: a number out of its range, those included that the row rule says of itself, or a rule that reads how many
            rows a group has where no rule says it.
    """

    groups: int
    stages: tuple[Stage, ...]
    prompts: PromptRule
    intake: IntakeRule
    rows: RowRule
    advantage: AdvantageRule
    max_staleness: int
    max_candidates: int | None
    budget: Budget
    quarantine_after: int | None
    over_batch: BatchRule | None = None
    replay: Replay | None = None

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)
        at_least("max_staleness", self.max_staleness, 0)
        if self.max_candidates is not None:
            at_least("max_candidates", self.max_candidates, 1)
        if self.quarantine_after is not None:
            at_least("quarantine_after", self.quarantine_after, 1)
            if self.quarantine_after > _MOST_FAILURES:
                raise ValueError(f"quarantine_after must be at most {_MOST_FAILURES}, got {self.quarantine_after}")
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ValueError("a recipe needs at least one stage, got none")
        self._check_rows()
        _ = self.description  # a rule that cannot be described fails here, not at the first checkpoint

    def _check_rows(self) -> None:
        """What the row rule says of itself, and whether it says what others read.

        Raises:
            ValueError: it says no possible number, or nothing where a rule reads it.
        """
        rows = self.group_rows
        if rows is not None:
            at_least(f"{self.rows!r}: its attribute `rows`", rows, 1, "of a group that it takes at most; or None")
            longest = getattr(self.rows, "longest", 0)
            at_least(f"{self.rows!r}: its attribute `longest`", longest, 0, "of its `rows` that it takes for length")
            at_least(f"{self.rows!r}: its attribute `rows`", rows, longest, "its attribute `longest`")
        readers = [
            rule
            for each in self.stages
            for rule in (each.size, each.stop, each.judge)
            if getattr(rule, "reads_rows", False)
        ]
        if readers and self.group_rows is None:
            raise ValueError(
                f"{readers[0]!r} reads how many rows of a group are trained on, which {self.rows!r} does not say; replace "
                "both, or take a row rule with an attribute `rows`"
            )

    def replace(self, *, stage: str | None = None, **changes: Any) -> Recipe:
        """The recipe with other rules or numbers, those of its stage (`size`, `judge`, `stop`, `promote`) included.

        Args:
            stage: name of the stage that these are of, where the recipe has several.
            changes: fields of the recipe or of the stage by name, and what they are to be.

        Raises:
            TypeError: a name that neither has.
            ValueError: several stages and no name of one of them; values that no recipe can have.
        """
        known = [field.name for field in fields(Stage)[1:]]
        own = {name: value for name, value in changes.items() if name not in known}
        if unknown := [name for name in own if name not in [field.name for field in fields(self)]]:
            raise TypeError(
                f"a recipe has no {unknown[0]!r}; it has {', '.join(field.name for field in fields(self))}, "
                f"and its stages {', '.join(known)}"
            )
        if len(own) < len(changes) or stage is not None:
            names = [each.name for each in self.stages]
            if len(names) > 1 if stage is None else stage not in names:
                raise ValueError(f"stage must be one of {', '.join(map(repr, names))}, got {stage!r}")
            at = 0 if stage is None else names.index(stage)
            changed = replace(self.stages[at], **{name: changes[name] for name in known if name in changes})
            own["stages"] = (*self.stages[:at], changed, *self.stages[at + 1 :])
        return replace(self, **own)

    @property
    def trains_older_rows(self) -> bool:
        """Whether a batch may have rows sampled from weights before its own: held ones, or replayed ones."""
        return self.max_staleness > 0 or self.replay is not None

    @cached_property
    def description(self) -> Any:
        """The recipe as nested plain data; two recipes are the same when these are equal."""
        return describe(self)

    @cached_property
    def rate_readers(self) -> tuple[str, ...]:
        """The rules, as text, that take the metric for a success rate: they decide well for metrics in [0, 1] only.

        A rule says so by an attribute of its class, `reads_rate = True`.
        """
        slots = [getattr(self, field.name) for field in fields(self) if field.name != "stages"]
        slots += [getattr(stage, field.name) for stage in self.stages for field in fields(stage)]
        return tuple(repr(rule) for rule in slots if getattr(rule, "reads_rate", False))

    @property
    def group_rows(self) -> int | None:
        """Rows of each group that are trained on at most, as the row rule says; None where it does not say."""
        return getattr(self.rows, "rows", None)

    @property
    def reads_features(self) -> bool:
        """Whether the prompt rule looks at the table's features; it says so by an attribute of its class."""
        return bool(getattr(self.prompts, "reads_features", False))

    @property
    def reads_kl(self) -> bool:
        """Whether the prompt rule wants to be told, by `Updated`, how far the weights moved; it says so likewise."""
        return bool(getattr(self.prompts, "reads_kl", False))

    @property
    def stopping(self) -> tuple[int, ...]:
        """Stages, by their number, whose rollouts may be stopped before they end."""
        return tuple(at for at, stage in enumerate(self.stages) if stage.stop is not None)


def rows_of(view: View) -> int:
    """Rows of a group that the recipe trains on, for a rule with `reads_rows`.

    Raises:
        ValueError: the view does not say; only one made by hand may not.
    """
    if view.rows is None:
        raise ValueError("the view does not say how many rows of a group are trained on; give View.of(rows=...)")
    return view.rows


def at_least(name: str, value: Any, least: int, why: str = "") -> None:
    """Refuse a number that is not a whole one or too small.

    Raises:
        ValueError: says what was expected and what came.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        because = f" ({why})" if why else ""
        raise ValueError(f"{name} must be a whole number of at least {least}{because}, got {value!r}")
