"""Filters of training questions, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|boxed)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"[A-Ea-e]|\([A-Ea-e]\)")  # of multiple choice
_OF_TWO = frozenset(
    (
        *("yes", "no", "true", "false", "correct", "incorrect", "possible", "impossible", "even", "odd"),
        *("convergent", "divergent", "converges", "diverges", "always", "never"),
    )
)


def can_be_guessed(answer: str) -> bool:
    r"""Whether an answer is one of two words, such as yes and no, or a letter of multiple choice, such as (B).

    A rollout that guesses such an answer is right every second to fifth time, whatever it says before. So these questions
    have the largest variance of rewards for a long time, and methods that select by variance prefer them.

    Args:
        answer: as the data set gives it; LaTeX such as `\\text{Yes}` and a final period do not count.
    """
    plain = _WRAPPED.sub(r"\1", answer).replace("$", "").strip().rstrip(".").strip()
    return plain.lower() in _OF_TWO or _LETTER.fullmatch(plain) is not None


FILTERS: Mapping[str, Callable[[str], bool]] = {"guessable": can_be_guessed}
"""By its name in `rollalloc data prepare --filter`: whether a question with this answer is left out."""
