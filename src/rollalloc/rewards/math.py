r"""Rewards for mathematical answers. They use math-verify, and checks of our own for cases that it gets wrong.

An answer is compared with the ground truth in four steps. The steps are tried in order until one decides:

1. If both are the same text after normalization (`plain`), or the same letter of multiple choice, the answer is right.
2. If both are numbers, the answer is right if their values are equal, and wrong if they are not. If one of them may be
   rounded (`_may_be_rounded`), the values need to agree only to six decimals and six significant digits.
3. If the answer or the ground truth is text or a time of day, the answer is wrong. The same holds if they are numbers in
   different bases, or a set and a tuple (`_refused`).
4. If the expressions that math-verify parses certainly differ, the answer is wrong (`_differ`). Otherwise math-verify
   decides. `_differ` is needed because math-verify, for example, rounds constants to a fixed number of decimals.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache, partial
from itertools import product
from operator import eq
from reprlib import repr as short
from threading import current_thread, main_thread
from typing import Any, Literal, get_args

from rollalloc.rewards.extract import boxed, is_cut_off
from rollalloc.rewards.notation import Number, as_number, in_latex, same_number
from rollalloc.rewards.spelling import choice, choice_of_truth, is_text, plain, upright

try:
    import sympy
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout
except ImportError as error:
    raise ImportError("mathematical rewards need math-verify; pip install 'rollalloc[rewards]'") from error

Boxed = Literal["required", "preferred", "any"]

_GOLDS = 1024  # maximum number of parsed ground truths to keep
_DIGITS = 50  # decimals to which math-verify compares constants; with its default of 15, 1e-16 would equal 0
_DECIMALS, _SIGNIFICANT = Decimal("5e-7"), Decimal("5e-6")  # absolute and relative tolerance for rounded numbers


@dataclass(frozen=True)
class MathVerify:
    r"""Returns 1 if the answer equals the ground truth, and 0 if it does not or if there is no answer.

    A completion that ends inside a `\boxed{` was cut off and has no answer. If a comparison takes too long, the call
    raises an error, so that the sample is unscored. (math-verify itself would call it wrong.) The time-out uses an alarm
    signal, which cannot interrupt a long computation with integers; only the limit of a `WorkerScorer` can.

    Args:
        timeout_s: seconds for parsing, and for each comparison; an integer, at least 1.
        boxed: where to look for the answer. "required": in the last `\boxed{...}`. "preferred": in the last box or, if there
            is no box, in the text. "any": in the last box and in the text. In the text, an answer is found after the last
            "answer is" or "answer:", in the last inline formula, or by math-verify.

    Raises:
        ValueError: on creation, `boxed` has another value; on a call, the ground truth is empty or cannot be parsed.
        TimeoutError: parsing or a comparison took longer than `timeout_s`.
        RuntimeError: called outside of the main thread, where the alarm does not work.
    """

    timeout_s: int = 5
    boxed: Boxed = "preferred"

    def __post_init__(self) -> None:
        if self.boxed not in get_args(Boxed):
            raise ValueError(f"boxed must be one of {', '.join(get_args(Boxed))}, got {self.boxed!r}")

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        if current_thread() is not main_thread():
            raise RuntimeError("math-verify's time-out works in the main thread only; score with WorkerScorer")
        gold = _gold(str(ground_truth), self.timeout_s)
        if is_cut_off(solution_str):
            return 0.0
        box = boxed(solution_str)
        if box is not None and self._is_right(gold, box):
            return 1.0
        if self.boxed == "required" or (box is not None and self.boxed == "preferred"):
            return 0.0
        return float(self._is_right_in_text(gold, solution_str))

    def _is_right(self, gold: _Gold, answer: str) -> bool:
        """Whether an answer is right. `answer` is the answer alone, without surrounding text."""
        answer = upright(answer)
        if not (text := plain(answer)):
            return False
        if text == gold.plain:
            return True
        if gold.choice is not None and (letter := choice(answer)) is not None:
            return letter == gold.choice
        number = as_number(answer)
        if gold.number is not None and number is not None:
            return same_number(number, gold.number, _rounded if _may_be_rounded(number, gold.number) else eq)
        if _refused(gold.plain, text):
            return False
        return self._any_equal(gold.parsed, _parse_formula(in_latex(answer), self.timeout_s))

    def _is_right_in_text(self, gold: _Gold, text: str) -> bool:
        """Whether a text without a box gives the right answer."""
        if any(self._is_right(gold, answer) for answer in _stated(text)):
            return True
        return not gold.must_be_stated and self._any_equal(gold.parsed, _parse(in_latex(upright(text)), self.timeout_s))

    def _any_equal(self, golds: list[Any], answers: list[Any]) -> bool:
        """Whether any pair is equal. Raise TimeoutError if no pair is equal, but a comparison took too long."""
        late: TimeoutError | None = None
        for gold, answer in product(golds, answers):
            try:
                if self._equal(gold, answer):
                    return True
            except TimeoutError as error:
                late = error
        if late is not None:
            raise late
        return False

    def _equal(self, gold: Any, answer: Any) -> bool:
        gold, answer = _within(self.timeout_s, partial(timeout(self.timeout_s)(_real), gold, answer)) or (gold, answer)
        if _within(self.timeout_s, partial(timeout(self.timeout_s)(_differ), gold, answer)):
            return False
        compare = partial(
            verify,
            gold,
            answer,
            numeric_precision=_DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=self.timeout_s,
            raise_on_error=True,
        )
        return bool(_within(self.timeout_s, compare))


class _Gold:
    """A ground truth: its normalized text, its value if it is a number, and the result of math-verify's parser."""

    def __init__(self, text: str, timeout_s: int) -> None:
        box = boxed(text)
        self._text = upright(text if box is None else box).replace(r"\$", "").replace("$", "")
        self._timeout_s = timeout_s
        self.plain = plain(self._text)
        if not self.plain:
            raise ValueError(f"ground truth {short(text)} is empty; mathematical rewards need a ground truth")
        self.number = as_number(self._text)
        self.choice = choice_of_truth(self._text)
        # In a text without a box, math-verify may find a single number, and calls it equal to an equation that ends with
        # this number: 5 equals x = 5, for example. So a ground truth in words, an equation or a number in another base is
        # compared only with an answer that the text states, for example after "answer is".
        self.must_be_stated = is_text(self.plain) or "=" in self.plain or _IN_BASE.fullmatch(self.plain) is not None

    @cached_property
    def parsed(self) -> list[Any]:
        """The result of math-verify's parser. Raise ValueError if it finds nothing."""
        parsed = _parse_formula(in_latex(self._text), self._timeout_s)
        if not parsed:
            raise ValueError(f"ground truth {short(self._text)} cannot be parsed by math-verify")
        return parsed


_gold = lru_cache(_GOLDS)(_Gold)

# --------------------------------------------------------------------------------- cases that math-verify must not decide

_IN_BASE = re.compile(r"\(?[0-9A-Fa-f]+\)?_\(?(\w+)\)?")


def _refused(gold: str, answer: str) -> bool:
    """Whether an answer is wrong because its text differs from the ground truth. Both texts are normalized.

    math-verify must not decide in these cases, because it reads a word as the product of its letters and a time of day as
    a quotient, and ignores bases.
    """
    if is_text(gold) or is_text(answer):
        return True
    bases = [match and match[1] for match in (_IN_BASE.fullmatch(gold), _IN_BASE.fullmatch(answer))]
    if all(bases) and bases[0] != bases[1]:
        return True
    return any(
        one.startswith(r"\{") and other.startswith(("(", "[")) for one, other in ((gold, answer), (answer, gold))
    )


def _differ(gold: Any, answer: Any) -> bool:
    """Whether two parsed answers certainly differ, in cases in which math-verify may call them equal.

    These cases are: constants of different values; tuples, sets or matrices with different members; and different
    equations without solutions, because math-verify compares equations by their solutions.
    """
    if isinstance(gold, _CONTAINERS) and isinstance(answer, _CONTAINERS):
        golds, answers = _members(gold), _members(answer)
        return len(golds) == len(answers) and any(map(_differ, golds, answers))
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return not _same_equation(gold, answer) and not sympy.solve(gold, gold.free_symbols)
    if not (_is_constant(gold) and _is_constant(answer)):
        return False
    first, second = sympy.N(gold, 30), sympy.N(answer, 30)
    if not (first.is_finite and second.is_finite):
        return False
    distance = float(_SIGNIFICANT) if gold.has(sympy.Float) or answer.has(sympy.Float) else 1e-20
    return bool(abs(first - second) > distance * abs(first))


def _real(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Both parsed answers, with those letters positive that must be positive for both answers to be real.

    Without this, sympy would not find that √(1/n) equals 1/√n, because this holds only for positive n.
    """
    if not (isinstance(gold, sympy.Basic) and isinstance(answer, sympy.Basic)):
        return gold, answer
    signed = {letter for one in (gold, answer) for node in one.atoms(sympy.Abs) for letter in node.free_symbols}
    letters = (_letters_in_roots(gold) & _letters_in_roots(answer)) - signed
    positive = {letter: sympy.Symbol(letter.name, positive=True) for letter in letters}
    return gold.xreplace(positive), answer.xreplace(positive)


def _letters_in_roots(expression: Any) -> set[Any]:
    """Letters that are factors of what a root or a logarithm is taken of; without squares, which need not be positive."""
    letters: set[Any] = set()
    for node in expression.atoms(sympy.Pow, sympy.log):
        exponent: Any = node.exp.doit() if isinstance(node, sympy.Pow) else sympy.S.Half
        if not exponent.is_Rational or exponent.is_Integer:
            continue
        base: Any = sympy.together(node.args[0])
        powers: dict[Any, Any] = base.as_powers_dict()
        if not any(factor.is_negative for factor in powers):
            any_power = exponent.q % 2 == 1
            letters |= {factor for factor, power in powers.items() if factor.is_Symbol and (any_power or power.is_odd)}
    return letters


def _same_equation(first: Any, second: Any) -> bool:
    """Whether two equations are the same apart from moved terms and a factor of -1.

    Equations without unknowns are the same if their left sides are equal and their right sides are equal.
    """
    if first == second:
        return True
    if not (first.free_symbols or second.free_symbols):
        return not (_differ(first.lhs, second.lhs) or _differ(first.rhs, second.rhs))
    try:
        left, right = first.lhs - first.rhs, second.lhs - second.rhs
        return sympy.simplify(left - right) == 0 or sympy.simplify(left + right) == 0
    except (TypeError, ValueError, AttributeError):  # the sides have different types, such as a number and a matrix
        return False


_CONTAINERS = (sympy.Tuple, sympy.FiniteSet, sympy.MatrixBase)


def _members(container: Any) -> list[Any]:
    if isinstance(container, sympy.FiniteSet):
        return sorted(container.args, key=lambda member: sympy.default_sort_key(sympy.N(member, 30)))
    return list(container)


def _is_constant(expression: Any) -> bool:
    """Whether an expression is a number that is cheap to evaluate.

    A percentage (`UnevaluatedExpr`) is not a number here, because 50% may mean 50 or 0.5.
    """
    return (
        isinstance(expression, sympy.Expr)
        and expression.is_number is True
        and not expression.has(sympy.UnevaluatedExpr, sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit)
    )


def _may_be_rounded(first: Number, second: Number) -> bool:
    """Whether one number may be a rounded form of the other. 0.333333 may be 1/3, but 4.9999999 is not 5.

    True if both have a decimal point, or if one has a decimal point and the other is not a whole number.
    """
    return (first.rounded and second.rounded) or any(
        one.rounded and other.value != other.value.to_integral_value()
        for one, other in ((first, second), (second, first))
    )


def _rounded(answer: Decimal, truth: Decimal) -> bool:
    """Whether two numbers agree to six decimals and six significant digits, such as 0.333333 and 1/3."""
    return abs(answer - truth) <= min(_DECIMALS, _SIGNIFICANT * abs(truth))


# -------------------------------------------------------------------------------------------------------- math-verify

_STATED = re.compile(r"(?i)\banswer\b[^.\n]{0,50}?(?:\bis\b|:)[\s:*]*")
_NEXT_SENTENCE = re.compile(r"(?<!^[A-Z])[.!?]\s+(?=[A-Z])|\n")  # "A. Rome" is one answer
_INLINE = re.compile(r"\$([^$\n]+)\$|\\\(([^\n]+?)\\\)")


def _stated(text: str) -> list[str]:
    """Candidates for the answer in a text without a box: the text after the last "answer is"; the last inline formula."""
    stated: list[str] = []
    for match in _STATED.finditer(text):
        stated = [_NEXT_SENTENCE.split(text[match.end() :], maxsplit=1)[0].rstrip(" .*")]
    for match in _INLINE.finditer(text):
        stated[1:] = [match[1] or match[2]]
    return stated


_INDEXED = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]_")  # a letter with an index, but not \log_


def _parse(text: str, timeout_s: int) -> list[Any]:
    return _within(timeout_s, partial(parse, text, parsing_timeout=timeout_s, raise_on_error=True)) or []


def _parse_formula(latex: str, timeout_s: int) -> list[Any]:
    """The result of math-verify's parser for an answer alone.

    Of a formula that it cannot parse, math-verify takes the last number: 2/3 of E_1/3 + 2E_2/3. A formula with indexed
    letters is no number, so that only its text is kept then.
    """
    parsed = _parse(f"\\boxed{{{latex}}}", timeout_s)
    return [one for one in parsed if not isinstance(one, sympy.Number)] if _INDEXED.search(latex) else parsed


def _within(timeout_s: int, call: Callable[[], Any]) -> Any:
    """Call math-verify. Return None if it raises an error. Raise TimeoutError if it takes too long."""
    try:
        return call()
    except TimeoutException:
        raise TimeoutError(f"math-verify took more than {timeout_s} s") from None
    except MemoryError:
        raise
    except Exception:
        return None


compute_score = MathVerify()
required = MathVerify(boxed="required")
