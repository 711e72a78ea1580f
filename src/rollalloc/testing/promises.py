"""What a recipe's own rules promise, held against every decision they make.

A rule states its promise beside itself, in its class, in two ways; both are optional:

- `promises(made, *seen)`: what it decided, then the arguments of its call less the random generator → each promise in plain
  words, and whether this decision keeps it. A prompt rule's decision is its `pick`; the memory it gets is that before.
- `reads`: the columns of a group's results that it looks at, of `rewards_G`, `metrics_G`, `tokens_G` and `truncated_G`. The
  kit asks it again about the same groups with every other column changed, and it must decide alike. For a prompt rule it is
  what `observe` learns from.

The kit knows no rule: it wraps each one of a recipe, and asks.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.events import Done
from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Memory, OfferedPromptRule, Recipe, Sample, Verdict, View
from rollalloc.core.table import PromptTable
from rollalloc.testing.audit import expect

_DRAWING = ("stop", "promote", "rows")  # the slots whose rules are given a random generator, as their last argument
_COLUMNS = ("rewards_G", "metrics_G", "tokens_G", "truncated_G")


def watched(recipe: Recipe, like: Recipe | None) -> tuple[Recipe, dict[int, Verdict]]:
    """The recipe with every rule watched, and the last verdict on each group, by its id, as they fall.

    Args:
        recipe: its rules decide.
        like: its rules promise; with as many stages. None: nothing is promised, and no decision is held against it.
    """
    log: dict[int, Verdict] = {}
    kept: dict[int, dict[int, float]] = {}  # what stop rules said that they kept of each group, by its id

    def slots(value: Any, promised: Any) -> dict[str, Any]:
        return {
            field.name: Watched(rule, getattr(promised, field.name, None), field.name in _DRAWING)
            for field in fields(value)
            if callable(rule := getattr(value, field.name))
        }

    promised = [None] * len(recipe.stages) if like is None else like.stages
    stages = [replace(own, **slots(own, said)) for own, said in zip(recipe.stages, promised, strict=True)]
    for stage in stages:
        object.__setattr__(stage.judge, "log", log)
    prompts = (WatchedOffered if isinstance(recipe.prompts, OfferedPromptRule) else WatchedPrompts)(
        recipe.prompts, getattr(like, "prompts", None)
    )
    under_watch = replace(recipe, stages=tuple(stages), prompts=prompts, **slots(recipe, like))
    for rule in (under_watch.rows, *(stage.stop for stage in stages if stage.stop is not None)):
        object.__setattr__(rule, "kept", kept)
    return under_watch, log


@dataclass(frozen=True, repr=False)
class _Watch:
    """Passes for a rule, whatever is asked of it.

    Attributes:
        rule: decides.
        promised: says what the decisions must keep; the rule itself, mostly.
    """

    rule: Any
    promised: Any

    def __repr__(self) -> str:
        return repr(self.rule)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "rule":
            raise AttributeError(name)
        return getattr(self.rule, name)

    def _keep(self, made: Any, *seen: Any) -> None:
        if promises := getattr(self.promised, "promises", None):
            for promise, kept in promises(made, *seen).items():
                expect(9, bool(kept), f"{self.rule!r} does not keep: {promise}; it made {_plain(made)}{_about(seen)}")

    def _reads(self) -> tuple[str, ...] | None:
        return getattr(self.promised, "reads", None)

    def _expect_alike(self, made: Any, again: Any, about: str) -> None:
        if _plain(made) != _plain(again):
            others = ", ".join(name for name in _COLUMNS if name not in (self._reads() or ()))
            raise_of = f"{_plain(made)} or, where {others} differ, {_plain(again)}"
            expect(9, False, f"{self.rule!r} reads what it does not say: it made {raise_of}{about}")


@dataclass(frozen=True, repr=False)
class Watched(_Watch):
    """A rule that is called.

    Attributes:
        draws: whether its last argument is a random generator.
    """

    draws: bool

    def __call__(self, *seen: Any) -> Any:
        said, reads = seen[:-1] if self.draws else seen, self._reads()
        # A second call must draw the same numbers, and leave the core's generator where the first left it.
        rng = (deepcopy(seen[-1].bit_generator),) if self.draws and reads is not None else ()
        made = self.rule(*seen)
        self._keep(made, *said)
        if reads is not None:
            again = self.rule(*(_changed(value, reads) for value in said), *map(np.random.Generator, rng))
            self._expect_alike(made, again, _about(said))
        if isinstance(made, Verdict):
            self.log[seen[0].group] = made
        if isinstance(made, Sample):
            self.kept.setdefault(seen[0].group, {}).update(made.kept)
        elif "kept" in vars(self):
            said, told = dict(seen[0].kept), self.kept.get(seen[0].group, {})
            expect(
                9, said == told, f"{self.rule!r} is shown that {said} were kept, a stop rule kept {told}{_about(seen)}"
            )
        return made


@dataclass(frozen=True, repr=False)
class WatchedPrompts(_Watch):
    """A rule that draws prompts."""

    def init(self, table: PromptTable) -> Memory:
        return self.rule.init(table)

    def pick(self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator) -> Any:
        before = deepcopy(memory) if self.promised is not None else memory
        made = self.rule.pick(memory, k, free_N, view, rng)
        self._keep(made, before, k, free_N, view)
        return made

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        reads = self._reads()
        again = None if reads is None else deepcopy(memory)
        self.rule.observe(memory, group, view)
        if reads is not None:
            self.rule.observe(again, _changed(group, reads), view)
            self._expect_alike(memory, again, f" of group {group.group}")


@dataclass(frozen=True, repr=False)
class WatchedOffered(WatchedPrompts):
    """A rule that is offered prompts."""

    def offer(self, memory: Memory, prompts: Any) -> None:
        self.rule.offer(memory, prompts)

    def waiting(self, memory: Memory) -> int:
        return self.rule.waiting(memory)

    def ended(self, memory: Memory) -> bool:
        return self.rule.ended(memory)


def _changed(value: Any, reads: tuple[str, ...]) -> Any:
    """An argument of a rule, with other results in the columns that the rule says it does not read."""
    if isinstance(value, GroupView):
        group = copy(value._group)
        draws = Random(group.id)
        group.done = [
            Done(
                done.rollout,
                done.reward if "rewards_G" in reads else draws.choice((-3.5, -0.5, 1.5, 4.0)),
                done.metric if "metrics_G" in reads else draws.choice((0.0, 0.25, 1.0)),
                done.tokens if "tokens_G" in reads else draws.randrange(1, 1000),
                done.version,
                done.last_version,
                done.truncated if "truncated_G" in reads else draws.random() < 0.5,
            )
            for done in group.done
        ]
        return GroupView(group, value._statistics)
    if type(value) in (list, tuple):  # of groups; a `View` is a tuple of another kind
        return [_changed(item, reads) for item in cast("list[Any]", value)]
    return value


def _plain(made: Any) -> Any:
    """A decision as plain data, to be compared and read."""
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
    """Which groups a decision was about."""
    groups = [view for value in seen for view in (value if isinstance(value, list) else [value])]
    ids = [str(view.group) for view in groups if isinstance(view, GroupView)]
    return f" of group {', '.join(ids)}" if ids else ""
