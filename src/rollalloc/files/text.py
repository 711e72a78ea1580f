"""Makes untrusted text safe to show: it may be hostile, huge, or not text at all."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
_SENTENCES = (ValueError, TypeError, OSError, RuntimeError, ArithmeticError, ImportError, AttributeError)
_PICTURES = 0x2400  # first of Unicode's visible symbols for control characters
# Control and format characters, lone surrogates, line and paragraph separators, and code points without a character, some of
# which XML 1.0 does not allow.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp", "Cn")


def visible(text: str) -> str:
    """Replace characters that cannot be seen, such as control characters, by visible symbols.

    The result is safe in a terminal and valid in XML 1.0. For HTML it must still be escaped. A second call changes
    nothing.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter in _KEPT else _shown(letter) for letter in text)


def one_line(text: str, limit: int = 40) -> str:
    """Put a text on one line for figures and tables: at most `limit` characters, all visible."""
    name = " ".join(visible(text[: 4 * limit]).split())
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def as_markdown(text: str, limit: int) -> str:
    """A text as one line of Markdown that shows it unchanged, also in a table: at most `limit` characters of it."""
    text = one_line(text, limit).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "|`*[\\" else letter for letter in text)


def error_text(error: BaseException, limit: int | None = None) -> str:
    """The type and message of an error of code that is not ours, such as "KeyError: 'answer'", cut off after `limit`
    characters."""
    return f"{type(error).__name__}: {error}"[:limit]


def told(error: BaseException) -> str:
    """What a user is told of an error: its message without its type; for an error of the system, the files and the reason.

    Errors whose message is no sentence, such as a KeyError, keep their type.
    """
    if isinstance(error, OSError) and error.strerror:
        files = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*files, error.strerror])
    return str(error) if isinstance(error, _SENTENCES) and str(error) else error_text(error)


def _shown(letter: str) -> str:
    if unicodedata.category(letter) not in _UNSEEN:
        return letter
    return chr(_PICTURES + ord(letter)) if ord(letter) < 0x20 else f"⟨U+{ord(letter):04X}⟩"
