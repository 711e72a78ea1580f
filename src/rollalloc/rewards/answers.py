"""Rewards by comparing answers: as text, or as numbers. 1 if they agree, 0 if not or if there is no answer."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from reprlib import repr as short
from typing import Any

from rollalloc.rewards.extract import Extractor, final
from rollalloc.rewards.notation import last_number, same_number


@dataclass(frozen=True)
class ExactMatch:
    """1 if the answer and the ground truth are the same text, apart from white space.

    Args:
        extract: finds the answer in a completion.
    """

    extract: Extractor = final

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        answer = self.extract(solution_str)
        return float(answer is not None and answer.split() == str(ground_truth).split())


@dataclass(frozen=True)
class Numeric:
    r"""1 if the last number of the answer is the ground truth's: |a − b| ≤ max(absolute, relative · |b|).

    Reads what `notation` does: 1,234.5, 3/4, \frac{3}{4}, 3\frac{1}{2}, 1.5e3, 1.5 \times 10^{3}, $5, 90^\circ and 50%.
    If only one side has a percent sign, 50% may be 50 or 0.5.

    Args:
        extract: finds the answer in a completion.
        relative: tolerance relative to the ground truth, at least 0.
        absolute: tolerance, at least 0.
    """

    extract: Extractor = final
    relative: float = 1e-9
    absolute: float = 0.0

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        truth = last_number(str(ground_truth))
        if truth is None:
            raise ValueError(f"ground truth {short(ground_truth)} holds no number; numeric rewards need one")
        answer = last_number(self.extract(solution_str) or "")
        return float(answer is not None and same_number(answer, truth, self._close))

    def _close(self, answer: Decimal, truth: Decimal) -> bool:
        return abs(answer - truth) <= max(Decimal(self.absolute), Decimal(self.relative) * abs(truth))


exact = ExactMatch()
numeric = Numeric()
