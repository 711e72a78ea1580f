"""How long a prompt's rollouts will be: a prompt rule that learns it beside what it draws, and what sizes read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.packing import follow
from rollalloc.core.recipe import (
    CheckedPromptRule,
    Drawn,
    Memory,
    MovablePromptRule,
    OfferedPromptRule,
    PromptRule,
    View,
)
from rollalloc.core.table import PromptTable
from rollalloc.predict.lengths import LengthPredictor, expected, law_of
from rollalloc.rules.prompts import Shuffled

_KEY = "lengths"  # of the predictor's memory, beside the entries of the rule that draws


@dataclass(frozen=True, slots=True)
class PredictedLengths:
    """Draws as another rule does, and learns beside it what a prompt's features say of its lengths.

    Sizes read it through `laws`. What is learned of is the ledger's law of each prompt that was visited, as it is when the
    parameters are next fitted, in a draw: a visit whose stopped rollouts have not ended yet counts with the fit after.

    Attributes:
        order: draws the prompts; what it believes of them, it goes on believing.
        predictor: predicts the lengths.

    Raises:
        ValueError: an order that a framework's own loader feeds.
    """

    reads_features: ClassVar = True
    reads_lengths: ClassVar = True

    order: PromptRule = field(default_factory=Shuffled)
    predictor: LengthPredictor = field(default_factory=LengthPredictor)

    def __post_init__(self) -> None:
        if isinstance(self.order, OfferedPromptRule):
            raise ValueError(
                f"lengths are predicted for prompts that a rule draws, got {self.order!r}; give it another"
            )

    @property
    def believes(self) -> bool:
        """Whether the order expects something of a prompt."""
        return bool(getattr(self.order, "believes", False))

    @property
    def reads_rate(self) -> bool:
        """Whether the metric must be a success rate."""
        return bool(getattr(self.order, "reads_rate", False))

    @property
    def reads_moved(self) -> bool:
        """Whether it is looked at how far the weights moved."""
        return bool(getattr(self.order, "reads_moved", False))

    @property
    def reads(self) -> tuple[str, ...] | None:
        """The columns of a group that the order learns from; lengths are learned from the ledger."""
        return getattr(self.order, "reads", None)

    def init(self, table: PromptTable) -> Memory:
        return self.order.init(table) | {_KEY: self.predictor.init(len(table), table.widths)}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int | Drawn]:
        if self.predictor.due(memory[_KEY]):
            self.predictor.refit(memory[_KEY], view.table.features, view.ledger.log_length_2N)
        return self.order.pick(memory, k, free_N, view, rng)

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        self.order.observe(memory, group, view)
        known_2N = view.ledger.log_length_2N
        first = known_2N is None or isnan(known_2N[0][group.prompt])
        self.predictor.observe(memory[_KEY], group.prompt, group.scored, first)

    def moved(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """The memory for another data set; features of the same names and widths must be made by the same means."""
        own = {name: value for name, value in memory.items() if name != _KEY}
        if isinstance(self.order, MovablePromptRule):
            made = self.order.moved(own, source_N, table)
        else:
            made = self.order.init(table)
            follow(made, own, source_N)
        return made | {_KEY: self.predictor.moved(memory[_KEY], source_N, table.widths)}

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Refuse a saved memory that is none of this rule."""
        self.predictor.check(memory[_KEY], len(table), table.widths)
        if isinstance(self.order, CheckedPromptRule):
            self.order.check(memory, table)

    def figures(self, memory: Memory) -> dict[str, float]:
        """What the order says of itself, and what the predicted lengths were worth, see `LengthPredictor.figures`."""
        figures: Any = getattr(self.order, "figures", None)
        return ({} if figures is None else figures(memory)) | self.predictor.figures(memory[_KEY])

    def promises(
        self, picked: Sequence[int | Drawn], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        promises: Any = getattr(self.order, "promises", None)
        learned = view.memory[_KEY]
        return ({} if promises is None else promises(picked, before, k, free_N, view)) | {
            "what was learned of lengths is no older than a fit that was due": not self.predictor.due(learned),
            "nothing is fitted before that": self.predictor.due(before[_KEY])
            or learned["fits"] == before[_KEY]["fits"],
        }


def laws(view: View, prompts_K: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """What is believed of each prompt's lengths: mean and variance of their logarithms, shape (K,) each.

        y = (n y_record + a ŷ) / (n + a)

    y_record is what the ledger believes, of n scored rollouts, and ŷ what the prompt rule predicts; a is its predictor's
    `record_weight`. Where nothing is predicted, as before a first fit, a prompt without a record has the others' mean.

    Args:
        view: of the run.
        prompts_K: indices in [0, N), at least one.

    Returns:
        None where nothing is predicted and none of the prompts has a record.

    Raises:
        ValueError: features of the table that are missing, or not those that the predictor was made for.
    """
    known_2N, asked_K = view.ledger.log_length_2N, np.asarray(prompts_K, np.int64)
    if known_2N is None:
        return None
    law_K2 = law_of(known_2N, asked_K)
    has_K = ~np.isnan(law_K2[:, 0])
    if predicts(view):
        memory = view.memory[_KEY]
        count_K = np.where(has_K, view.ledger.attempts_N[asked_K], 0)
        share_K = count_K / (count_K + memory["record_weight"])
        said_K2 = expected(memory, view.table.features, asked_K)
        law_K2 = said_K2 + share_K[:, None] * (np.where(has_K[:, None], law_K2, said_K2) - said_K2)
    elif not has_K.any():
        return None
    else:
        law_K2[~has_K] = law_K2[has_K].mean(axis=0)
    return law_K2[:, 0], law_K2[:, 1]


def predicts(view: View) -> bool:
    """Whether the recipe's prompt rule has something to say of lengths by now."""
    return bool(view.memory.get(_KEY, {}).get("fits", 0))
