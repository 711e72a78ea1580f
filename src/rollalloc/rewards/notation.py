r"""Reads numbers in the notations that public data sets and models use.

`in_latex` rewrites numbers into one LaTeX notation, which the other functions read. It removes the thousands separators
`{,}`, `\,`, `\!` and `\ `, and currency and degree signs. `\frac12` becomes `\frac{1}{2}`, `3 1/2` becomes
`3\frac{1}{2}`, 1.5e3 becomes `1.5 \times 10^{3}`, and `0.1\overline{6}` becomes `\frac{15}{90}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import NamedTuple

PRECISION = 60  # number of significant digits in a comparison
_LONGEST = 1000  # maximum number of characters; longer numbers are not read
_LONGEST_EXPONENT = 5  # maximum number of characters; longer exponents are not read

# Thousands separators, except for a plain comma, which `_DIGITS` reads. A comma before a space separates members of a list.
_SEPARATOR = r"\{\s?,\s?\}|,?\\!|\\[,:; ]|[\u00a0\u2009\u202f]"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?![0-9])"
_POINT = r"(?<![0-9.,])([0-9]{1,3}(?:,[0-9]{3}){1,9}|[0-9]{0,99})\.([0-9]{0,99})"  # digits before and after the point
_SYMBOL = r"\\(?!sqrt|frac|text|math|operatorname|mbox|left|big)[a-zA-Z]+"  # a command without arguments, such as \pi


class Number(NamedTuple):
    """A number in a text.

    Attributes:
        value: the number; if a percent sign follows, the number before the sign.
        percent: whether a percent sign follows.
        rounded: whether the number has a decimal point, so that it may be rounded.
    """

    value: Decimal
    percent: bool
    rounded: bool

    @property
    def fraction(self) -> Decimal:
        """The value; for a percentage, divided by 100."""
        return self.value / 100 if self.percent else self.value


def _without_separators(match: re.Match[str]) -> str:
    return re.sub("[^0-9]", "", match[0])


def _power_of_ten(match: re.Match[str]) -> str:
    return f"10^{{{match[1].translate(_SUPERSCRIPTS)}}}"


def _mixed(match: re.Match[str]) -> str:
    r"""Rewrite a mixed number: `3 1/2` becomes `3\frac{1}{2}`. `3 4/2` stays, because 4/2 is not a proper fraction."""
    whole, top, bottom = match.groups()
    is_proper = len(top) < len(bottom) or (len(top) == len(bottom) and top < bottom)
    return rf"{whole}\frac{{{top}}}{{{bottom}}}" if is_proper else match[0]


def _repeating(match: re.Match[str]) -> str:
    r"""Rewrite a decimal whose last digits repeat as a fraction: `0.1\overline{6}` becomes `\frac{15}{90}`, (16 − 1)/90."""
    start, digits = match[1].replace(",", "") + match[2], "".join(filter(None, match.groups()[2:]))
    return rf"\frac{{{int(start + digits) - int(start or '0')}}}{{{'9' * len(digits)}{'0' * len(match[2])}}}"


_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.ASCII), spelling)
    for pattern, spelling in (
        (rf"(?<![0-9.])[0-9]{{1,3}}({_SEPARATOR})\s?[0-9]{{3}}(?:\1\s?[0-9]{{3}})*(?![0-9])", _without_separators),
        (rf"{_POINT}\\(?:overline|bar)\s?(?:\{{\s?([0-9]{{1,99}})\s?\}}|([0-9]))(?![0-9])", _repeating),
        (rf"{_POINT}\\dot\s?\{{?([0-9])\}}?(?:([0-9]{{0,99}})\\dot\s?\{{?([0-9])\}}?)?(?![0-9])", _repeating),
        (r"(?<![0-9.,])([0-9]{1,99})\.()\(([0-9]{1,99})\)(?!\w)", _repeating),
        (r"[−–]", "-"),
        (r"(?:\\\$|[€£¥]|(?<=[-−])\$)\s?(?=-?[0-9.\\])", ""),
        (r"\s?(?:\^\s?\{?\s?\\circ\s?\}?|\^\\degree|\\degree(?![a-zA-Z])|°)", ""),
        (r"(^|[=(\[{,:;$])(\s?)-\s(?=[0-9.\\])", r"\1\2-"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (rf"\\(frac|sqrt)\s?({_SYMBOL})", r"\\\1{\2}"),
        (rf"\\frac\s?([0-9])(?=\s?(?:[0-9{{]|{_SYMBOL}))", r"\\frac{\1}"),
        (rf"\\frac\s?(\{{[^{{}}]{{1,99}}\}})\s?([0-9a-zA-Z]|{_SYMBOL})", r"\\frac\1{\2}"),
        (r"\\sqrt\s?(\\frac\s?\{[^{}]{1,99}\}\s?\{[^{}]{1,99}\})", r"\\sqrt{\1}"),
        (r"(?<![\w.^/])([0-9]+)(?:\s|\\[,!:; ]|~)\s?([0-9]+)/([0-9]+)(?![0-9/])", _mixed),
        (r"([0-9])(?:\\[,!:; ]|\s|~)\s?\\frac(?=\{[0-9]+\}\{[0-9]+\})", r"\1\\frac"),
        (r"(?<![a-zA-Z0-9.\\])([0-9]+\.?|[0-9]*\.[0-9]+)[eE]([-+]?[0-9]+)(?!\w)", r"\1 \\times 10^{\2}"),
        (r"(?<![0-9])10\s?(?:\^|\*\*)\s?\(?([-+]?[0-9]+)\)?", r"10^{\1}"),
        (r"(?<![0-9])10([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)", _power_of_ten),
        (r"([0-9])\s?(?:\\cdot|[×·*xX])\s?10\^\{", r"\1 \\times 10^{"),
    )
)

_NUMBER = re.compile(
    rf"""(?<![\w^])(?<!\^\{{)(?<!\^-)(?<!\^\{{-)         # not an index, an exponent or the end of a word
    (?P<sign>[-+])?
    (?: (?P<whole>[0-9]+)?\\frac\s?\{{\s?(?P<top>-?\s?{_DIGITS})\s?\}}\s?\{{\s?(?P<bottom>{_DIGITS})\s?\}}
      | 10\^\{{\s?(?P<power_of_ten>[-+]?[0-9]+)\s?\}}
      | (?P<digits>{_DIGITS})
        (?: \s?\\times\s?10\^\{{\s?(?P<exponent>[-+]?[0-9]+)\s?\}}
          | \s?/\s?(?P<divisor>{_DIGITS})
        )?
    )
    (?!\s?\^|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻])                              # not the base of a power
    (?P<percent>\s?(?:\\?%|percent\b))?
    """,
    re.VERBOSE | re.ASCII,
)


def in_latex(text: str) -> str:
    """Rewrite the numbers of a text into one LaTeX notation; see the module's docstring."""
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def as_number(text: str) -> Number | None:
    """The number that a text consists of; None if the text is anything else."""
    match = _NUMBER.fullmatch(in_latex(text.strip()).strip("$ ").removesuffix("."))
    return match and _read(match)


def last_number(text: str) -> Number | None:
    """The last number in a text; None if the text has no number, or if its last number is too long."""
    last = None
    for match in _NUMBER.finditer(in_latex(text)):
        last = match
    return last and _read(last)


def same_number(answer: Number, truth: Number, close: Callable[[Decimal, Decimal], bool]) -> bool:
    """Whether two numbers are close. If only one of them has a percent sign, 50% equals both 50 and 0.5."""
    with localcontext(prec=PRECISION):
        if answer.percent == truth.percent:
            return close(answer.value, truth.value)
        return close(answer.value, truth.value) or close(answer.fraction, truth.fraction)


def _read(match: re.Match[str]) -> Number | None:
    exponent = match["exponent"] or match["power_of_ten"] or "0"
    if len(match[0]) > _LONGEST or len(exponent) > _LONGEST_EXPONENT:
        return None
    divisor = _decimal(match["bottom"] or match["divisor"] or "1")
    if divisor == 0:
        return None
    with localcontext(prec=PRECISION):
        top = _decimal(match["top"] or match["digits"] or "1")
        value = Decimal(match["whole"] or "0") + top.scaleb(int(exponent)) / divisor
        return Number(-value if match["sign"] == "-" else value, match["percent"] is not None, "." in match[0])


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", "").replace(" ", ""))
