"""Text that others wrote, made fit to be shown: it may be hostile, huge, or not text at all."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
_PICTURES = 0x2400  # the pictures of the control characters begin here
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, marks such as right-to-left override, lone surrogates, separators


def visible(text: str) -> str:
    """The text with everything that acts on its surroundings, or that no font shows, turned into something to read.

    What is left can stand in a page, in XML 1.0 and in a terminal; made visible twice it stays the same.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter in _KEPT else _shown(letter) for letter in text)


def shortened(text: str, limit: int = 480) -> str:
    """The beginning and the end of a text; in a rollout the end holds the answer."""
    if len(text) <= limit:
        return text
    begin, end = limit * 2 // 3, limit // 3
    return f"{text[:begin]} … {len(text) - begin - end:,} characters left out … {text[-end:]}"


def one_line(text: str, limit: int = 40) -> str:
    """A name for a figure or a table, visible, without line breaks, at most so many characters long."""
    name = " ".join(visible(text[: 4 * limit]).split())
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _shown(letter: str) -> str:
    if unicodedata.category(letter) not in _UNSEEN and not _is_no_character(ord(letter)):
        return letter
    return chr(_PICTURES + ord(letter)) if ord(letter) < 0x20 else f"⟨U+{ord(letter):04X}⟩"


def _is_no_character(code: int) -> bool:
    """Unicode's 66 noncharacters, some of which XML 1.0 refuses."""
    return code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
