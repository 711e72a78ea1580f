"""Rules: what decides at one place of a recipe. A base class for each place, and what each says of itself.

A rule is a frozen dataclass derived from the base class of its place, so that a recipe with it can be compared, printed and
found again in a checkpoint. What it decides by is in its call: groups (`GroupView`), the run (`View`), the prompt rule's
memory. What the core must know before it asks is in its `traits`, one value, which a rule around another one hands on whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.latency import Curve
from rollalloc.core.packing import follow
from rollalloc.core.prompt_pool import NEXT_EPOCH, Until
from rollalloc.core.statistics import PromptStatistics
from rollalloc.core.table import PromptTable

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
        in_flight: rollouts handed out and not over yet.
        paid: rollouts decided since the run began; those not handed out yet are among them.
        left: rollouts that the budgets still allow, None without a limit.
        statistics: the record of every prompt; read only.
        table: the data set, with its features.
        latency: how fast the engine decodes, as `Updated` last told; None: it never did.
        kl_sum: what `Updated` told of the way the weights went, in all, in nats per token; 0 where it told nothing.
        groups: in a full batch.
        max_staleness: the recipe's.
        rows: of each group that are trained on at most, as the recipe's row rule says; None: every scored one.
        longest: how many of those are the longest, at most, as it says; 0 where it does not choose by length. Of each
            group: `longest_of`, and `group.longest` once its rollouts are decided.
        row_rule: the recipe's, which says how many of each group's are the longest; None: `longest` of each.
        memory: the prompt rule's; read only for all others.
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
    latency: Curve | None
    groups: int
    max_staleness: int
    rows: int | None
    longest: int
    row_rule: RowRule | None
    memory: Memory

    @staticmethod
    def of(table: int | PromptTable = 1, **known: Any) -> View:
        """A view made by hand, for tests and for trying a rule at the prompt; nothing has happened yet, by default.

        Args:
            table: the data set.
            known: any of the attributes.
        """
        table = PromptTable.of(table)
        given: dict[str, Any] = {
            "version": 0, "epoch": 0, "need": 0, "held_S": (0,), "running_S": (0,), "in_flight": 0, "paid": 0, "left": None,
            "statistics": PromptStatistics(len(table)), "kl_sum": 0.0, "latency": None, "groups": 1, "max_staleness": 0,
            "rows": None, "longest": 0, "row_rule": None, "memory": {},
        }  # fmt: skip
        return View(table=table, **(given | known))

    @property
    def on_the_way(self) -> int:
        """Groups that are neither ready nor over."""
        return sum(self.running_S) + sum(self.held_S[:-1])


def rows_of(view: View) -> int:
    """Rows of a group that the recipe trains on, for a rule whose traits say `reads_rows`.

    Raises:
        ValueError: the view does not say; only one made by hand may not.
    """
    if view.rows is None:
        raise ValueError("the view does not say how many rows of a group are trained on; give View.of(rows=...)")
    return view.rows


def longest_of(groups: Sequence[GroupView], sizes: Sequence[int], view: View) -> Sequence[int]:
    """Rows of each group that would be trained on for being the longest, were so many rollouts ordered for it now."""
    own = None if view.row_rule is None else view.row_rule.longest_of(groups, sizes, view)
    return [view.longest] * len(groups) if own is None else own


def longest_in(group: GroupView, view: View) -> int:
    """Rows of a group that are trained on for being the longest: its own number, or the recipe's."""
    return view.longest if group.longest is None else group.longest


class Drawn(NamedTuple):
    """A prompt that a prompt rule drew, with what the rule expects of it. Both travel with the group, and are saved with it.

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


# ------------------------------------------------------------------------------------------------------------- traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What every rule says of itself.

    Attributes:
        reads: columns of a group's results that decide, of "rewards_G", "metrics_G", "tokens_G", "truncated_G" and
            "uncertainties_G"; for a prompt rule, that it learns from. The conformance kit asks again with all others
            changed. None: it does not say.
        reads_rate: it takes the metric for a success rate: one outside [0, 1] is refused by a `MetricError`.
        reads_rows: a size or stop rule, or a judge, that reads `view.rows`: the recipe's row rule must say how many.
        reads_latency: a size rule that wants to be told, by `Updated`, how fast the engine decodes.
    """

    reads: tuple[str, ...] | None = None
    reads_rate: bool = False
    reads_rows: bool = False
    reads_latency: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTraits(Traits):
    """What a prompt rule says of itself.

    Attributes:
        reads_features: it looks at the table's features.
        reads_kl: it wants to be told, by `Updated`, how far the weights moved.
        predicts: it expects a success rate of each prompt, by more than how its last visit went.
    """

    reads_features: bool = False
    reads_kl: bool = False
    predicts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeTraits(Traits):
    """What an intake rule says of itself.

    Attributes:
        looks_ahead: where the recipe allows staleness it opens groups for a batch beyond the one in the making.
        until_stale: it opens groups however many wait, so that only their age bounds them: `max_staleness` rounds of it.
    """

    looks_ahead: bool = False
    until_stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTraits(Traits):
    """What a judge says of itself.

    Attributes:
        waits_for_all: it decides on complete groups only, and is not asked before.
        after_failure: when the prompt of a group without a score comes back, of which it is not asked.
        reads_recent: it reads `recent_attempts` and `recent_failures` of a prompt's record, which are kept for it.
    """

    waits_for_all: bool = False
    after_failure: Until = NEXT_EPOCH
    reads_recent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteTraits(Traits):
    """What a promote rule says of itself.

    Attributes:
        in_waves: it suits rollouts that come in waves; where they stream `recipes.streamed` puts another in its place.
    """

    in_waves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTraits(Traits):
    """What a row rule says of itself; sizes and stops read both from the view.

    Attributes:
        rows: rollouts that it takes of a group at most, 1 or more; None: every scored one.
        longest: how many of these for being the longest, at most.
    """

    rows: int | None = None
    longest: int = 0


# -------------------------------------------------------------------------------------------------------------- rules


class Rule(ABC):  # noqa: B024
    """What decides at one place of a recipe."""

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        """What the core must know before it asks; one around another rule hands on that one's."""
        return Traits()

    def promises(self, *args: Any, **kwargs: Any) -> Mapping[str, bool]:
        """What must hold of a decision, by another way than the rule's own; the conformance kit asks for it.

        Args:
            args: what was decided, then the arguments of the call less the random generator. For a prompt rule: what `pick`
                gave, the memory before, `k`, `free_N` and `view`.
            kwargs: none; rules name their arguments as they like.

        Returns:
            Each promise in plain words -> whether it is kept.
        """
        return {}


class PromptRule(Rule):
    """Which prompts are drawn next, before any rollout. Its memory is data, owned and saved by the allocator.

    Arrays of the memory whose name ends in `N`, such as `hits_N` or `beliefs_EN`, have the prompts for their last axis.
    """

    __slots__ = ()

    @property
    def traits(self) -> PromptTraits:
        return PromptTraits()

    @abstractmethod
    def init(self, table: PromptTable) -> Memory:
        """The memory before the first draw."""

    @abstractmethod
    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int | Drawn]:
        """At most k different prompts among the free ones; fewer say that nothing more is there in this epoch."""

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        """A visit ended."""

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """The memory for another data set; arrays of names in `N` follow their prompts, all else begins anew.

        Args:
            memory: the saved one.
            source_N: each prompt's index in the old data set, -1 for a new one.
            table: the other data set.
        """
        fresh = self.init(table)
        if fresh.keys() == memory.keys():
            follow(fresh, memory, source_N)
        return fresh

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Refuse, by any exception, a saved memory that the rule cannot have written; its arrays have their shapes."""

    def figures(self, memory: Memory) -> Mapping[str, float]:
        """What it reports, such as how good its predictions were."""
        return {}


class OfferedPromptRule(PromptRule):
    """A prompt rule fed by a framework's own loader through `Offered`."""

    __slots__ = ()

    @abstractmethod
    def offer(self, memory: Memory, prompts: Sequence[int]) -> None:
        """The loader hands these over, in this order."""

    @abstractmethod
    def waiting(self, memory: Memory) -> int:
        """Number of prompts offered and not yet drawn."""

    @abstractmethod
    def ended(self, memory: Memory) -> bool:
        """Whether the loader said, by an empty offer, that it has no more."""


class IntakeRule(Rule):
    """How many groups to open now; `memory` is the prompt rule's."""

    __slots__ = ()

    @property
    def traits(self) -> IntakeTraits:
        return IntakeTraits()

    @abstractmethod
    def __call__(self, view: View, memory: Memory) -> int: ...


class SizeRule(Rule):
    """How many rollouts each of these groups gets in a stage, decided jointly; each at least 1."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, groups: Sequence[GroupView], view: View, memory: Memory) -> Sequence[int]: ...


class StopRule(Rule):
    """Which rollouts of a group to cancel. Asked after something ended or went on, before anything new is ordered.

    One that chooses at random answers with a `Sample`, so that what goes on can stand for what was stopped.
    """

    __slots__ = ()

    def least_scored(self, view: View) -> int:
        """Scored rollouts of a group before which it is not asked; what it reads of the view must be the recipe's."""
        return 0

    @abstractmethod
    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int] | Sample: ...


class JudgeRule(Rule):
    """What becomes of a group; None: not yet. Asked after every terminal event of the group while it is in the stage.

    It is not asked about a group without a score.
    """

    __slots__ = ()

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits()

    @abstractmethod
    def __call__(self, group: GroupView, view: View) -> Verdict | None: ...


class PromoteRule(Rule):
    """Which of the groups that passed a stage go on, at most k: into the next stage or, after the last, into a batch."""

    __slots__ = ()

    @property
    def traits(self) -> PromoteTraits:
        return PromoteTraits()

    @abstractmethod
    def __call__(
        self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator
    ) -> Sequence[GroupView]: ...


class RowRule(Rule):
    """Which scored rollouts of a group are trained on: indices into its arrays, and a loss weight for each."""

    __slots__ = ()

    @property
    def traits(self) -> RowTraits:
        return RowTraits()

    def longest_of(self, groups: Sequence[GroupView], sizes: Sequence[int], view: View) -> Sequence[int] | None:
        """How many of each group's rows it takes for being the longest, from 0 to its trait `longest`.

        Asked as the rollouts of these groups are decided; the groups keep it, and are saved with it.

        Args:
            groups: those that enter a stage together.
            sizes: rollouts that each gets in that stage.
            view: of the run.

        Returns:
            One number for each group; None: the trait `longest` of all.
        """
        return None

    def longest_promises(
        self, made: Sequence[int], groups: Sequence[GroupView], sizes: Sequence[int], view: View
    ) -> Mapping[str, bool]:
        """What must hold of `longest_of`, where it answers with numbers, as `promises` of the choice of rows."""
        return {}

    @abstractmethod
    def __call__(
        self, group: GroupView, view: View, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]: ...


class AdvantageRule(Rule):
    """The advantage of each chosen rollout, shape (M,)."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]: ...


class BatchRule(Rule):
    """What the batch as a whole makes of its groups' own advantages: a baseline or a scale over all rows.

    Asked once a batch, with the advantages of each group's chosen rows, shape (M,) each, the groups, in order of group, and
    which of each one's rollouts the rows are, shape (M,).
    """

    __slots__ = ()

    @abstractmethod
    def __call__(
        self,
        advantages: Sequence[NDArray[np.float64]],
        groups: Sequence[GroupView],
        chosen: Sequence[NDArray[np.int64]],
        view: View,
    ) -> Sequence[NDArray[np.float64]]: ...
