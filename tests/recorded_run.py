"""A run of a recipe by the core alone, and the files that the drivers write of it: states, TRL's tables, verl's dumps."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from safetensors.numpy import save_file

from rollalloc import Allocator, Recipe
from rollalloc.core.events import Batch, Cancelled, Done, Event, Failed, Updated
from rollalloc.runs.trl_log import ROLLOUT


@dataclass
class Run:
    """A run over 24 prompts, of which prompt p is solved with a probability of (p % 4) / 4.

    Attributes:
        values: the rewards of a wrong and of a right rollout.
        fails: share of rollouts without a score.
        batches: the batches trained so far, each with the prompts of its rows by group.
    """

    recipe: Recipe
    values: tuple[float, float] = (0.0, 1.0)
    fails: float = 0.0
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = Allocator(self.recipe, 24, 0)
        self.reward: dict[int, float] = {}
        self.key: dict[int, str] = {}
        self.random = np.random.default_rng(0)

    def train(self, batches: int = 6) -> Run:
        for _ in range(batches):
            while not (actions := self.allocator.ask()).batch:
                self.allocator.tell([Cancelled(rollout, 1) for rollout in actions.cancel])
                ordered = [(rollout, order.prompt) for order in actions.generate for rollout in order.rollouts]
                for order in actions.generate:  # as verl's driver names what it submits
                    uid = f"g{order.group}s{order.stage}r{order.rollouts[0]}"
                    self.key |= {rollout: f"{uid}_{at}_0" for at, rollout in enumerate(order.rollouts)}
                self.allocator.tell([self._end(*each) for each in ordered])
            self.batches.append(actions.batch)
            self.allocator.tell([Updated(self.allocator.version + 1)])
        return self

    def _end(self, rollout: int, prompt: int) -> Event:
        if self.random.random() < self.fails:
            return Failed(rollout, "no score", 5)
        reward = self.values[int(self.random.random() < prompt % 4 / 4)]
        self.reward[rollout] = reward
        return Done(rollout, reward, reward, 5, self.allocator.version)

    @property
    def ended(self) -> dict[str, int]:
        """The accounts, of causes that occur, without what is open."""
        return {cause: count for cause, count in self.allocator.accounts().items() if count and cause != "open"}

    # ------------------------------------------------------------------------------------------------------------ files

    def trl(self, folder: Path, *, ids: bool = True, state: bool = True, table: int = 0, graded: bool = False) -> Path:
        """TRL's output folder: a table of each step and, with `state`, a checkpoint. Return the folder.

        Args:
            folder: the folder.
            ids: whether the tables have the ids of the rollouts.
            state: whether there is a checkpoint with our state.
            table: number of rows that a table keeps; 0: those of its batch.
            graded: whether a rollout's reward also depends on its id.
        """
        (folder / "completions").mkdir(parents=True)
        rows: list[dict[str, Any]] = []
        for step, batch in enumerate(self.batches, start=1):
            rows += [
                {
                    "prompt": f"prompt {row.prompt}",
                    "completion": f"completion {row.rollout}",
                    "right": self.reward[row.rollout] + (row.rollout % 7 if graded else 0),
                    **({ROLLOUT: f"{row.group}/{row.rollout}"} if ids else {}),
                    "advantage": row.advantage,
                }
                for row in batch.rows
            ]
            rows = rows[-(table or len(batch.rows)) :]
            name = folder / "completions" / f"completions_{step:05d}.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"step": step, **row} for row in rows]), name)
        if state:
            self.trl_checkpoint(folder)
        return folder

    def trl_checkpoint(self, folder: Path) -> Path:
        """A checkpoint of TRL, with the metrics that our trainer logs of each batch."""
        step = len(self.batches)
        place = folder / f"checkpoint-{step}"
        inner = place / "rollalloc" / "checkpoints" / str(step)
        inner.mkdir(parents=True)
        packed = zlib.compress(json.dumps({"state": self.allocator.state_dict(), "keys": {}}).encode())
        save_file({"json": np.frombuffer(packed, np.uint8)}, inner / "allocator.safetensors")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": self._history()}))
        return place

    def _history(self) -> list[dict[str, Any]]:
        logged: list[dict[str, Any]] = []
        for step, batch in enumerate(self.batches, start=1):
            shape = {"rollalloc/rows": len(batch.rows), "rollalloc/groups": len({row.group for row in batch.rows})}
            logged.append({"step": step, "reward": 0.5, "rollalloc/rollouts_paid": 8.0 * step, **shape})
        logged[-1] |= {f"rollalloc/accounts/{cause}": count for cause, count in self.allocator.accounts().items()}
        return logged

    def verl(self, folder: Path) -> Path:
        """verl's dumps, its log, and a checkpoint, in one folder. verl sorts the rows of a dump by their keys."""
        (folder / "dumps").mkdir(parents=True)
        for step, batch in enumerate(self.batches, start=1):
            rows = [
                {
                    "input": f"prompt {row.prompt}",
                    "output": "x",
                    "score": self.reward[row.rollout],
                    "uid": self.key[row.rollout],
                    "step": step,
                }
                for row in sorted(batch.rows, key=lambda row: self.key[row.rollout])
            ]
            (folder / "dumps" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        log = [{"step": entry["step"], "data": entry | {"timing_s/step": 1.0}} for entry in self._history()]
        (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
        place = folder / f"global_step_{len(self.batches)}"
        place.mkdir()
        (place / "rollalloc.json").write_text(json.dumps({"rounds": {"allocator": self.allocator.state_dict()}}))
        return folder

    def native(self, folder: Path, *, ended: bool) -> Path:
        """The folder of a native run, as far as its state goes: at the end, or from a checkpoint."""
        state = self.allocator.state_dict()
        place = folder if ended else folder / "checkpoints" / str(len(self.batches))
        place.mkdir(parents=True, exist_ok=True)
        name, content = ("allocator.json", state) if ended else ("state.json", {"allocator": state})
        (place / name).write_text(json.dumps(content))
        return folder
