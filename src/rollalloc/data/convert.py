"""Questions and answers in columns of any name, as TRL's and GSM8K's files have them, in verl's schema."""

from __future__ import annotations

import os
import re
from collections import Counter
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
    """What was written, and how many rows were left out.

    Attributes:
        prompts: written.
        unanswered: rows without an answer, or with one that breaks off within its box.
        repeated: rows whose question came before with the same answer.
        contradicted: rows of questions with different answers, none of which is written.
        continued: rows whose messages end with the assistant's, which the model is to continue.
    """

    prompts: int
    unanswered: int
    repeated: int = 0
    contradicted: int = 0
    continued: int = 0


def convert(
    file: Path,
    out: Path,
    *,
    question: str,
    answer: str,
    system: str | None = None,
    source: str | None = None,
    prefill: bool = False,
) -> Converted:
    r"""Write a file's questions and answers in verl's schema, whole or not at all.

    A question that is text becomes a user's message. Of an answer counts its last `\boxed{...}`, else what follows its last
    `####`, else all of it. A row's number in the file, from 0, is its index.

    Args:
        file: parquet, JSON, JSONL, CSV or TSV.
        out: the file to write, which must not be there; its suffix says the format.
        question: name of the column that holds the question, as text or as messages.
        answer: name of the column that holds the answer, as text or as a number.
        system: text of a system message before each question; None: none is added.
        source: `data_source` of all rows; None: the name of `file` without its suffix.
        prefill: an assistant's message that ends the messages is always a beginning that the model continues. Otherwise it
            is one only if it follows a question, is the same in each row that has one and does not contain the row's
            answer; any other is refused, because it may be the answer itself.

    Raises:
        FileExistsError: something stands at `out`.
        FileNotFoundError: there is no `file`.
        ValueError: another suffix, one column as both question and answer, a row without these columns or with something
            else in them, nothing left to write.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already; move it away, or give another --out")
    if question == answer:
        raise ValueError(f"--question and --answer both name the column {question!r}; name two different columns")
    kept: dict[str, dict[str, Any]] = {}  # by question
    times: Counter[str] = Counter()
    contradicted: set[str] = set()
    beginnings: set[str] = set()  # assistant's messages that the model is to continue
    unanswered = continued = 0
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
        messages = _messages(f"{place}: {question}", raw[question], system)
        if messages[-1].get("role") == "assistant":
            continued += 1
            beginnings.add(repr(messages[-1]))
            if not prefill and (len(beginnings) > 1 or not _is_beginning(messages, truth)):
                raise _may_be_answer(f"{place}: {question}", messages[-1])
        row = {
            "data_source": file.stem if source is None else source,
            "prompt": messages,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": number},
        }
        check_row(place, row)
        asked = repr(row["prompt"])
        times[asked] += 1
        if kept.setdefault(asked, row)["reward_model"] != row["reward_model"]:
            contradicted.add(asked)
    rows = [row for asked, row in kept.items() if asked not in contradicted]
    made = Converted(
        prompts=len(rows),
        unanswered=unanswered,
        repeated=sum(count - 1 for asked, count in times.items() if asked not in contradicted),
        contradicted=sum(times[asked] for asked in contradicted),
        continued=continued,
    )
    if not rows:
        raise ValueError(
            f"{file}: nothing to write: {made.unanswered} rows have no answer in their column {answer!r}, and "
            f"{made.contradicted} ask a question that another row answers differently; name other columns"
        )
    write_prompts(out, rows)
    return made


def _messages(place: str, asked: Any, system: str | None) -> list[dict[str, Any]]:
    """The chat that asks: a system message, where there is to be one, and the question."""
    if isinstance(asked, str) and asked.strip():
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked or not all(isinstance(message, Mapping) for message in asked):
        raise ValueError(f"{place} must be text or messages [{{role, content}}], got {short(asked)}; mend the row")
    messages = [{name: value for name, value in message.items() if value is not None} for message in asked]
    if system is None:
        return messages
    if messages[0].get("role") == "system":
        raise ValueError(f"{place} has a system message of its own, {short(asked[0])}; leave --system out")
    return [{"role": "system", "content": system}, *messages]


def _is_beginning(messages: list[dict[str, Any]], truth: str) -> bool:
    """Whether a last message of the assistant follows a question and does not contain the answer."""
    text = messages[-1].get("content")
    asked = any(message.get("role") not in ("system", "assistant") for message in messages)
    return asked and isinstance(text, str) and bool(text.strip()) and truth.casefold() not in text.casefold()


def _may_be_answer(place: str, message: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"{place} must end with a question, got an assistant's message, {short(message)}; take it out if it is the answer, "
        "or give --prefill if the model is to continue it"
    )


def _answer(place: str, given: Any) -> str | None:
    """The final answer as text; None where there is none, or the text breaks off within its box."""
    if given is None or (isinstance(given, str) and given.strip().lower() in ("", "nan")) or given != given:
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
        return None
    return found.replace(",", "") if after_hashes(given) is not None and _GROUPED.fullmatch(found) else found
