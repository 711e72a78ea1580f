"""Extractors find the answer in a completion. Each takes a text and returns the answer, or None if there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Extractor = Callable[[str], str | None]

# The command of a box. Without a brace, it is a box only before a number, a single letter, a command or parentheses, as in
# `\boxed 2`; otherwise a sentence only mentions the command.
_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![a-zA-Z])(?:\s{0,9}\{"
    r"|[ \t]{0,9}(?=[-+]?(?:\.?[0-9]|[a-zA-Z](?![a-zA-Z])|\\[a-zA-Z]|\((?![a-zA-Z]{2})[^()$\n]{0,99}\))))"
)
_BRACE = re.compile(r"\\[\\{}]|[{}]")  # escaped braces match too, so that they are skipped
_UNBRACED = re.compile(r"(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\([^()$\n]*\)|\\[a-zA-Z]+|[^\s$\\{}()])+")
_NEXT_SENTENCE = re.compile(r"(?<=[\w)}%$])[.!?]\s+(?=[A-Z])")


def boxed(text: str) -> str | None:
    r"""The content of the last box: `\boxed{...}`, `\fbox{...}`, or `\boxed` before a number, a letter or a formula without
    spaces.

    None if there is no box, or if the last box is not closed.
    """
    start = _start_of_last_box(text)
    if start is None:
        return None
    if text[start - 1] != "{":
        content = _UNBRACED.match(text, start)
        return content and content[0].rstrip(".,;:!?")
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def is_cut_off(text: str) -> bool:
    r"""Whether the last box is not closed, because the completion ended inside its answer."""
    return _start_of_last_box(text) is not None and boxed(text) is None


def after_hashes(text: str) -> str | None:
    """The first sentence after the last `####`, on the same line, as in GSM8K's solutions; None without `####`."""
    _, hashes, rest = text.rpartition("####")
    if not hashes:
        return None
    line = rest.strip().partition("\n")[0].rstrip()
    sentence = _NEXT_SENTENCE.split(line, maxsplit=1)[0]
    return sentence if re.search(r"\d", sentence) else line  # do not split "St. Petersburg"


def final(text: str) -> str | None:
    r"""The content of the last box; without a box, the sentence after the last `####`; without either, the whole text.

    A box is preferred to `####`, which also begins a heading in Markdown. None if the last box is not closed: then the
    completion was cut off, and an earlier box is not its answer.
    """
    if is_cut_off(text):
        return None
    for extractor in (boxed, after_hashes):
        answer = extractor(text)
        if answer is not None:
            return answer
    return text


def _start_of_last_box(text: str) -> int | None:
    """Where the content of the last box begins; None if there is no box."""
    start = None
    for command in _BOX.finditer(text):
        start = command.end()
    return start


@dataclass(frozen=True)
class Pattern:
    """The last match of a regular expression: its first group, or the whole match if it has no group.

    A pattern may backtrack almost forever on some texts; the time limit of a `WorkerScorer` stops it.

    Args:
        regex: a pattern of the `re` module; dots match line ends.
    """

    regex: str

    def __call__(self, text: str) -> str | None:
        answer = None
        for match in re.finditer(self.regex, text, re.DOTALL):
            answer = match[1] if match.re.groups else match[0]
        return answer
