"""Summaries of the texts in a log: a few features of a prompt, and a hash of an answer."""

from __future__ import annotations

from array import array

import numpy as np

from rollalloc.rewards.extract import final

_GRAMS = 32  # number of columns into which pairs and triples of bytes are hashed
_COUNTED = (b"0123456789", b" \n\t", b"+-*/=^<>()[]{}\\$", b"?.,:;!", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
WIDTH = 2 + len(_COUNTED) + _GRAMS
NOTHING = array("f", [float("nan")]) * WIDTH
_MOST = 1 << 13  # number of bytes to read at a prompt's end; beginnings are often the same for all prompts
_LAST = 200  # maximum number of characters of an answer without a box or `####`

_KIND_OF = np.full(256, len(_COUNTED))
for _number, _characters in enumerate(_COUNTED):
    _KIND_OF[np.frombuffer(_characters, np.uint8)] = _number


def features_of(text: str) -> array[float]:
    """Cheap features of a prompt's text.

    They are the logarithms of its length and number of lines, shares of several kinds of characters, and shares of hashed
    pairs and triples of bytes.

    Args:
        text: text of the prompt. The shares are computed from its last 8,192 bytes.
    """
    encoded = text.encode("utf-8", "replace")
    code_T = np.frombuffer(encoded[-_MOST:], np.uint8)
    kind_K = np.bincount(_KIND_OF[code_T], minlength=len(_COUNTED) + 1)[:-1]
    wide_T = code_T.astype(np.uint32)
    pair_T = wide_T[1:] * 257 + wide_T[:-1]
    triple_T = pair_T[1:] * 263 + wide_T[:-2]
    mixed_T = np.concatenate([pair_T, triple_T]) * np.uint32(2_654_435_761) >> np.uint32(27)
    gram_G = np.bincount(mixed_T, minlength=_GRAMS)
    size = max(1, len(code_T))
    return array("f", [np.log1p(len(encoded)), np.log1p(encoded.count(b"\n")), *(kind_K / size), *(gram_G / size)])


def answer_hash(text: str) -> int:
    r"""A 64-bit hash of a completion's answer, never 0, comparable within this process.

    The answer is the content of the last `\boxed{...}`; without a box, the text after the last `####`; without either,
    the end of the last line.

    Args:
        text: the completion.
    """
    answer = final(text)
    if answer is None or answer is text:
        answer = text.rstrip().rpartition("\n")[2]
    return hash(answer.strip()[-_LAST:]) or 1
