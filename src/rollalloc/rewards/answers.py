"""Rewards that compare the answer with the ground truth, as text or as numbers: 1 if equal, else 0."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from reprlib import repr as short
from typing import Any

from rollalloc.rewards.extract import Extractor, final
from rollalloc.rewards.notation import last_number, same_number


@dataclass(frozen=True)
class ExactMatch:
    """Returns 1 if the answer and the ground truth are the same text apart from white space, and 0 otherwise.

    Args:
        extract: finds the answer in a completion, or returns None if there is none.
    """

    extract: Extractor = final

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        answer = self.extract(solution_str)
        return float(answer is not None and answer.split() == str(ground_truth).split())


@dataclass(frozen=True)
class Numeric:
    r"""Returns 1 if the last number a in the answer equals the last number b in the ground truth, and 0 otherwise.

        |a − b| ≤ max(absolute, relative · |b|)

    Numbers may be written as 1,234.5, 3/4, \frac{3}{4}, 3\frac{1}{2}, 1.5e3, 1.5 \times 10^{3}, $5, 90^\circ or 50%. If
    only one of a and b has a percent sign, 50% equals both 50 and 0.5.

    Args:
        extract: finds the answer in a completion, or returns None if there is none.
        relative: tolerance relative to |b|, at least 0.
        absolute: absolute tolerance, at least 0.

    Raises:
        ValueError: on a call, the ground truth has no number.
    """

    extract: Extractor = final
    relative: float = 1e-9
    absolute: float = 0.0

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        truth = last_number(str(ground_truth))
        if truth is None:
            raise ValueError(f"ground truth {short(ground_truth)} holds no number; numeric rewards need a number")
        answer = last_number(self.extract(solution_str) or "")
        return float(answer is not None and same_number(answer, truth, self._close))

    def _close(self, answer: Decimal, truth: Decimal) -> bool:
        return abs(answer - truth) <= max(Decimal(self.absolute), Decimal(self.relative) * abs(truth))


exact = ExactMatch()
numeric = Numeric()
