"""Finding the answer in a completion. Each extractor takes text and returns the answer, None where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Extractor = Callable[[str], str | None]

_BOX = "\\boxed{"
_BRACE = re.compile(r"\\[\\{}]|[{}]")  # a backslash takes its brace out of the count


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None where it is not closed, as in a truncated completion."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, start + len(_BOX)):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + len(_BOX) : brace.start()]
    return None


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K's solutions end."""
    _, hashes, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].rstrip() if hashes else None


def final(text: str) -> str | None:
    r"""The last `\boxed{...}`; without one, what follows the last `####`; without that, the whole text."""
    for extractor in (boxed, after_hashes):
        answer = extractor(text)
        if answer is not None:
            return answer
    return text


@dataclass(frozen=True)
class Pattern:
    """The last match of a regular expression: its first group, or all of it where it has none.

    A pattern that backtracks without end on some text is ended by the worker's limit on time.

    Args:
        regex: as the `re` module takes it; dots match line ends.
    """

    regex: str

    def __call__(self, text: str) -> str | None:
        answer = None
        for match in re.finditer(self.regex, text, re.DOTALL):
            answer = match[1] if match.re.groups else match[0]
        return answer
