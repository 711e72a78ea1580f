"""A recipe says which prompts get how many rollouts, which rollouts are stopped, and which are trained on.

Recipes that can never teach are refused here, and settings that were probably not meant are named, before the first rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import ceil, isnan
from typing import Any

import numpy as np

from rollalloc.core.events import Row
from rollalloc.core.packing import describe
from rollalloc.core.prompts import Epochs, Record, Until
from rollalloc.core.rule import (
    AdvantageRule,
    AdvantageTraits,
    BatchRule,
    IntakeRule,
    JudgeRule,
    PromoteRule,
    PromptRule,
    RowRule,
    Rule,
    SizeRule,
    SizeTraits,
    StopRule,
    called,
)

_MOST_FAILURES = 255  # the statistics store this count in one byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Leave replayed rows out, and pause replay, where the policy has moved too far away from them.

        moved > most:  the batch is trained without its replayed rows, and the next `pause` batches have none

    `moved` is the share of the replayed rows' tokens whose probability has changed by more than a factor
    (`rollalloc.models.settings.has_moved`). The trainer measures it under the weights that the batch is about to
    change, and reports it as `Moved`. New rows are always trained on.

    Attributes:
        most: largest share of moved tokens with which replayed rows are trained on, in [0, 1].
        pause: number of batches without replay after a batch that was beyond the bound; 0 or more.

    Raises:
        ValueError: a number is out of its range.
    """

    most: float
    pause: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.most <= 1:
            raise ValueError(f"most must be a share of tokens in [0, 1], got {self.most!r}")
        at_least("pause", self.pause, 0)

    def opens(self, moved: float) -> bool:
        """Whether replayed rows of which this share of tokens has moved are trained on."""
        return moved <= self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Train again on rows of earlier batches, in addition to the new rows.

    Attributes:
        rows: maximum number of replayed rows in a batch; at least 1.
        times: maximum number of replays of a rollout, in addition to its first batch; at least 1. None: any number.
        max_staleness: maximum age of a replayed rollout; at least 1. The age is the batch's `version` minus the version of
            the rollout's first token.
        above: only rows with an advantage above this number are kept for replay. 0 keeps rows that did better than
            expected; -inf keeps all rows.
        gate: when the replayed rows of a batch are left out. None: never.

    Raises:
        ValueError: a number is out of its range.
    """

    rows: int
    times: int | None = None
    max_staleness: int
    above: float = 0.0
    gate: Gate | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "max_staleness", *(("times",) if self.times is not None else ())):
            at_least(name, getattr(self, name), 1)
        if isnan(self.above):
            raise ValueError("above must be a number, got nan")

    def takes(self, row: Row, version: int) -> bool:
        """Return whether a row that was trained on may be replayed in a batch with this version of the weights.

        Args:
            row: the row as it was last trained.
            version: version of the weights.
        """
        young = version - row.version <= self.max_staleness
        return young and (self.times is None or row.replays < self.times) and row.advantage > self.above


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Do not draw a prompt again whose recorded success rate has reached a level. ScaleRL, arXiv 2510.13786.

        1 - recent_failures / recent_attempts ≥ level  and  attempts ≥ least        (see `Record`)

    In this rate, an attempt counts half after 64 later attempts on the same prompt, so that failures of the untrained
    policy lose their influence. Other reasons for which a prompt is not drawn still hold.

    Attributes:
        level: success rate from which a prompt is retired, in (0, 1].
        epochs: the prompt is tried again after this number of epochs, counted from its last draw; at least 1. It is retired
            again if its rate has still reached the level. None: never, as in the paper.
        least: number of scored rollouts that a prompt must have, in all its visits, before it can be retired; at least 1.

    Raises:
        ValueError: a number is out of its range.
    """

    level: float = 0.9
    epochs: int | None = None
    least: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.level <= 1:
            raise ValueError(f"level must be a success rate in (0, 1], got {self.level!r}")
        if self.epochs is not None:
            at_least("epochs", self.epochs, 1, "None: a retired prompt is never tried again")
        at_least("least", self.least, 1)

    def until(self, record: Record, otherwise: Until) -> Until:
        """When a prompt with this record may be drawn again. `otherwise`: the answer if it is not retired."""
        few = record.attempts < self.least
        if few or record.recent_failures > (1 - self.level) * record.recent_attempts + _ROUNDING:
            return otherwise
        if isinstance(otherwise, Epochs) and _longer(otherwise.count, self.epochs):
            return otherwise
        return Epochs(self.epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Stop rollouts at a length that few right rollouts exceed.

        limit = the ⌈share · n⌉th smallest length of the last n right rollouts of groups without a limit

    A rollout is right if its metric is at least 0.5. One that reaches the limit is stopped and scored as it is, so that it
    mostly counts as wrong; nothing is generated in its place. Where wrong rollouts are longer than right ones, this saves
    more tokens than right rollouts. It is a bias against long answers. So groups take turns: of each `every` batches' worth
    of groups, the first has no limit and shows how long right answers are now. No group has a limit before 16 right
    rollouts are known.

    In the success rates of prompts, which rules and `Retire` read, a stopped rollout counts as it was scored. Most stopped
    rollouts are wrong, so rates without them would be too high.

    Attributes:
        share: share of these right rollouts that fit the limit, in (0, 1].
        every: number of batches' worth of groups, of which one has no limit; at least 2.
        last: maximum number of right rollouts that count, the newest ones; at least 16.

    Raises:
        ValueError: a number is out of its range.
    """

    share: float = 0.95
    every: int = 8
    last: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be a share of right rollouts in (0, 1], got {self.share!r}")
        at_least("every", self.every, 2, "of so many batches' worth of groups, one has no limit")
        at_least("last", self.last, LEAST_RIGHT)

    def of(self, lengths: Sequence[int]) -> int | None:
        """The limit by the lengths of right rollouts; None if too few are known."""
        if len(lengths) < LEAST_RIGHT:
            return None
        # As a fraction of whole numbers: 0.8 · 20 is a little more than 16 for a float.
        at = ceil(Fraction(str(self.share)) * len(lengths)) - 1
        return max(1, sorted(lengths)[at])


LEAST_RIGHT = 16  # right rollouts that must be known before there is a limit
RIGHT = 0.5  # metric from which a rollout is right
_ROUNDING = 1e-3  # rounding error of recent counts, which are stored as float16


def _longer(one: int | None, other: int | None) -> bool:
    """Whether one number of epochs is more than another; None is for ever."""
    return one is None or (other is not None and one > other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a run; None means no limit.

    Limits on rollouts are never exceeded. Limits on tokens are exceeded at most by the rollouts that were running when
    the limit was reached.

    Attributes:
        run_rollouts: rollouts ordered in the whole run.
        run_tokens: tokens generated in the whole run.

    Raises:
        ValueError: a limit is below 1.
    """

    run_rollouts: int | None = None
    run_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("run_rollouts", "run_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, or None for no limit, got {limit}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage that a group goes through.

    Attributes:
        name: for reports, such as "pilot".
        size: number of rollouts for each group that enters the stage.
        judge: decides what happens to a group as its results arrive.
        stop: which rollouts to cancel. None: no rollout is stopped early.
        promote: chooses among the groups that passed the stage. The chosen groups go on to the next stage or, after the
            last stage, to a batch.
    """

    name: str
    size: SizeRule
    judge: JudgeRule
    stop: StopRule | None
    promote: PromoteRule

    def __post_init__(self) -> None:
        slots = {"size": SizeRule, "judge": JudgeRule, "promote": PromoteRule}
        _refuse_others(self, slots | ({} if self.stop is None else {"stop": StopRule}), f"stage {self.name!r}: ")


# Without slots, because cached properties need a `__dict__`.
@dataclass(frozen=True)
class Recipe:
    """A whole method as a value that can be compared, printed and fingerprinted.

    `dataclasses.replace` may change any field alone, because rules read the recipe's numbers from the `View`.

    Attributes:
        groups: groups in a full batch, at least 1.
        stages: the stages that a group goes through, in order; at least one.
        prompts: which prompts are drawn.
        intake: how many groups are opened.
        rows: which scored rollouts of a group are trained on.
        advantage: the advantages of these rows.
        max_staleness: maximum age of a rollout that is trained on, 0 or more. The age is the batch's `version` minus the
            version of the rollout's first token.
        max_candidates: maximum number of groups opened for one batch, at least `groups`. When the limit is reached, a short
            batch is made; if no group is ready, the count starts again. None: no limit.
        budget: limits on rollouts and tokens.
        quarantine_after: a prompt is no longer drawn if this many visits in a row ended without a score because rollouts
            failed; in [1, 255]. None: every prompt is tried again.
        over_batch: a rule that changes the advantages over the whole batch. None: no change.
        replay: whether and how rows of earlier batches are trained on again. None: no replay.
        retire: whether and when prompts with a high success rate are no longer drawn. None: no prompt is retired.
        limit: whether rollouts are stopped at a length that few right rollouts exceed. None: they are not.

    Raises:
        TypeError: a slot does not hold a rule with the base class of the slot, or a rule has no stable description.
        ValueError: a number is out of its range, a rule reads the number of rows per group and the row rule does not
            declare this number, or there are both a limit and a stop rule.
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
    retire: Retire | None = None
    limit: Limit | None = None

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)
        at_least("max_staleness", self.max_staleness, 0)
        if self.max_candidates is not None:
            at_least("max_candidates", self.max_candidates, self.groups, f"a batch has {self.groups} groups")
        if self.quarantine_after is not None:
            at_least("quarantine_after", self.quarantine_after, 1)
            if self.quarantine_after > _MOST_FAILURES:
                raise ValueError(f"quarantine_after must be at most {_MOST_FAILURES}, got {self.quarantine_after}")
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ValueError("a recipe needs at least one stage, got none")
        slots = {"prompts": PromptRule, "intake": IntakeRule, "rows": RowRule, "advantage": AdvantageRule}
        _refuse_others(self, slots | ({} if self.over_batch is None else {"over_batch": BatchRule}))
        self._check_rows()
        if self.limit is not None and self.stopping:
            # Stop rules compare lengths; those that a limit has cut would tell them nothing.
            stage = self.stages[self.stopping[0]]
            raise ValueError(
                f"a recipe has a limit (limit_at) or stops rollouts by a rule, not both: the stage {stage.name!r} has "
                f"{stage.stop!r}"
            )
        _ = self.description  # if a rule cannot be described, raise now instead of at the first checkpoint

    def _check_rows(self) -> None:
        """Check the row rule's trait `rows`. It must not be None if another rule reads `view.rows`."""
        if self.group_rows is not None:
            at_least(
                f"{called(self.rows)}: its trait `rows`",
                self.group_rows,
                1,
                "the maximum rows per group; None: no maximum",
            )
            return
        if readers := [rule for rule in self.rules if rule.traits.reads_rows]:
            raise ValueError(
                f"{called(readers[0])} reads the number of rows per group, but {called(self.rows)} does not declare it; use "
                "a row rule with the trait `rows`, or replace both rules"
            )

    def replace(self, *, stage: str | None = None, **changes: Any) -> Recipe:
        """Return a copy of the recipe in which fields of the recipe or of one stage, such as `judge`, have new values.

        Args:
            stage: name of the stage to change; required if the recipe has several stages.
            changes: new values for fields of the recipe or of the stage, by field name.

        Raises:
            TypeError: neither the recipe nor the stage has a field of that name.
            ValueError: the recipe has several stages and `stage` does not name one of them, or a value is not allowed.
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
        """Whether a batch may contain rows sampled by older weights, because groups wait or rows are replayed."""
        return self.max_staleness > 0 or self.replay is not None

    @cached_property
    def description(self) -> Any:
        """The recipe as nested plain data. Two recipes are the same if their descriptions are equal."""
        return describe(self)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Every rule: first the recipe's own rules, then the rules of its stages."""
        own = (self.prompts, self.intake, self.rows, self.advantage, self.over_batch)
        staged = [rule for each in self.stages for rule in (each.size, each.judge, each.stop, each.promote)]
        return tuple(rule for rule in (*own, *staged) if rule is not None)

    @cached_property
    def rate_readers(self) -> tuple[str, ...]:
        """The `repr` of every rule that reads the metric as a success rate. Such rules need metrics in [0, 1]."""
        values = (repr(value) for value in (self.retire, self.limit) if value is not None)
        return (*(repr(rule) for rule in self.rules if rule.traits.reads_rate), *values)

    @cached_property
    def group_rows(self) -> int | None:
        """The maximum number of rows per group; None if the row rule does not declare it."""
        return self.rows.traits.rows

    @property
    def gate(self) -> Gate | None:
        """When the replayed rows of a batch are left out; None: never, or no row is replayed."""
        return None if self.replay is None else self.replay.gate

    @property
    def reads_features(self) -> bool:
        """Whether the prompt rule uses the table's features."""
        return self.prompts.traits.reads_features

    @property
    def reads_kl(self) -> bool:
        """Whether the prompt rule needs `Updated.approx_kl`."""
        return self.prompts.traits.reads_kl

    @property
    def reads_uncertainty(self) -> bool:
        """Whether a rule uses `Done.uncertainty`."""
        return any("uncertainties_G" in (rule.traits.reads or ()) for rule in self.rules)

    @property
    def stopping(self) -> tuple[int, ...]:
        """Indices of the stages whose rollouts may be stopped before they end."""
        return tuple(at for at, stage in enumerate(self.stages) if stage.stop is not None)


def refuse_other(recipe: Any) -> None:
    """Raise a TypeError if the argument is not a recipe."""
    if isinstance(recipe, Recipe):
        return
    call = f"; call it: recipe={getattr(recipe, '__name__', 'it')}(...)" if callable(recipe) else ""
    named = "; rollalloc.named.make_recipe(name) returns a recipe by its name" if isinstance(recipe, str) else ""
    raise TypeError(
        f"recipe must be a rollalloc Recipe, such as rollalloc.recipes.pilot_commit(), got {recipe!r:.80} of type "
        f"{type(recipe).__name__}{call}{named}"
    )


def _refuse_others(holder: Recipe | Stage, slots: Mapping[str, type[Rule]], where: str = "") -> None:
    """Raise a TypeError if a slot does not hold a rule with the base class of the slot."""
    for slot, kind in slots.items():
        if not isinstance(rule := getattr(holder, slot), kind):
            raise TypeError(
                f"{where}{slot}: expected a rule derived from rollalloc.core.rule.{kind.__name__}, got {rule!r}; write your "
                "rule as a frozen dataclass with that base class"
            )


def at_least(name: str, value: Any, least: int, why: str = "") -> None:
    """Raise a ValueError if the value is not a whole number of at least `least`. `why` is added to its message."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        because = f" ({why})" if why else ""
        raise ValueError(f"{name} must be a whole number of at least {least}{because}, got {value!r}")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise a ValueError if the value is not one of the allowed words."""
    if value not in (words := tuple(allowed)):
        raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")


def refuse_unteachable(recipe: Recipe) -> None:
    """Raise a ValueError if the recipe can never teach, see `unteachable`."""
    if why := unteachable(recipe):
        raise ValueError(why)


def doubts(recipe: Recipe) -> list[str]:
    """What the user may not have meant, for drivers to log before the run, such as a window that no group can hit."""
    rollouts_S = _most_rollouts(recipe)
    doubts = [
        doubt
        for stage, rollouts in zip(recipe.stages, rollouts_S, strict=True)
        for doubt in stage.judge.doubts(rollouts)
    ]
    return [*doubts, *_doubts_of_replay(recipe), *_doubts_of_limit(recipe)]


def _doubts_of_replay(recipe: Recipe) -> list[str]:
    """More rows to replay than batches of the allowed age have."""
    replay, sizes = recipe.replay, (recipe.group_rows, _most_rollouts(recipe)[-1])
    each = min((most for most in sizes if most is not None), default=None)
    most = None if replay is None or each is None else recipe.groups * each * replay.max_staleness
    if replay is None or most is None or replay.rows <= most:
        return []
    why = (
        f"replay of {replay.rows:,} rows: batches of {recipe.groups} × {each} have {most:,} rows at most that are no "
        f"older than {replay.max_staleness} updates, so no batch gets more; allow older rows or replay fewer"
    )
    return [why]


def _doubts_of_limit(recipe: Recipe) -> list[str]:
    """A level of retirement that no prompt reaches, because the limit stops right rollouts, which then count as wrong."""
    limit, retire = recipe.limit, recipe.retire
    if limit is None or retire is None:
        return []
    limited = (limit.every - 1) / limit.every
    seen = 1 - limited * (1 - limit.share)
    if retire.level <= seen:
        return []
    why = (
        f"retire_at={retire.level:g} with limit_at={limit.share:g}: in {limit.every - 1} of {limit.every} batches, the "
        f"limit stops about {1 - limit.share:.0%} of the right rollouts, which then count as wrong, so a prompt that is "
        f"always right has a success rate of about {seen:.2f} and is hardly ever retired; lower retire_at, or raise limit_at"
    )
    return [why]


def unteachable(recipe: Recipe) -> str | None:
    """The reason why every advantage would be 0, or why no group could ever be trained on; None if neither is known.

    Only what the rules declare in their traits is known: the sizes, the rows and what the advantages compare.
    """
    rollouts_S = _most_rollouts(recipe)
    for stage, rollouts in zip(recipe.stages, rollouts_S, strict=True):
        needed = stage.judge.traits.least_scored
        if rollouts is not None and rollouts < needed:
            return (
                f"{called(stage.judge)} lets a group pass only if it has at least {needed} scored rollouts, but after the "
                f"stage {stage.name!r} it has {rollouts} at most; generate more rollouts"
            )
    rows = min((most for most in (recipe.group_rows, rollouts_S[-1]) if most is not None), default=None)
    compared = {"group": rollouts_S[-1], "chosen": rows, "batch": None if rows is None else rows * recipe.groups}
    for rule in (recipe.advantage, recipe.over_batch):
        if rule is None:
            continue
        traits = rule.traits
        if not isinstance(traits, AdvantageTraits) or traits.compares is None:
            continue
        if rule is recipe.advantage and not _keeps_zeros(recipe):
            continue
        if traits.or_baseline and recipe.prompts.traits.gives_baseline is not False:
            continue
        if compared[traits.compares] == 1:
            alone = "group" if traits.compares == "chosen" and rollouts_S[-1] == 1 else traits.compares
            return f"{called(rule)} {_ALONE[alone]}"
    return None


_ALONE = {
    "group": "compares the rollouts of a prompt, but the recipe generates one rollout of each, so every advantage would be "
    "0; use reinforce for one rollout per prompt, or generate at least 2",
    "chosen": "compares the rows of a prompt, but the recipe trains on one row of each, so every advantage would be 0; "
    "train on at least 2 rows of each prompt",
    "batch": "compares the rows of a batch, but a batch has one row, so every advantage would be 0; train on more groups",
}


def _most_rollouts(recipe: Recipe) -> list[int | None]:
    """The largest number of rollouts of a group after each stage; None if a size rule does not declare it."""
    sizes = [stage.size.traits for stage in recipe.stages]
    most_S = [traits.most if isinstance(traits, SizeTraits) else None for traits in sizes]
    return list(accumulate(most_S, lambda before, most: None if before is None or most is None else before + most))


def _keeps_zeros(recipe: Recipe) -> bool:
    """Whether advantages of 0 are known to stay 0 over the batch. A batch rule without this trait may use the rewards."""
    rule = recipe.over_batch
    return rule is None or (isinstance(rule.traits, AdvantageTraits) and rule.traits.compares is not None)
