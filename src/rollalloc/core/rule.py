"""Base classes of the rules. A recipe has several slots, and each slot has a base class here.

A rule is a frozen dataclass derived from the base class of its slot, so that recipes can be compared, printed and named
in a checkpoint. A rule decides only from the arguments of its call: the groups (`GroupView`), the run (`View`) and the
prompt rule's memory. A rule's `traits` tell the core how to use the rule. A rule that wraps another rule must forward
the inner rule's traits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import Drawn, GroupView
from rollalloc.core.packing import follow
from rollalloc.core.prompts import NEXT_EPOCH, PromptStatistics, PromptTable, Until

_SHORT = 100  # characters of a rule in an error
Memory = dict[str, Any]  # the state of a prompt or size rule: numpy arrays, numbers, strings and lists of them


class Act(Enum):
    """A judge's choices for a group."""

    NEXT = "next"  # the group waits for the next stage; its running rollouts continue
    TRAIN = "train"  # the group is ready for a batch; its running rollouts are cancelled
    DROP = "drop"  # the group ends; its running rollouts are cancelled


# "open" comes last: it is no end, and `Allocator.accounts` computes it.
CAUSES = ("trained", "zero_variance", "out_of_band", "stale", "surplus", "unselected", "cancelled", "failed", "open")
_DROPS = tuple(cause for cause in CAUSES if cause not in ("trained", "open"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's decision about a group.

    Attributes:
        act: NEXT, TRAIN or DROP.
        reason: for DROP: a known cause, such as "zero_variance" or "out_of_band". A detail may follow after a slash:
            "out_of_band/solved". `Allocator.accounts` counts the rollouts by cause. The prompt's `fate` in the statistics
            is the cause with the detail. For NEXT and TRAIN: any text.
        until: when the prompt may be drawn again: `NOW`, `NEXT_EPOCH`, `NEVER`, `Epochs(k)` (counted from the epoch in
            which the prompt was drawn), or an int, the first version of the weights under which it may be drawn.

    Raises:
        ValueError: the act is DROP and the reason does not begin with a known cause.
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


# A named tuple, because the core makes one after every change, and a frozen dataclass takes several times as long to
# make.
class View(NamedTuple):
    """The run and the recipe's numbers, as rules see them.

    Rules must read the recipe's numbers here, and not store copies, so that a field of the recipe can be changed alone.

    Attributes:
        version: version of the weights, from the last `Updated`.
        epoch: number of the current pass over the prompts, from 0.
        need: number of groups that the next batch still needs. Running groups are not subtracted.
        held_S: number of groups that passed stage s and wait, shape (S,). The last entry counts the groups that are ready
            for a batch.
        running_S: number of groups in stage s that still have rollouts to come, shape (S,).
        in_flight: number of rollouts that were ordered and have no terminal event yet.
        paid: rollouts ordered since the run began, plus rollouts that are decided but not ordered yet.
        left: rollouts that the budgets still allow; None without a limit.
        statistics: the record of every prompt; read only.
        table: the data set, with its features.
        kl_sum: sum of the `approx_kl` of all updates so far, in nats per token; 0 if none was reported.
        groups: groups in a full batch.
        max_staleness: the recipe's `max_staleness`.
        rows: maximum number of rows per group, from the row rule's traits. None: all scored rollouts.
        memory: the prompt rule's memory; read only for all other rules.
    """

    version: int
    epoch: int
    need: int
    held_S: tuple[int, ...]
    running_S: tuple[int, ...]
    in_flight: int
    paid: int
    left: int | None
    statistics: PromptStatistics
    table: PromptTable
    kl_sum: float
    groups: int
    max_staleness: int
    rows: int | None
    memory: Memory

    @staticmethod
    def of(table: int | PromptTable = 1, **known: Any) -> View:
        """Make a view by hand, for tests and for trying out a rule. By default nothing has happened yet.

        Args:
            table: the data set, or its number of prompts.
            known: values of attributes, by name. Attributes without a value get the values of a new run.
        """
        table = PromptTable.of(table)
        given: dict[str, Any] = {
            "version": 0, "epoch": 0, "need": 0, "held_S": (0,), "running_S": (0,), "in_flight": 0, "paid": 0, "left": None,
            "statistics": PromptStatistics(len(table)), "kl_sum": 0.0, "groups": 1, "max_staleness": 0,
            "rows": None, "memory": {},
        }  # fmt: skip
        return View(table=table, **(given | known))

    @property
    def on_the_way(self) -> int:
        """Number of groups that are neither ready for a batch nor over."""
        return sum(self.running_S) + sum(self.held_S[:-1])


def rows_of(view: View) -> int:
    """Return the maximum number of rows per group, for a rule whose trait `reads_rows` is True.

    Raises:
        ValueError: the view does not contain the number. This happens only for a view made by hand.
    """
    if view.rows is None:
        raise ValueError("the view does not say how many rows of a group are trained on; give View.of(rows=...)")
    return view.rows


class SampledStops(NamedTuple):
    """The answer of a stop rule that chooses at random which rollouts of a group continue.

    Attributes:
        cancel: rollouts to stop.
        kept: the rollouts that the rule considered and kept, each with the probability of keeping it, in (0, 1]. Use 1
            for a rollout that was certain to be kept. If an earlier random choice kept the rollout too, use the product of
            both probabilities. Row rules read the mapping as `group.kept` and `group.kept_G`.
    """

    cancel: Sequence[int]
    kept: Mapping[int, float]


# ------------------------------------------------------------------------------------------------------------- traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits that every rule declares.

    Attributes:
        reads: the columns of a group's results that the rule uses for decisions or for learning: any of "rewards_G",
            "metrics_G", "tokens_G", "truncated_G" and "uncertainties_G". The conformance kit changes all other columns
            and expects the same decision. None: not declared.
        reads_rate: the rule reads the metric as a success rate. The core then raises a `MetricError` for metrics outside
            [0, 1].
        reads_rows: the rule reads `view.rows`. Size rules, stop rules and judges may do this. The recipe's row rule
            must then declare its `rows`.
    """

    reads: tuple[str, ...] | None = None
    reads_rate: bool = False
    reads_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTraits(Traits):
    """The traits of a prompt rule.

    Attributes:
        reads_features: the rule uses the table's features.
        reads_kl: the rule needs `Updated.approx_kl`, the KL divergence of each update.
        predicts: the rule predicts a success rate for each prompt, from more evidence than the prompt's last visit alone.
        gives_baseline: whether the rule's draws have a `Drawn.baseline`. None: not declared.
    """

    reads_features: bool = False
    reads_kl: bool = False
    predicts: bool = False
    gives_baseline: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeTraits(Traits):
    """The traits of an intake rule.

    Attributes:
        looks_ahead: the rule also opens groups for the batch after the current batch, if the recipe allows staleness.
        until_stale: the rule opens groups even if enough groups wait. Only `max_staleness` limits the number that wait.
    """

    looks_ahead: bool = False
    until_stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTraits(Traits):
    """The traits of a size rule.

    Attributes:
        most: largest number of rollouts that the rule gives a group. None: not declared.
    """

    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTraits(Traits):
    """The traits of a judge.

    Attributes:
        least_scored: smallest number of scored rollouts with which a group can pass, 1 or more.
        waits_for_all: the judge decides only about complete groups, and the core does not ask it earlier.
        after_failure: when the prompt of a group without any score may be drawn again. The judge is not asked about
            such groups.
        reads_recent: the judge reads `recent_attempts` or `recent_failures` of a prompt's record. Without such a judge,
            the core does not count these numbers.
    """

    least_scored: int = 1
    waits_for_all: bool = False
    after_failure: Until = NEXT_EPOCH
    reads_recent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteTraits(Traits):
    """The traits of a promote rule.

    Attributes:
        in_waves: the rule waits until all groups of the stage have ended. `recipes.streamed` replaces it by `Oldest`.
    """

    in_waves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTraits(Traits):
    """The traits of a row rule.

    Attributes:
        rows: maximum number of rollouts that the rule takes from a group; 1 or more. None: every scored rollout. Size rules,
            stop rules and judges read this number as `view.rows`.
    """

    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageTraits(Traits):
    """The traits of an advantage rule or a batch rule. The core refuses recipes in which every advantage would be 0.

    Attributes:
        compares: the rollouts among which an advantage is a comparison, so that a rollout that is alone among them has the
            advantage 0: "group", all rollouts of its group; "chosen", the rows of its group; "batch", the rows of the
            batch. None: not declared.
        or_baseline: the rule compares a rollout with its prompt's `Drawn.baseline` instead, if there is one.
    """

    compares: Literal["group", "chosen", "batch"] | None = None
    or_baseline: bool = False


# -------------------------------------------------------------------------------------------------------------- rules


class Rule(ABC):  # noqa: B024
    """The base class of all rules. A rule decides one thing in a recipe."""

    __slots__ = ()

    # A `Traits`, or the subclass for the rule's slot, such as `PromptTraits`. A property if it depends on the rule's fields.
    traits: Any = Traits()

    def promises(self, *args: Any, **kwargs: Any) -> Mapping[str, bool]:
        """Check a decision of this rule with a second, independent computation. The conformance kit calls this method.

        Args:
            args: the decision, then the arguments of the call without the random generator. For a prompt rule: the
                result of `pick`, the memory before it, `k`, `free_N` and `view`.
            kwargs: none. This parameter lets each rule name its own arguments.

        Returns:
            A mapping from each promise, in plain words, to whether the decision keeps the promise.
        """
        return {}


def called(rule: Rule) -> str:
    """What an error to a user calls a rule: its `repr`, or its class if the `repr` would fill lines."""
    return text if len(text := repr(rule)) <= _SHORT else type(rule).__name__


class PromptRule(Rule):
    """Chooses the next prompts, before any of their rollouts exist.

    The rule's memory is plain data; the allocator owns and saves it. Arrays whose name ends in `N`, such as `hits_N` or
    `beliefs_EN`, have one entry for each prompt on their last axis.
    """

    __slots__ = ()

    traits: Any = PromptTraits()

    @abstractmethod
    def init(self, table: PromptTable) -> Memory:
        """Return the memory before the first draw."""

    @abstractmethod
    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int | Drawn]:
        """Return at most k different free prompts. Fewer than k means that this epoch has no more prompts."""

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        """Learn from a visit that has ended. Changes `memory`."""

    def prepare(self, memory: Memory, view: View) -> None:
        """Do the long work of learning, such as a fit, so that `pick` is quick. Changes `memory`.

        The core calls this once for each batch that it hands out: after the batch, and before the next event. So drivers can
        have it done while rollouts are generated or weights are trained (`Allocator.rest`), and the decisions are the same
        whenever they do.
        """

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """Return the memory for another data set. The memory is new, except for arrays whose name ends in `N`: they keep
        the entries of the prompts that are in both data sets.

        Args:
            memory: the saved memory.
            source_N: index of each prompt in the old data set, or -1 for a new prompt.
            table: the new data set.
        """
        fresh = self.init(table)
        if fresh.keys() == memory.keys():
            follow(fresh, memory, source_N)
        return fresh

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Raise an exception if the saved memory is invalid for this rule. The core has already checked array shapes."""

    def figures(self, memory: Memory) -> Mapping[str, float]:
        """Return numbers to report, such as the log-loss of the predictions."""
        return {}


class OfferedPromptRule(PromptRule):
    """A prompt rule whose prompts come from a framework's own data loader, through `Offered` events."""

    __slots__ = ()

    @abstractmethod
    def offer(self, memory: Memory, prompts: Sequence[int]) -> None:
        """Store the prompts that the loader offers, in this order."""

    @abstractmethod
    def waiting(self, memory: Memory) -> int:
        """Return the number of prompts that were offered and not drawn yet."""

    @abstractmethod
    def ended(self, memory: Memory) -> bool:
        """Return whether the loader has ended: its last offer was empty."""


class IntakeRule(Rule):
    """Says how many groups to open now. `memory` is the prompt rule's memory."""

    __slots__ = ()

    traits: Any = IntakeTraits()

    @abstractmethod
    def __call__(self, view: View, memory: Memory) -> int: ...


class SizeRule(Rule):
    """Says how many rollouts each group gets, at least 1. The rule is asked about all groups that enter a stage together.

    `memory` is the rule's own memory. The allocator saves it.
    """

    __slots__ = ()

    traits: Any = SizeTraits()

    def init(self, table: PromptTable) -> Memory:
        """Return the memory before the first group. Arrays whose name ends in `N` have one entry for each prompt."""
        return {}

    def observe(self, memory: Memory, group: GroupView) -> None:
        """Learn from a visit in which all rollouts have ended, including stopped rollouts. Changes `memory`."""

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """Return the memory for another data set, see `PromptRule.remap`. `memory` is the saved memory."""
        fresh = self.init(table)
        if fresh.keys() == memory.keys():
            follow(fresh, memory, source_N)
        return fresh

    @abstractmethod
    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]: ...


class StopRule(Rule):
    """Says which rollouts of a group to cancel.

    The core asks the rule after a rollout of the group has ended, and before new rollouts are ordered. A rule that
    chooses at random returns a `SampledStops`. Its probabilities let a row rule weight the kept rollouts.
    """

    __slots__ = ()

    def least_scored(self, view: View) -> int:
        """Number of scored rollouts that a group needs before the rule is asked. `view` has only the recipe's numbers."""
        return 0

    @abstractmethod
    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int] | SampledStops: ...


class JudgeRule(Rule):
    """Decides what happens to a group, or returns None if it is too early to decide.

    The core asks the judge after each terminal event of a group in the stage. Exception: a group that has ended without
    any score is dropped.
    """

    __slots__ = ()

    traits: Any = JudgeTraits()

    @abstractmethod
    def __call__(self, group: GroupView, view: View) -> Verdict | None: ...

    def doubts(self, rollouts: int | None) -> Sequence[str]:
        """Return what the user may not have meant, in sentences without a full stop. Drivers log them before the run.

        Args:
            rollouts: largest number of rollouts of a group after this judge's stage; None if it is not known.
        """
        return ()


class PromoteRule(Rule):
    """Chooses at most k groups that passed a stage. They go on to the next stage or, after the last stage, to a batch."""

    __slots__ = ()

    traits: Any = PromoteTraits()

    @abstractmethod
    def __call__(
        self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator
    ) -> Sequence[GroupView]: ...


class RowRule(Rule):
    """Chooses rows among the scored rollouts of a group. Returns indices into the group's arrays, and weights."""

    __slots__ = ()

    traits: Any = RowTraits()

    @abstractmethod
    def __call__(
        self, group: GroupView, view: View, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]: ...


class AdvantageRule(Rule):
    """Computes the advantage of each chosen rollout of a group, shape (M,)."""

    __slots__ = ()

    traits: Any = AdvantageTraits()

    @abstractmethod
    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]: ...


class BatchRule(Rule):
    """Changes the advantages of a whole batch, for example by a baseline or a scale over all its rows.

    The core calls the rule once for each batch. `advantages` and `chosen` have one array for each group: the
    advantages of its rows and the indices of its rows, shape (M,). `groups` are sorted by id.
    """

    __slots__ = ()

    traits: Any = AdvantageTraits()

    @abstractmethod
    def __call__(
        self,
        advantages: Sequence[NDArray[np.float64]],
        groups: Sequence[GroupView],
        chosen: Sequence[NDArray[np.int64]],
        view: View,
    ) -> Sequence[NDArray[np.float64]]: ...
