"""The file `decisions.jsonl`: for each batch its rows, and what became of each group that ended since the batch before."""

from __future__ import annotations

import json
from pathlib import Path

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Batch
from rollalloc.files.atomic import append_text


class DecisionLog:
    """Writes what the allocator decided about rollouts. Nothing is written if the path is None.

    A line has the number of the `batch` (null if groups ended without one), its `rows` as lists of rollout, group and
    advantage, and `groups`: the ids of the groups that ended, by fate.
    """

    def __init__(self, path: Path | None, allocator: Allocator) -> None:
        self._path = path
        self._ended: dict[str, list[int]] = {}
        if path is not None:
            allocator.watch(lambda group, fate: self._ended.setdefault(fate, []).append(group))

    def write(self, number: int | None = None, batch: Batch | None = None) -> None:
        """Write a line for a batch or, without a batch, for the groups that ended since the last line."""
        if self._path is None or (batch is None and not self._ended):
            return
        new = () if batch is None else [row for row in batch.rows if not row.replays]
        rows = [[row.rollout, row.group, round(row.advantage, 6)] for row in new]
        append_text(self._path, json.dumps({"batch": number, "rows": rows, "groups": self._ended}) + "\n")
        self._ended.clear()
