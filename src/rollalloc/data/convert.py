"""Questions and answers in columns of any name, as TRL's and GSM8K's files have them, in verl's schema."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import inf
from pathlib import Path
from reprlib import repr as short
from typing import Any

from rollalloc.data._files import read_rows
from rollalloc.data.prompts import check_row, write_prompts
from rollalloc.rewards.extract import after_hashes, final

_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")  # 1,234


@dataclass(frozen=True)
class Converted:
    """What was written: how many prompts, and how many rows were left out because they have no answer."""

    prompts: int
    unanswered: int


def convert(
    file: Path, out: Path, *, question: str, answer: str, system: str | None = None, source: str | None = None
) -> Converted:
    r"""Write a file's questions and answers in verl's schema, whole or not at all.

    A question that is text becomes a user's message. Of an answer counts its last `\boxed{...}`, else what follows its last
    `####`, else all of it. A row's number in the file, from 0, is its index.

    Args:
        file: parquet or JSONL.
        out: the file to write, which must not be there; its suffix says the format.
        question: name of the column that holds the question, as text or as messages.
        answer: name of the column that holds the answer, as text or as a number.
        system: text of a system message before each question; None: none is added.
        source: `data_source` of all rows; None: the name of `file` without its suffix.

    Raises:
        FileExistsError: something stands at `out`.
        FileNotFoundError: there is no `file`.
        ValueError: another suffix, a row without these columns or with something else in them, two answers to one
            question, no row with an answer.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already; move it away, or give another --out")
    rows: list[dict[str, Any]] = []
    asked: dict[str, tuple[str, str]] = {}  # a question -> where it stands first, and its answer
    unanswered = 0
    for number, (place, raw) in enumerate(read_rows(file)):
        for column in (question, answer):
            if not isinstance(raw, Mapping) or column not in raw:
                found = ", ".join(map(short, raw)) if isinstance(raw, Mapping) else short(raw)
                raise ValueError(
                    f"{place}: expected a column {column!r}, found {found or 'nothing'}; name one of these"
                )
        truth = _answer(f"{place}: {answer}", raw[answer])
        if truth is None:
            unanswered += 1
            continue
        row = {
            "data_source": file.stem if source is None else source,
            "prompt": _messages(f"{place}: {question}", raw[question], system),
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": number},
        }
        check_row(place, row)
        first, other = asked.setdefault(repr(row["prompt"]), (place, truth))
        if other != truth:
            raise ValueError(
                f"{first} and {place} ask the same with different answers, {short(other)} and {short(truth)}; keep one"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{file}: none of {unanswered} rows has anything in its column {answer!r}; name another")
    write_prompts(out, rows)
    return Converted(len(rows), unanswered)


def _messages(place: str, asked: Any, system: str | None) -> list[dict[str, str]]:
    """The chat that asks: a system message, where there is to be one, and the question."""
    if isinstance(asked, str) and asked.strip():
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked or not all(isinstance(each, Mapping) for each in asked):
        raise ValueError(f"{place} must be text or messages [{{role, content}}], got {short(asked)}; mend the row")
    messages = [{name: each.get(name) for name in ("role", "content")} for each in asked]
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{place} must end with a question, got an assistant's message, {short(asked[-1])}")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError(f"{place} has a system message of its own, {short(asked[0])}; leave --system out")
    return [{"role": "system", "content": system}, *messages]


def _answer(place: str, given: Any) -> str | None:
    """The final answer as text; None where there is none."""
    if given is None or (isinstance(given, str) and not given.strip()) or given != given:
        return None
    if isinstance(given, bool) or not (
        isinstance(given, str) or (isinstance(given, (int, float, Decimal)) and abs(given) != inf)
    ):
        raise ValueError(
            f"{place} must be text or a number, got {short(given)}; name a column that holds the answer alone"
        )
    if not isinstance(given, str):
        exact = f"{given:f}".rstrip("0") if isinstance(given, Decimal) else given
        return str(int(given) if given == int(given) else exact)
    found = (final(given) or "").strip()
    if not found:
        raise ValueError(
            f"{place} has nothing after its #### or in its box, {short(given)}; mend the row or leave it out"
        )
    return found.replace(",", "") if after_hashes(given) is not None and _GROUPED.fullmatch(found) else found
