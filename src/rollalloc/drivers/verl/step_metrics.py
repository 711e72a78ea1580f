"""Metrics of a training step, for each stage of the recipe, for each group, and for groups that wait for a later batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from rollalloc.core.events import Done, Order
from rollalloc.core.prompts import PromptStatistics
from rollalloc.core.recipe import Stage

_Stages = defaultdict[int, dict[int, int]]  # for each stage: the prompt of each group


COLUMNS = ("stage", "prompt", "rollouts", "mean", "deviation", "tokens", "truncated", "became")
"""Columns of the table of groups. When a group leaves a stage, the table gets a row about its rollouts in this stage."""


_TRAINED, _NEXT, _HELD, _SURPLUS = "trained", "next stage", "held", "surplus"
_PASSED = frozenset((_TRAINED, _NEXT, _HELD, _SURPLUS))


@dataclass
class Step:
    """Counts of one training step, from one batch to the next.

    Attributes:
        held: groups that waited for a batch when the step began.
        rounds: number of times that rollouts were ordered in the step.
    """

    held: AbstractSet[int] = frozenset()
    rounds: int = 0
    _entered: _Stages = field(default_factory=lambda: defaultdict(dict))
    # Groups that entered in an earlier step and are still running.
    _undecided: _Stages = field(default_factory=lambda: defaultdict(dict))
    _rollouts: Counter[int] = field(default_factory=Counter)
    _scored: dict[tuple[int, int], list[Done]] = field(default_factory=lambda: defaultdict(list))

    def order(self, orders: Iterable[Order]) -> None:
        """Count orders that start together, as one round."""
        self.rounds += 1
        for order in orders:
            self._entered[order.stage][order.group] = order.prompt  # counted once, even if the order comes in parts
            self._rollouts[order.stage] += len(order.rollouts)

    def see(self, at: int, group: int, rollout: Done) -> None:
        """Record a scored rollout of a group in stage `at`."""
        self._scored[at, group].append(rollout)

    def following(self, held: AbstractSet[int], running: AbstractSet[int]) -> Step:
        """The next step. It takes over the groups that are still in their stage."""
        undecided: _Stages = defaultdict(dict)
        for stage in self._entered.keys() | self._undecided.keys():
            undecided[stage] = {
                group: prompt
                for group, prompt in self._groups_in(stage).items()
                if not self._has_left(stage, group, running)
            }
        step = Step(held, _undecided=undecided)
        step._scored |= {
            (at, group): scored for (at, group), scored in self._scored.items() if group in undecided.get(at, ())
        }
        return step

    def _groups_in(self, stage: int) -> dict[int, int]:
        """The groups that were in the stage during this step, and their prompts."""
        return self._undecided[stage] | self._entered[stage]

    def _has_left(self, stage: int, group: int, running: AbstractSet[int]) -> bool:
        """Whether a group is no longer in the stage."""
        return group not in running or group in self._entered[stage + 1]

    def metrics(
        self,
        stages: Sequence[Stage],
        statistics: PromptStatistics,
        trained: AbstractSet[int],
        held: AbstractSet[int],
        running: AbstractSet[int],
    ) -> dict[str, Any]:
        """The step's metrics, after its batch is made.

        Args:
            stages: the recipe's stages.
            statistics: the allocator's statistics, with the result of each prompt's last visit. Call this method before a
                prompt of this step is visited again.
            trained: groups in the batch.
            held: groups that wait for a later batch.
            running: groups with rollouts that continue during the update. Each is counted in the step in which it ends.
        """
        held_counts = {
            "groups": len(held),
            "in": len(held - self.held),
            "out": len(self.held & trained),
            "lost": len(self.held - trained - held),
        }
        by_stage: dict[str, dict[str, Any]] = {}
        groups: list[tuple[Any, ...]] = []
        for index, stage in enumerate(stages):
            left = {
                group: prompt
                for group, prompt in self._groups_in(index).items()
                if self._has_left(index, group, running)
            }
            became = {
                group: self._became(index, group, statistics.record(prompt).fate, trained, held)
                for group, prompt in left.items()
            }
            rows = [self._row(stage.name, index, group, left[group], became[group]) for group in left]
            by_stage[stage.name.replace(" ", "_")] = self._of_stage(index, became, rows)
            groups += rows
        return {"rounds": self.rounds, "held": held_counts, "stage": by_stage, "groups_table": groups}

    def _became(self, index: int, group: int, fate: str, trained: AbstractSet[int], held: AbstractSet[int]) -> str:
        """The result of a group that left a stage: "trained", "held", "next stage", or the reason why it was dropped."""
        if group in self._entered[index + 1]:
            return _NEXT
        if group in trained:
            return _TRAINED
        return _HELD if group in held else fate.rpartition("/")[2]

    def _row(self, stage: str, index: int, group: int, prompt: int, became: str) -> tuple[Any, ...]:
        """A group's row in the table; see `COLUMNS`."""
        scored = self._scored.get((index, group), ())
        figures: tuple[float | None, ...] = (None,) * 4
        if scored:
            metrics = [rollout.metric for rollout in scored]
            tokens, cut = (fmean(getattr(rollout, name) for rollout in scored) for name in ("tokens", "truncated"))
            figures = (fmean(metrics), pstdev(metrics), tokens, cut)
        return (stage, prompt, len(scored), *figures, became)

    def _of_stage(self, index: int, became: Mapping[int, str], rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
        """A stage's metrics, from the results of `_became` and `_row` for the groups that left the stage."""
        passed = sum(each in _PASSED for each in became.values())
        figures: dict[str, Any] = {
            "groups": len(self._entered[index]),
            "rollouts": self._rollouts[index],
            "passed": passed,
        }
        if became:
            dropped = Counter(each for each in became.values() if each not in _PASSED)
            shares = {reason: count / len(became) for reason, count in dropped.items()}
            figures |= {"pass_rate": passed / len(became), "dropped": shares}
        means, deviations = ([row[COLUMNS.index(name)] for row in rows if row[2]] for name in ("mean", "deviation"))
        return figures | ({"mean": fmean(means), "deviation": fmean(deviations)} if means else {})
