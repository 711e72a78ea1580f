"""Mathematical answers, compared by math-verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from reprlib import repr as short
from threading import current_thread, main_thread
from typing import Any

from rollalloc.rewards.extract import boxed

try:
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException
except ImportError as error:
    raise ImportError("mathematical rewards need math-verify; pip install 'rollalloc[rewards]'") from error

_GOLDS = 1024  # ground truths whose parsing is kept


@dataclass(frozen=True)
class MathVerify:
    r"""1 where math-verify finds the answer equal to the ground truth, 0 where not or where there is no answer.

    The answer is the last `\boxed{...}`; without one, what math-verify finds in the text. A comparison that takes too
    long raises, and leaves the sample unscored: math-verify itself would call it wrong. Its alarm does not reach into
    a long computation of integers, which only the limit of a `WorkerScorer` ends.

    Args:
        timeout_s: whole seconds for parsing, and for each comparison, at least 1.

    Raises:
        TimeoutError: no answer within the time.
        ValueError: the ground truth cannot be parsed.
        RuntimeError: not called in the main thread, where alone the alarm works.
    """

    timeout_s: int = 5

    def __call__(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        if current_thread() is not main_thread():
            raise RuntimeError("math-verify's time-out works in the main thread only; score with WorkerScorer")
        golds = _parse_gold(str(ground_truth), self.timeout_s)
        if not golds:
            raise ValueError(f"ground truth {short(ground_truth)} is nothing that math-verify can parse")
        box = boxed(solution_str)
        answers = _parse(solution_str if box is None else _boxed(box), self.timeout_s)
        return float(self._any_equal(golds, answers))

    def _any_equal(self, golds: list[Any], answers: list[Any]) -> bool:
        """Whether any pair is equal; raises where none is but one took too long."""
        late: TimeoutError | None = None
        for gold, answer in product(golds, answers):
            try:
                if _within(self.timeout_s, partial(verify, gold, answer, timeout_seconds=self.timeout_s)):
                    return True
            except TimeoutError as error:
                late = error
        if late is not None:
            raise late
        return False


@lru_cache(_GOLDS)
def _parse_gold(text: str, timeout_s: int) -> list[Any]:
    return _parse(text if "\\boxed" in text or "$" in text else _boxed(text), timeout_s)


def _parse(text: str, timeout_s: int) -> list[Any]:
    return _within(timeout_s, partial(parse, text, parsing_timeout=timeout_s)) or []


def _within(timeout_s: int, call: Callable[..., Any]) -> Any:
    """math-verify's result; None where it failed, TimeoutError where it took too long, which it does not tell apart."""
    try:
        return call(raise_on_error=True)
    except TimeoutException:
        raise TimeoutError(f"math-verify took more than {timeout_s} s") from None
    except MemoryError:
        raise
    except Exception:
        return None


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


compute_score = MathVerify()
