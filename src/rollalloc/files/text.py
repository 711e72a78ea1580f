"""Makes untrusted text safe to show: it may be hostile, huge, or not text at all."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
_PICTURES = 0x2400  # first of Unicode's visible symbols for control characters
_UNSEEN = (
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
)  # control and format characters, lone surrogates, line and paragraph separators


def visible(text: str) -> str:
    """Replace characters that cannot be seen, such as control characters, by visible symbols.

    The result is safe in a terminal and valid in XML 1.0. For HTML it must still be escaped. A second call changes
    nothing.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter in _KEPT else _shown(letter) for letter in text)


def shortened(text: str, limit: int = 480) -> str:
    """Shorten a text by leaving out its middle. The end is kept, because a rollout's answer is at its end."""
    if len(text) <= limit:
        return text
    begin, end = limit * 2 // 3, limit // 3
    return f"{text[:begin]} … {len(text) - begin - end:,} characters left out … {text[-end:]}"


def one_line(text: str, limit: int = 40) -> str:
    """A visible text on one line, shortened to `limit` characters, for names in figures and tables."""
    name = " ".join(visible(text[: 4 * limit]).split())
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def error_text(error: BaseException, limit: int | None = None) -> str:
    """The type and message of an error, such as "ValueError: expected a number", cut off after `limit` characters."""
    return f"{type(error).__name__}: {error}"[:limit]


def _shown(letter: str) -> str:
    if unicodedata.category(letter) not in _UNSEEN and not _is_no_character(ord(letter)):
        return letter
    return chr(_PICTURES + ord(letter)) if ord(letter) < 0x20 else f"⟨U+{ord(letter):04X}⟩"


def _is_no_character(code: int) -> bool:
    """Whether a code point is one of Unicode's 66 noncharacters. XML 1.0 does not allow some of them."""
    return code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
