"""Example rollouts of a run, from `rollouts.jsonl` if the run wrote it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from rollalloc.files.text import shortened, visible
from rollalloc.runs.fields import rollout
from rollalloc.runs.files import open_regular, why

_PART_BYTES = 4 << 20  # number of bytes to read at the file's end, because the file may be larger than the memory
_EACH = 2  # examples per outcome
_FATES = 12  # maximum number of outcomes to show, because a reward function may give many reasons for missing scores
STOPPED = "stopped"  # the reason for no score when the recipe stopped the rollout


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """A rollout to show: its outcome in words, and its text, which is shortened and has visible control characters."""

    fate: str
    key: str
    text: str
    reward: float | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Samples:
    """A run's newest rollouts of each outcome, and what could not be read; None: nothing."""

    examples: list[ShownRollout]
    problem: str | None = None


def samples(folder: Path) -> Samples:
    """The newest rollouts of each outcome, and what could not be read. An incomplete line that a killed run left is
    skipped.
    """
    wrong: list[str] = []
    try:
        lines = list(_newest(folder / "rollouts.jsonl", wrong))
    except (FileNotFoundError, NotADirectoryError):  # a run of verl is a file
        return Samples([])
    except OSError as error:
        return Samples([], f"rollouts.jsonl: {why(error)}")
    more = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
    return Samples(_of_each_fate(lines), f"rollouts.jsonl{wrong[0]}{more}" if wrong else None)


def _of_each_fate(lines: list[Mapping[str, Any]]) -> list[ShownRollout]:
    rewards: dict[Any, list[float]] = {}
    for line in lines:
        if "reward" in line:
            rewards.setdefault(line.get("group"), []).append(line["reward"])
    grouped = any(len(of_group) > 1 for of_group in rewards.values())
    examples: dict[str, list[ShownRollout]] = {}
    for line in reversed(lines):
        fate = _fate(line, rewards.get(line.get("group"), []), grouped)
        if fate not in examples and len(examples) == _FATES:
            continue
        shown = examples.setdefault(fate, [])
        text = visible(shortened(line.get("text", "")))
        if len(shown) < _EACH and text not in (example.text for example in shown):
            key = line.get("key", line.get("prompt"))
            shown.append(
                ShownRollout(fate, "" if key is None else str(key), text, line.get("reward"), line.get("tokens"))
            )
    return [example for fate in sorted(examples) for example in examples[fate]]


def _fate(line: Mapping[str, Any], rewards: Sequence[float], grouped: bool) -> str:
    if line.get("unscored") == STOPPED:
        return "stopped early"
    if line.get("unscored"):
        return f"not scored: {visible(line['unscored'][:80])}"
    if "reward" not in line:
        return "not scored"
    if line.get("truncated"):
        return "cut off at the length limit"
    if not grouped:
        return "the only one of its prompt"
    if len(set(rewards)) > 1:
        return "in a mixed group, the better" if line["reward"] == max(rewards) else "in a mixed group, the worse"
    return "in a group whose rewards are all alike"


def _newest(path: Path, wrong: list[str]) -> Iterator[Mapping[str, Any]]:
    """Rollouts from the end of the file, oldest first. Complete lines that are not rollouts are reported in `wrong`."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, size - _PART_BYTES))
        content = file.read(_PART_BYTES)
    part = BytesIO(content)
    if begin:
        part.readline()  # skip the rest of a line
    at = begin + part.tell()
    for number, line in enumerate(part, start=1):
        try:
            if line.strip():
                yield rollout(line)
        except ValueError as error:
            if line.endswith(b"\n"):
                wrong.append(f"{f', the line at byte {at:,}' if begin else f':{number}'} is no rollout: {error}")
        at += len(line)
