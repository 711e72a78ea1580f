"""What one step's rollouts did, by stage of the recipe, and which groups were held over it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from rollalloc.core.events import Order
from rollalloc.core.ledger import Ledger
from rollalloc.core.recipe import Stage


@dataclass
class Step:
    """From one batch to the next.

    Attributes:
        held: groups held when it began, for this batch or a later one.
        rounds: times that rollouts were ordered.
    """

    held: AbstractSet[int] = frozenset()
    rounds: int = 0
    _entered: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _rollouts: Counter[int] = field(default_factory=Counter)

    def order(self, orders: Iterable[Order]) -> None:
        """Rollouts that are begun together."""
        self.rounds += 1
        for order in orders:
            self._entered[order.stage][order.group] = order.prompt  # an order may come in parts
            self._rollouts[order.stage] += len(order.rollouts)

    def metrics(
        self, stages: Sequence[Stage], ledger: Ledger, trained: AbstractSet[int], held: AbstractSet[int]
    ) -> dict[str, float]:
        """The step's figures, when nothing runs any more.

        Args:
            stages: the recipe's.
            ledger: the allocator's, in which these groups' visits were the last of their prompts.
            trained: groups in the batch.
            held: groups held for a later one.
        """
        figures: dict[str, float] = {
            "rollalloc/rounds": self.rounds,
            "rollalloc/held/groups": len(held),
            "rollalloc/held/in": len(held - self.held),
            "rollalloc/held/out": len(self.held & trained),
            "rollalloc/held/lost": len(self.held - trained - held),
        }
        for at, stage in enumerate(stages):
            entered = self._entered[at]
            there = trained | held | self._entered[at + 1].keys()
            passed = sum(group in there or ledger.record(prompt).fate == "surplus" for group, prompt in entered.items())
            name = f"rollalloc/stage/{stage.name.replace(' ', '_')}"
            figures |= {
                f"{name}/groups": len(entered),
                f"{name}/rollouts": self._rollouts[at],
                f"{name}/passed": passed,
            }
            if entered:
                figures[f"{name}/pass_rate"] = passed / len(entered)
        return figures
