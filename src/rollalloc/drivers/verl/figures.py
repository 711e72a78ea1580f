"""Metrics of a training step: by stage of the recipe, and the groups that wait for a later batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from rollalloc.core.events import Order
from rollalloc.core.recipe import Stage
from rollalloc.core.statistics import PromptStatistics

_Stages = defaultdict[int, dict[int, int]]  # stage -> group -> its prompt


@dataclass
class Step:
    """Counts of one training step, from one batch to the next.

    Attributes:
        held: groups that waited for a batch when the step began.
        rounds: how often rollouts were ordered in the step.
    """

    held: AbstractSet[int] = frozenset()
    rounds: int = 0
    _entered: _Stages = field(default_factory=lambda: defaultdict(dict))
    _undecided: _Stages = field(default_factory=lambda: defaultdict(dict))  # entered in an earlier step, still running
    _rollouts: Counter[int] = field(default_factory=Counter)
    _metrics: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def order(self, orders: Iterable[Order]) -> None:
        """Count orders that start together, as one round."""
        self.rounds += 1
        for order in orders:
            self._entered[order.stage][order.group] = order.prompt  # an order may come in parts
            self._rollouts[order.stage] += len(order.rollouts)

    def scored(self, stage: int, group: int, metric: float) -> None:
        """Record the metric of a rollout that a stage of a group ordered."""
        self._metrics[stage, group].append(metric)

    def following(self, held: AbstractSet[int], running: AbstractSet[int]) -> Step:
        """The next step, which takes over the groups that are still in their stage."""
        undecided: _Stages = defaultdict(dict)
        for stage in self._entered.keys() | self._undecided.keys():
            undecided[stage] = {
                group: prompt
                for group, prompt in self._groups_in(stage).items()
                if not self._has_left(stage, group, running)
            }
        step = Step(held, _undecided=undecided)
        step._metrics |= {
            (stage, group): metrics
            for (stage, group), metrics in self._metrics.items()
            if group in undecided.get(stage, ())
        }
        return step

    def _groups_in(self, stage: int) -> dict[int, int]:
        """The groups that were in a stage at some time of this step, and their prompts."""
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
        """The step's metrics, once its batch is formed.

        Args:
            stages: the recipe's stages.
            statistics: the allocator's statistics; the last visit of each of these prompts must be that of its group here.
            trained: groups in the batch.
            held: groups that wait for a later batch.
            running: groups with rollouts that continue during the update; a later step counts how they end.
        """
        held_counts = {
            "groups": len(held),
            "in": len(held - self.held),
            "out": len(self.held & trained),
            "lost": len(self.held - trained - held),
        }
        by_stage: dict[str, dict[str, Any]] = {}
        for index, stage in enumerate(stages):
            dropped = {
                group: self._dropped(index, group, statistics.record(prompt).fate, trained | held)
                for group, prompt in self._groups_in(index).items()
                if self._has_left(index, group, running)
            }
            by_stage[stage.name.replace(" ", "_")] = self._of_stage(index, dropped)
        return {"rounds": self.rounds, "held": held_counts, "stage": by_stage}

    def _dropped(self, index: int, group: int, fate: str, kept: AbstractSet[int]) -> str | None:
        """Why a group that left a stage was dropped there; None if it passed."""
        reason = fate.rpartition("/")[2]
        return None if group in self._entered[index + 1] or group in kept or reason == "surplus" else reason

    def _of_stage(self, index: int, dropped: Mapping[int, str | None]) -> dict[str, Any]:
        """A stage's figures; `dropped` has the groups that left it, each with the reason, or None if it passed."""
        reasons = Counter(reason for reason in dropped.values() if reason is not None)
        passed = len(dropped) - reasons.total()
        figures: dict[str, Any] = {
            "groups": len(self._entered[index]),
            "rollouts": self._rollouts[index],
            "passed": passed,
        }
        if dropped:
            shares = {reason: count / len(dropped) for reason, count in reasons.items()}
            figures |= {"pass_rate": passed / len(dropped), "dropped": shares}
        if scored := [metrics for group in dropped if (metrics := self._metrics.get((index, group)))]:
            figures |= {"mean": fmean(map(fmean, scored)), "deviation": fmean(map(pstdev, scored))}
        return figures
