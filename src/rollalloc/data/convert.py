"""Converts files with a question and an answer column, such as GSM8K's, into verl's schema."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from math import inf
from pathlib import Path
from reprlib import repr as short
from typing import Any

from rollalloc.data._files import read_rows
from rollalloc.data.prompts import check_row, is_placeholder, write_prompts
from rollalloc.rewards.extract import after_hashes, final

_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")  # 1,234


@dataclass(frozen=True)
class Converted:
    """Numbers of rows that were written and left out.

    Attributes:
        prompts: number of rows written.
        unanswered: number of rows left out because they have no answer, or because the answer's box is not closed.
        repeated: number of rows left out because an earlier row has the same question and answer.
        contradicted: number of rows left out because another row has the same question and a different answer.
        placeholders: number of rows left out because their answer is a placeholder such as "proof", for each placeholder.
    """

    prompts: int
    unanswered: int
    repeated: int = 0
    contradicted: int = 0
    placeholders: Mapping[str, int] = field(default_factory=dict[str, int])


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
    r"""Convert a file of questions and answers into verl's schema. After an error, nothing is written.

    A question that is text becomes a user message. The ground truth is the content of the answer's last box; without a box,
    the text after the last `####`; without either, the whole answer. `extra_info.index` is the row's number in the
    file, from 0.

    Args:
        file: a parquet, JSON, JSONL, CSV or TSV file.
        out: the file to write, which must not exist; its suffix determines the format.
        question: name of the question column, which holds text or messages.
        answer: name of the answer column, which holds text or numbers. If it is the question column, its messages end with
            the assistant's, which is the answer, as in data for supervised training.
        system: text of a system message to put before each question. None: no system message.
        source: `data_source` of all rows. None: the name of `file` without its suffix.
        prefill: True: messages may end with an assistant's message, which the model then continues. False: such a message
            raises an error, because it may be the answer.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: `file` does not exist.
        ValueError: a suffix is unknown; a row lacks one of these columns; a value in them has a wrong type; or no row is
            left.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists already; move it away, or give another --out")
    kept: dict[str, dict[str, Any]] = {}  # by prompt
    times: Counter[str] = Counter()
    contradicted: set[str] = set()
    placeholders: Counter[str] = Counter()
    unanswered = 0
    for number, (place, raw) in enumerate(read_rows(file)):
        if _is_converted(raw) and (question not in raw or answer not in raw or isinstance(raw[answer], Mapping)):
            raise ValueError(
                f"{place}: the file has verl's schema already, so that --question {short(question)} and --answer "
                f"{short(answer)} have nothing to convert; use the file as it is, as --prompts {file}"
            )
        for column in (question, answer):
            if not isinstance(raw, Mapping) or column not in raw:
                found = ", ".join(map(short, raw)) if isinstance(raw, Mapping) else short(raw)
                raise ValueError(
                    f"{place}: expected a column {column!r}, found {found or 'nothing'}; name one of these"
                )
        asked, given = raw[question], raw[answer]
        if question == answer:
            asked, given = _parted(f"{place}: {question}", asked)
        truth = _answer(f"{place}: {answer}", given)
        if truth is None:
            unanswered += 1
            continue
        if is_placeholder(truth):
            placeholders[truth] += 1
            continue
        messages = _messages(f"{place}: {question}", asked, system)
        if messages[-1].get("role") == "assistant" and not prefill:
            raise ValueError(
                f"{place}: {question} must end with a question, got an assistant's message, {short(messages[-1])}; give "
                f"--answer {question} if it is the answer, or --prefill if the model is to continue it"
            )
        row = {
            "data_source": file.stem if source is None else source,
            "prompt": messages,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": number},
        }
        check_row(place, row)
        prompt = repr(row["prompt"])
        times[prompt] += 1
        if kept.setdefault(prompt, row)["reward_model"] != row["reward_model"]:
            contradicted.add(prompt)
    rows = [row for prompt, row in kept.items() if prompt not in contradicted]
    made = Converted(
        prompts=len(rows),
        unanswered=unanswered,
        repeated=sum(count - 1 for prompt, count in times.items() if prompt not in contradicted),
        contradicted=sum(times[prompt] for prompt in contradicted),
        placeholders=dict(placeholders.most_common()),
    )
    if not rows:
        raise ValueError(
            f"{file}: nothing to write: {made.unanswered} rows have no answer in their column {answer!r}, "
            f"{placeholders.total()} have a placeholder such as 'proof', and {made.contradicted} ask a question that "
            "another row answers differently; name other columns"
        )
    write_prompts(out, rows)
    return made


def _is_converted(raw: Any) -> bool:
    """Whether a row has the columns of verl's schema."""
    truth = raw.get("reward_model") if isinstance(raw, Mapping) else None
    return isinstance(truth, Mapping) and "ground_truth" in truth and "prompt" in raw and "data_source" in raw


def _parted(place: str, chat: Any) -> tuple[list[Any], Any]:
    """The messages before the assistant's last one, and the content of this one."""
    last = chat[-1] if isinstance(chat, list) and chat else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise ValueError(
            f"{place} holds questions and answers, so its messages must end with the assistant's, got {short(chat)}; "
            "fix the row, or name another column with --answer"
        )
    return chat[:-1], last.get("content")


def _messages(place: str, asked: Any, system: str | None) -> list[dict[str, Any]]:
    """The messages of a prompt: the system message, if there is one, and the question."""
    if isinstance(asked, str) and asked.strip():
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked or not all(isinstance(message, Mapping) for message in asked):
        raise ValueError(f"{place} must be text or messages [{{role, content}}], got {short(asked)}; fix the row")
    messages = [{name: value for name, value in message.items() if value is not None} for message in asked]
    if system is None:
        return messages
    if messages[0].get("role") == "system":
        raise ValueError(f"{place} has a system message of its own, {short(asked[0])}; leave --system out")
    return [{"role": "system", "content": system}, *messages]


def _answer(place: str, given: Any) -> str | None:
    """The final answer as text. None if there is no answer, or if the answer's box is not closed."""
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
