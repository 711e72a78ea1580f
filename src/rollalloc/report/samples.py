"""A few rollouts of a run, to see what its figures are about; from `rollouts.jsonl`, where the run wrote one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from rollalloc.report.text import shortened, visible

_TAIL_BYTES = 4 << 20  # the newest rollouts; the file may be larger than memory
_EACH = 2  # examples of a fate
_STOPPED = "stopped"  # why a rollout that its recipe stopped has no score


@dataclass(frozen=True, slots=True)
class Example:
    """A rollout fit to be shown.

    Attributes:
        fate: what became of it, in plain words.
        key: of its prompt.
        text: what the model wrote, visible and cut.
        reward: None where it has no score.
        tokens: its length.
    """

    fate: str
    key: str
    text: str
    reward: float | None
    tokens: int | None


def examples(folder: Path) -> list[Example]:
    """The newest rollouts of each fate; none where the run kept none."""
    lines = list(_newest(folder / "rollouts.jsonl"))
    rewards: dict[Any, set[float]] = {}
    for line in lines:
        if line.get("reward") is not None:
            rewards.setdefault(line.get("group"), set()).add(line["reward"])
    found: dict[str, list[Example]] = {}
    for line in reversed(lines):
        fate = _fate(line, rewards.get(line.get("group"), set()))
        text = visible(shortened(str(line.get("text", ""))))
        shown = found.setdefault(fate, [])
        if len(shown) < _EACH and text not in (example.text for example in shown):
            key = line.get("key", line.get("prompt"))
            shown.append(Example(fate, str(key or ""), text, line.get("reward"), line.get("tokens")))
    return [example for fate in sorted(found) for example in found[fate]]


def _fate(line: Mapping[str, Any], rewards: set[float]) -> str:
    if line.get("unscored") == _STOPPED:
        return "stopped early"
    if line.get("unscored"):
        return f"not scored: {visible(str(line['unscored'])[:80])}"
    if line.get("reward") is None:
        return "not scored"
    if line.get("truncated"):
        return "cut off at the length limit"
    if len(rewards) > 1:
        return "in a mixed group, the better" if line["reward"] == max(rewards) else "in a mixed group, the worse"
    return "in a group whose rewards are all alike"


def _newest(path: Path) -> Iterator[Mapping[str, Any]]:
    """Whole lines from the end of the file, oldest first; what is no rollout is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        if size > _TAIL_BYTES:
            file.readline()
        for line in file:
            try:
                parsed = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _is_rollout(parsed):
                yield parsed


def _is_rollout(parsed: Any) -> bool:
    kinds = {"reward": (int, float, NoneType), "tokens": (int, NoneType), "group": (int, str, NoneType)}
    return isinstance(parsed, dict) and all(isinstance(parsed.get(name), kind) for name, kind in kinds.items())
