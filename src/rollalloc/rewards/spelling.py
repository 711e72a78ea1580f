r"""One spelling for answers that are written differently, as text.

`plain` removes differences without meaning, `upright` rewrites constants and functions in upright letters, such as
`\mathrm{e}` and `\operatorname{ln}`, and `choice` finds the letter of a multiple-choice answer.
"""

from __future__ import annotations

import re

from rollalloc.rewards.notation import as_number, in_latex

_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|math(?:rm|bf|it)|operatorname|rm|bf)\s?\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|quad|qquad)(?![a-zA-Z])|\\[,!:; ()\[\]]|~|\$")
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\(leq?|geq?)(?:slant)?(?![a-zA-Z])", lambda match: "\\" + match[1][:2]),
        (r"([_^])\s?\{\s?(\w+)\s?\}", r"\1\2"),
        (r"\s+(?![0-9])|(?<![0-9])\s+", ""),
        (r"\\%", "%"),
        (r"\.+$", ""),
    )
)

_WORDS = re.compile(r"(?=.*[a-zA-Z]{4}|.*[A-Z]{3}|[A-Z](?:,[A-Z])+$)[a-zA-Z,;.'’()-]+")
_SENTENCE = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{12}")  # a sentence after normalization, which removes spaces
_CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9](?::[0-5][0-9])?(?:[ap]\.?m\.?)?", re.IGNORECASE)


def plain(answer: str) -> str:
    """Normalize an answer: remove differences in spelling that have no meaning. Answers with equal results are equal."""
    text = _unwrapped(in_latex(answer.strip()))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    if _CLOCK.fullmatch(text):
        return text.replace(".", "").lower()
    return text.lower() if _WORDS.fullmatch(text) else text


def _unwrapped(text: str) -> str:
    r"""Replace `\text{...}` and the like by its content, and spaces of LaTeX and commands of layout by spaces."""
    return _LAYOUT.sub(" ", _TEXT.sub(r" \1 ", text))


def is_text(plain: str) -> bool:
    """Whether a normalized answer is text and not a formula: words, a sentence, a time of day, or a ratio like 1:2:3."""
    return bool(_WORDS.fullmatch(plain) or _CLOCK.fullmatch(plain) or _SENTENCE.search(plain)) or plain.count(":") > 1


# --------------------------------------------------------------------------------------- constants in upright letters

_NAMES = r"(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc|ln|log|lg|exp|(?:arc|c)?tg"
_OTHER_NAMES = {"tg": "tan", "ctg": "cot", "arctg": "arctan"}  # as Russian books write them
_COMMANDS = r"(?:math(?:rm|up|sf)|operatorname|text(?:rm|up|normal)?|mbox|rm)"
_UPRIGHT = re.compile(
    rf"\\{_COMMANDS}\s?\{{\s?(?:(?P<constant>[ei])|(?P<function>{_NAMES})|(?P<greek>\\[a-zA-Z]+))\s?\}}"
    rf"|\{{\s?\\rm\s+(?:(?P<old_constant>[ei])|(?P<old_function>{_NAMES}))\s?\}}"
    r"|(?P<imaginary>\\imath(?![a-zA-Z]))"
)


def upright(text: str) -> str:
    r"""Rewrite `\mathrm{e}` as e, `\mathrm{i}` as i, and functions such as `\operatorname{ln}` as `\ln`."""
    return _UPRIGHT.sub(_sloped, text)


def _sloped(match: re.Match[str]) -> str:
    """The usual spelling of a constant or function in upright letters, apart from letters beside it."""
    groups = match.groupdict()
    if name := groups["function"] or groups["old_function"]:
        spelling = "\\" + _OTHER_NAMES.get(name, name)
    elif groups["imaginary"]:
        spelling = "i"
    else:
        spelling = groups["constant"] or groups["old_constant"] or groups["greek"]
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return f"{' ' if before.isalpha() and spelling.isalpha() else ''}{spelling}{' ' if after.isalpha() else ''}"


# ------------------------------------------------------------------------------------------------- multiple choice

_LETTER = re.compile(r"\(\s?([A-Z])\s?\)|([A-Z])\)?\.?")
# "(C) 12", "C: 12", "C. Paris", "C - Paris"; but A:B is a ratio, and C - x a difference.
_LABEL = re.compile(
    r"(?:\(\s?([A-Z])\s?\)|([A-Z])\s?(?:[).]|:(?!\s?[A-Z](?![a-zA-Z]))|(?<=\s)[-—]\s(?=\s*[a-zA-Z]{3})))"
    r"(?!\s*(?:[,;/&]|or\b|and\b)\s*\(?[A-Z]\b)(?!(?:\s*\([A-Z]\))+$)\s*"
)
_OPTION = re.compile(r"(?i:option|choice|answer)\b[\s:]*(?=\(?\s?[A-Z]\b)")
_FIRST_WORD = re.compile(r"[a-zA-Z]{2}")


def choice(answer: str) -> str | None:
    """The letter of a multiple-choice answer, such as C for "C", "(C)", "C: 12" and "(C) Paris"; None for other answers.

    Only the first letter counts: what follows it may be the option's words. Two letters, as in "(A) or (B)", are no choice.
    """
    return _choice(answer)[0]


def choice_of_truth(truth: str) -> str | None:
    """The letter of a ground truth. Unlike an answer's letter, only a number or words may follow, because (A) + 1 is a
    formula; and no words after a period, because A. Einstein is a name.
    """
    letter, rest = _choice(truth)
    is_option = not rest or as_number(rest) is not None or (_FIRST_WORD.match(rest) and f"{letter}." not in truth)
    return letter if is_option else None


def _choice(answer: str) -> tuple[str | None, str]:
    """The letter of a multiple-choice answer, or None, and the text after it."""
    text = _unwrapped(in_latex(answer)).replace("**", "").strip()
    text = text[found.end() :] if (found := _OPTION.match(text)) else text
    match = _LETTER.fullmatch(text) or _LABEL.match(text)
    return (match[1] or match[2], text[match.end() :]) if match else (None, "")
