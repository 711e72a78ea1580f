"""Metrics of a training step: groups and rollouts by stage of the recipe, and the groups that wait for a later batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
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

    def order(self, orders: Iterable[Order]) -> None:
        """Count orders that start together, as one round."""
        self.rounds += 1
        for order in orders:
            self._entered[order.stage][order.group] = order.prompt  # an order may come in parts
            self._rollouts[order.stage] += len(order.rollouts)

    def following(self, held: AbstractSet[int], running: AbstractSet[int]) -> Step:
        """The next step, which takes over the groups that are still in their stage."""
        undecided: _Stages = defaultdict(dict)
        for stage in self._entered.keys() | self._undecided.keys():
            undecided[stage] = {
                group: prompt
                for group, prompt in self._groups_in(stage).items()
                if not self._has_left(stage, group, running)
            }
        return Step(held, _undecided=undecided)

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
        by_stage: dict[str, dict[str, float]] = {}
        for index, stage in enumerate(stages):
            went_on = trained | held | self._entered[index + 1].keys()
            left = {
                group: prompt
                for group, prompt in self._groups_in(index).items()
                if self._has_left(index, group, running)
            }
            passed = sum(
                group in went_on or statistics.record(prompt).fate == "surplus" for group, prompt in left.items()
            )
            counts = {"groups": len(self._entered[index]), "rollouts": self._rollouts[index], "passed": passed}
            rate = {"pass_rate": passed / len(left)} if left else {}
            by_stage[stage.name.replace(" ", "_")] = counts | rate
        return {"rounds": self.rounds, "held": held_counts, "stage": by_stage}
