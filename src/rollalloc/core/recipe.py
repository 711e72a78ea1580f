"""A recipe: a frozen value that says which prompts get how many rollouts, which are stopped, and which are trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import isnan
from typing import Any

import numpy as np

from rollalloc.core.events import Row
from rollalloc.core.packing import describe
from rollalloc.core.rule import (
    AdvantageRule,
    BatchRule,
    IntakeRule,
    JudgeRule,
    PromoteRule,
    PromptRule,
    RowRule,
    Rule,
    SizeRule,
    StopRule,
)

_MOST_FAILURES = 255  # the statistics counts no further


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

    def __post_init__(self) -> None:
        stage = f"stage {self.name!r}"
        _refuse_other(self.size, SizeRule, f"{stage}: size")
        _refuse_other(self.judge, JudgeRule, f"{stage}: judge")
        if self.stop is not None:
            _refuse_other(self.stop, StopRule, f"{stage}: stop")
        _refuse_other(self.promote, PromoteRule, f"{stage}: promote")


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
        TypeError: what is no rule of its place, or one that no checkpoint could name.
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
        _refuse_other(self.prompts, PromptRule, "prompts")
        _refuse_other(self.intake, IntakeRule, "intake")
        _refuse_other(self.rows, RowRule, "rows")
        _refuse_other(self.advantage, AdvantageRule, "advantage")
        if self.over_batch is not None:
            _refuse_other(self.over_batch, BatchRule, "over_batch")
        self._check_rows()
        _ = self.description  # a rule that cannot be described fails here, not at the first checkpoint

    def _check_rows(self) -> None:
        """What the row rule says of itself, and whether it says what others read.

        Raises:
            ValueError: it says no possible number, or nothing where a rule reads it.
        """
        rows, longest = self.group_rows, self.rows.traits.longest
        if rows is not None:
            at_least(f"{self.rows!r}: its trait `rows`", rows, 1, "of a group that it takes at most; or None")
            at_least(f"{self.rows!r}: its trait `longest`", longest, 0, "of its `rows` that it takes for length")
            at_least(f"{self.rows!r}: its trait `rows`", rows, longest, "its trait `longest`")
            return
        if readers := [rule for rule in self.rules if rule.traits.reads_rows]:
            raise ValueError(
                f"{readers[0]!r} reads how many rows of a group are trained on, which {self.rows!r} does not say; replace "
                "both, or take a row rule with the trait `rows`"
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
    def rules(self) -> tuple[Rule, ...]:
        """Every rule: the recipe's own, then those of its stages."""
        own = (self.prompts, self.intake, self.rows, self.advantage, self.over_batch)
        staged = [rule for each in self.stages for rule in (each.size, each.judge, each.stop, each.promote)]
        return tuple(rule for rule in (*own, *staged) if rule is not None)

    @cached_property
    def rate_readers(self) -> tuple[str, ...]:
        """The rules, as text, that take the metric for a success rate: they decide well for metrics in [0, 1] only."""
        return tuple(repr(rule) for rule in self.rules if rule.traits.reads_rate)

    @cached_property
    def group_rows(self) -> int | None:
        """Rows of each group that are trained on at most, as the row rule says; None where it does not say."""
        return self.rows.traits.rows

    @property
    def reads_features(self) -> bool:
        """Whether the prompt rule looks at the table's features."""
        return self.prompts.traits.reads_features

    @property
    def reads_kl(self) -> bool:
        """Whether the prompt rule wants to be told, by `Updated`, how far the weights moved."""
        return self.prompts.traits.reads_kl

    @property
    def reads_uncertainty(self) -> bool:
        """Whether a rule decides by how uncertain rollouts were, so that `Done` should say it."""
        return any("uncertainties_G" in (rule.traits.reads or ()) for rule in self.rules)

    @property
    def reads_latency(self) -> bool:
        """Whether a size rule wants to be told, by `Updated`, how fast the engine decodes."""
        return any(rule.traits.reads_latency for rule in self.rules)

    @property
    def stopping(self) -> tuple[int, ...]:
        """Stages, by their number, whose rollouts may be stopped before they end."""
        return tuple(at for at, stage in enumerate(self.stages) if stage.stop is not None)


def refuse_other(recipe: Any) -> None:
    """Refuse what is no recipe.

    Raises:
        TypeError: says what was expected and what came.
    """
    if isinstance(recipe, Recipe):
        return
    call = f"; call it: recipe={getattr(recipe, '__name__', 'it')}(...)" if callable(recipe) else ""
    named = "; rollalloc.named.make_recipe makes one of a name" if isinstance(recipe, str) else ""
    raise TypeError(
        f"recipe must be a rollalloc Recipe, such as rollalloc.recipes.pilot_commit(), got {recipe!r:.80} of type "
        f"{type(recipe).__name__}{call}{named}"
    )


def refuse_unmeasured(recipe: Recipe, engine: str) -> None:
    """Refuse a recipe that wants to be told how fast an engine decodes which does not measure that.

    Raises:
        ValueError: names the rule, and what to give instead.
    """
    for rule in recipe.rules:
        if rule.traits.reads_latency:
            raise ValueError(
                f"{rule!r} is to be told how fast rollouts are decoded, which {engine} does not measure; give the curve "
                "itself, such as latency=((1, 0.002), (64, 0.004))"
            )


def _refuse_other(rule: Rule, kind: type[Rule], where: str) -> None:
    """Refuse what is no rule of its place.

    Raises:
        TypeError: it does not derive from the base class; says which one that is.
    """
    if not isinstance(rule, kind):
        raise TypeError(
            f"{where}: expected a rule derived from rollalloc.core.rule.{kind.__name__}, got {rule!r}; make yours a frozen "
            "dataclass with that base class"
        )


def at_least(name: str, value: Any, least: int, why: str = "") -> None:
    """Refuse a number that is not a whole one or too small.

    Raises:
        ValueError: says what was expected and what came.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        because = f" ({why})" if why else ""
        raise ValueError(f"{name} must be a whole number of at least {least}{because}, got {value!r}")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a word that is none of those allowed.

    Raises:
        ValueError: says what was expected and what came.
    """
    if value not in (words := tuple(allowed)):
        raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")
