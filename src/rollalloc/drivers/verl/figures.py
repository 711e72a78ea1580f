"""What one step's rollouts did, by stage of the recipe, and which groups were held over it."""

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
    """From one batch to the next.

    Attributes:
        held: groups held when it began, for this batch or a later one.
        rounds: times that rollouts were ordered.
    """

    held: AbstractSet[int] = frozenset()
    rounds: int = 0
    _entered: _Stages = field(default_factory=lambda: defaultdict(dict))
    _undecided: _Stages = field(default_factory=lambda: defaultdict(dict))  # entered earlier; it still ran
    _rollouts: Counter[int] = field(default_factory=Counter)

    def order(self, orders: Iterable[Order]) -> None:
        """Rollouts that are begun together."""
        self.rounds += 1
        for order in orders:
            self._entered[order.stage][order.group] = order.prompt  # an order may come in parts
            self._rollouts[order.stage] += len(order.rollouts)

    def following(self, held: AbstractSet[int], running: AbstractSet[int]) -> Step:
        """The step after this one, in which what still runs is decided."""
        undecided: _Stages = defaultdict(dict)
        for at in self._entered.keys() | self._undecided.keys():
            undecided[at] = {
                group: prompt for group, prompt in self._met(at).items() if not self._left(at, group, running)
            }
        return Step(held, _undecided=undecided)

    def _met(self, at: int) -> dict[int, int]:
        """Groups that were in a stage."""
        return self._undecided[at] | self._entered[at]

    def _left(self, at: int, group: int, running: AbstractSet[int]) -> bool:
        """Whether a group is not in that stage any more."""
        return group not in running or group in self._entered[at + 1]

    def metrics(
        self,
        stages: Sequence[Stage],
        statistics: PromptStatistics,
        trained: AbstractSet[int],
        held: AbstractSet[int],
        running: AbstractSet[int],
    ) -> dict[str, Any]:
        """The step's metrics, when its batch is made.

        Args:
            stages: the recipe's.
            statistics: the allocator's, in which these groups' visits were the last of their prompts.
            trained: groups in the batch.
            held: groups held for a later one.
            running: groups of which rollouts go on over the update; what becomes of them is a later step's figure.
        """
        kept = {
            "groups": len(held),
            "in": len(held - self.held),
            "out": len(self.held & trained),
            "lost": len(self.held - trained - held),
        }
        of_stages: dict[str, dict[str, float]] = {}
        for at, stage in enumerate(stages):
            entered = self._entered[at]
            there = trained | held | self._entered[at + 1].keys()
            left = {group: prompt for group, prompt in self._met(at).items() if self._left(at, group, running)}
            passed = sum(
                group in there or statistics.record(prompt).fate == "surplus" for group, prompt in left.items()
            )
            figures = {"groups": len(entered), "rollouts": self._rollouts[at], "passed": passed}
            rate = {"pass_rate": passed / len(left)} if left else {}
            of_stages[stage.name.replace(" ", "_")] = figures | rate
        return {"rounds": self.rounds, "held": kept, "stage": of_stages}
