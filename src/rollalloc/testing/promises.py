"""Check every decision of a recipe's rules against what the rules promise.

A rule states its promises in `promises`, and the columns that it reads in its trait `reads` (`rollalloc.core.rule`). The
kit wraps each rule of a recipe, and checks each decision against the rule's promises. Then the kit calls the rule again
with other values in the columns that the rule does not read. The decision must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import InitVar, dataclass, replace
from random import Random
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe, Stage
from rollalloc.core.rule import (
    AdvantageRule,
    BatchRule,
    IntakeRule,
    JudgeRule,
    Memory,
    OfferedPromptRule,
    PromoteRule,
    PromptRule,
    RowRule,
    SampledStops,
    SizeRule,
    StopRule,
    Verdict,
    View,
)
from rollalloc.testing.audit import expect

_COLUMNS = ("rewards_G", "metrics_G", "tokens_G", "truncated_G", "uncertainties_G")


def watched(recipe: Recipe, like: Recipe | None) -> tuple[Recipe, dict[int, Verdict]]:
    """Return the recipe with every rule watched, and a dictionary of the last verdict on each group, by its id.

    Args:
        recipe: the recipe whose rules decide.
        like: the recipe whose promises are checked. It must have the same number of stages. None: no promises are checked.
    """
    log: dict[int, Verdict] = {}
    kept: dict[int, dict[int, float]] = {}  # by group id: rollouts that stop rules kept, with their probabilities

    def watch(stage: Stage, like: Stage | None) -> Stage:
        return replace(
            stage,
            size=WatchedSize(stage.size, like and like.size),
            judge=WatchedJudge(stage.judge, like and like.judge, log),
            stop=stage.stop and WatchedStop(stage.stop, like and like.stop, kept),
            promote=WatchedPromote(stage.promote, like and like.promote),
        )

    likes = [None] * len(recipe.stages) if like is None else like.stages
    prompts = WatchedOffered if isinstance(recipe.prompts, OfferedPromptRule) else WatchedPrompts
    under_watch = replace(
        recipe,
        stages=tuple(watch(own, other) for own, other in zip(recipe.stages, likes, strict=True)),
        prompts=prompts(recipe.prompts, like and like.prompts),
        intake=WatchedIntake(recipe.intake, like and like.intake),
        rows=WatchedRows(recipe.rows, like and like.rows, kept),
        advantage=WatchedAdvantage(recipe.advantage, like and like.advantage),
        over_batch=recipe.over_batch and WatchedBatch(recipe.over_batch, like and like.over_batch),
    )
    return under_watch, log


@dataclass(frozen=True, repr=False)
class _Watch:
    """Wraps a rule: forwards its traits, and checks its decisions against promises.

    Attributes:
        rule: the rule that decides.
        promised: the rule whose promises are checked, usually the same rule. None: no promises are checked.
    """

    rule: Any
    promised: Any

    def __repr__(self) -> str:
        return repr(self.rule)

    @property
    def traits(self) -> Any:
        return self.rule.traits

    def promises(self, *args: Any, **kwargs: Any) -> Mapping[str, bool]:
        return self.rule.promises(*args, **kwargs)

    @property
    def _reads(self) -> tuple[str, ...] | None:
        return None if self.promised is None else self.promised.traits.reads

    def _keep(self, made: Any, *seen: Any) -> None:
        promised = {} if self.promised is None else self.promised.promises(made, *seen)
        for promise, kept in promised.items():
            if not kept:  # only then a text is made of what may be long
                expect(9, False, f"{self.rule!r} does not keep: {promise}; it made {_plain(made)}{_about(seen)}")

    def _expect_alike(self, made: Any, again: Any, *seen: Any) -> None:
        if _plain(made) != _plain(again):
            others = ", ".join(name for name in _COLUMNS if name not in (self._reads or ()))
            raise_of = f"{_plain(made)} or, where {others} differ, {_plain(again)}{_about(seen)}"
            expect(9, False, f"{self.rule!r} reads more than its trait `reads` declares: it made {raise_of}")


class _Called(_Watch):
    """Wraps a rule that is called like a function."""

    draws: ClassVar = False  # whether the last argument of the rule is a random generator

    def __call__(self, *seen: Any) -> Any:
        drawn, reads = self.draws, self._reads
        said = seen[:-1] if drawn else seen
        # The second call must draw the same numbers, and must not advance the core's generator.
        rng = (deepcopy(seen[-1].bit_generator),) if drawn and reads is not None else ()
        made = self.rule(*seen)
        self._keep(made, *said)
        if reads is not None:
            again = self.rule(*(_changed(value, reads) for value in said), *map(np.random.Generator, rng))
            self._expect_alike(made, again, *said)
        return made


class WatchedIntake(_Called, IntakeRule): ...


class WatchedSize(_Called, SizeRule):
    """A size rule that uses the memory of the rule that it watches."""

    def init(self, table: PromptTable) -> Memory:
        return self.rule.init(table)

    def observe(self, memory: Memory, group: GroupView) -> None:
        self.rule.observe(memory, group)


class WatchedPromote(_Called, PromoteRule):
    draws: ClassVar = True


class WatchedAdvantage(_Called, AdvantageRule): ...


class WatchedBatch(_Called, BatchRule): ...


@dataclass(frozen=True, repr=False)
class WatchedJudge(_Called, JudgeRule):
    """Records each verdict."""

    log: InitVar[dict[int, Verdict]]

    def __post_init__(self, log: dict[int, Verdict]) -> None:
        vars(self)["log"] = log  # not a field, because the comparison of recipes must not depend on recorded verdicts

    def __call__(self, *seen: Any) -> Any:
        made = super().__call__(*seen)
        if made is not None:
            vars(self)["log"][seen[0].group] = made
        return made


@dataclass(frozen=True, repr=False)
class _Shown(_Called):
    """Wraps a stop rule or row rule, which sees the rollouts that an earlier random decision kept."""

    draws: ClassVar = True
    kept: InitVar[dict[int, dict[int, float]]]

    def __post_init__(self, kept: dict[int, dict[int, float]]) -> None:
        vars(self)["kept"] = kept

    def _expect_shown(self, seen: tuple[Any, ...]) -> None:
        told, shown = vars(self)["kept"].get(seen[0].group, {}), dict(seen[0].kept)
        expect(9, shown == told, f"{self!r} is shown that {shown} were kept, a stop rule kept {told}{_about(seen)}")


@dataclass(frozen=True, repr=False)
class WatchedStop(_Shown, StopRule):
    """Records which rollouts were kept at random."""

    def least_scored(self, view: View) -> int:
        return self.rule.least_scored(view)

    def __call__(self, *seen: Any) -> Any:
        made = super().__call__(*seen)
        if not isinstance(made, SampledStops):
            self._expect_shown(seen)
        else:
            vars(self)["kept"].setdefault(seen[0].group, {}).update(made.kept)
        return made


@dataclass(frozen=True, repr=False)
class WatchedRows(_Shown, RowRule):
    """Wraps a row rule."""

    def __call__(self, *seen: Any) -> Any:
        made = super().__call__(*seen)
        self._expect_shown(seen)
        return made


@dataclass(frozen=True, repr=False)
class WatchedPrompts(_Watch, PromptRule):
    """Wraps a prompt rule that draws by itself."""

    def init(self, table: PromptTable) -> Memory:
        return self.rule.init(table)

    def pick(self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator) -> Any:
        before = deepcopy(memory) if self.promised is not None else memory
        made = self.rule.pick(memory, k, free_N, view, rng)
        self._keep(made, before, k, free_N, view)
        return made

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        reads = self._reads
        again = None if reads is None else deepcopy(memory)
        self.rule.observe(memory, group, view)
        if reads is not None:
            self.rule.observe(again, _changed(group, reads), view)
            self._expect_alike(memory, again, group)

    def prepare(self, memory: Memory, view: View) -> None:
        self.rule.prepare(memory, view)

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        return self.rule.remap(memory, source_N, table)

    def check(self, memory: Memory, table: PromptTable) -> None:
        self.rule.check(memory, table)

    def figures(self, memory: Memory) -> Mapping[str, float]:
        return self.rule.figures(memory)


class WatchedOffered(WatchedPrompts, OfferedPromptRule):
    """Wraps a prompt rule that takes offered prompts."""

    def offer(self, memory: Memory, prompts: Any) -> None:
        self.rule.offer(memory, prompts)

    def waiting(self, memory: Memory) -> int:
        return self.rule.waiting(memory)

    def ended(self, memory: Memory) -> bool:
        return self.rule.ended(memory)


def _changed(value: Any, reads: tuple[str, ...]) -> Any:
    """Return an argument of a rule with other values in the columns that the rule does not read."""
    if isinstance(value, GroupView):
        group = copy(value._group)
        draws = Random(group.id)
        group.done = [
            replace(
                done,
                reward=done.reward if "rewards_G" in reads else draws.choice((-3.5, -0.5, 1.5, 4.0)),
                metric=done.metric if "metrics_G" in reads else draws.choice((0.0, 0.25, 1.0)),
                tokens=done.tokens if "tokens_G" in reads else draws.randrange(1, 1000),
                truncated=done.truncated if "truncated_G" in reads else draws.random() < 0.5,
                uncertainty=done.uncertainty if "uncertainties_G" in reads else draws.choice((None, draws.random())),
            )
            for done in group.done
        ]
        return GroupView(group, value._statistics)
    if type(value) in (list, tuple):  # a sequence of groups; the exact type excludes a `View`, which is a named tuple
        return [_changed(item, reads) for item in cast("list[Any]", value)]
    return value


def _plain(made: Any) -> Any:
    """A decision as plain data, for comparisons and messages."""
    if isinstance(made, GroupView):
        return f"group {made.group}"
    if isinstance(made, np.ndarray):
        return cast("NDArray[Any]", made).tolist()
    if isinstance(made, dict):
        return {key: _plain(value) for key, value in cast("dict[str, Any]", made).items()}
    if isinstance(made, (list, tuple)):
        return [_plain(item) for item in cast("list[Any]", made)]
    return made


def _about(seen: tuple[Any, ...]) -> str:
    """The groups of a decision, as text for a message."""
    groups = [view for value in seen for view in (value if isinstance(value, list) else [value])]
    ids = [str(view.group) for view in groups if isinstance(view, GroupView)]
    return f" of group {', '.join(ids)}" if ids else ""
