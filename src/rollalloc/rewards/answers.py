"""Rewards by comparing answers: as text, or as numbers. 1 where they agree, 0 where not or where there is no answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, localcontext
from reprlib import repr as short
from typing import Any, NamedTuple

from rollalloc.rewards.extract import Extractor, final

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?!\d)"
_NUMBER = re.compile(
    rf"""(?<![\w^])(?<!\^\{{)                            # not an index, an exponent or the end of a word
    (?P<sign>[-+−]?)\\?\$?
    (?: \\[dt]?frac\s*\{{\s*(?P<above>-?{_DIGITS})\s*\}}\s*\{{\s*(?P<below>{_DIGITS})\s*\}}
      | (?P<digits>{_DIGITS})
        (?: [eE](?P<exponent>[-+]?\d+)
          | \s*(?:\\times|\\cdot|×|\*)\s*10(?:\^|\*\*)[{{(]?(?P<power>[-+]?\d+)[}})]?
          | \s*/\s*(?P<divisor>{_DIGITS})
        )?
    )
    (?!\s*\^)(?P<percent>\s*\\?%)?                       # not the base of a power either
    """,
    re.VERBOSE,
)
_LONGEST = 1000  # characters of a number; longer ones are nonsense
_LONGEST_EXPONENT = 5  # likewise
_PRECISION = 60  # digits carried in a comparison


@dataclass(frozen=True)
class ExactMatch:
    """1 where the answer and the ground truth are the same text, apart from white space.

    Args:
        extract: finds the answer in a completion.
    """

    extract: Extractor = final

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        answer = self.extract(solution_str)
        return float(answer is not None and answer.split() == str(ground_truth).split())


@dataclass(frozen=True)
class Numeric:
    r"""1 where the last number of the answer is the ground truth's: |a − b| ≤ max(absolute, relative · |b|).

    Reads 1,234.5, fractions (3/4, \frac{3}{4}), 1.5e3, 1.5 \times 10^{3}, $5 and 50%. Where only one side has a percent
    sign, 50% may be 50 or 0.5.

    Args:
        extract: finds the answer in a completion.
        relative: tolerance relative to the ground truth, at least 0.
        absolute: tolerance, at least 0.
    """

    extract: Extractor = final
    relative: float = 1e-9
    absolute: float = 0.0

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        truth = _last_number(str(ground_truth))
        if truth is None:
            raise ValueError(f"ground truth {short(ground_truth)} holds no number; numeric rewards need one")
        answer = _last_number(self.extract(solution_str) or "")
        return float(answer is not None and self._agree(answer, truth))

    def _agree(self, answer: _Number, truth: _Number) -> bool:
        with localcontext(prec=_PRECISION):
            if answer.percent == truth.percent:
                return self._close(answer.value, truth.value)
            pairs = [(answer.value, truth.value), (answer.fraction, truth.fraction)]
            return any(self._close(given, expected) for given, expected in pairs)

    def _close(self, answer: Decimal, truth: Decimal) -> bool:
        return abs(answer - truth) <= max(Decimal(self.absolute), Decimal(self.relative) * abs(truth))


class _Number(NamedTuple):
    value: Decimal
    percent: bool

    @property
    def fraction(self) -> Decimal:
        """The value, of a percentage a hundredth."""
        return self.value / 100 if self.percent else self.value


def _last_number(text: str) -> _Number | None:
    """The last number in a text; None where there is none that can be told."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None or len(last[0]) > _LONGEST:
        return None
    exponent = last["exponent"] or last["power"] or "0"
    divisor = _decimal(last["below"] or last["divisor"] or "1")
    if len(exponent) > _LONGEST_EXPONENT or divisor == 0:
        return None
    with localcontext(prec=_PRECISION):
        value = _decimal(last["above"] or last["digits"]).scaleb(int(exponent)) / divisor
        return _Number(-value if last["sign"] in ("-", "−") else value, percent=last["percent"] is not None)


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))


exact = ExactMatch()
numeric = Numeric()
