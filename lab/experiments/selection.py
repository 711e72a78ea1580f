"""Does it pay to train on the shortest and the longest, as DARTS does? Where answers have a tail, and where short is right.

    python lab/experiments/selection.py run OUT --tasks TASKS      # resumable; TASKS: where built-in tasks are made and kept
    python lab/experiments/selection.py table OUT                  # of what is over

8 prompts a batch, 8 trained rows of each, 40 batches, one process that streams; K shortest + L longest of so many rollouts:
the true longest ("exact", the published selection), a random one of those that still run ("sampled"), or none.
Each line gets the better of two learning rates, by the accuracy after half the batches on a seed of its own (`TUNING`).
Seconds are of the processor, generation and update, without evaluations, so that other work does not enter; accuracy at
equal seconds is read at the seconds that GRPO takes for all of its batches, or a line's last one where that comes before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from rollalloc import recipes
from rollalloc.compare.summary import Interval, interval
from rollalloc.core.recipe import Recipe
from rollalloc.models.settings import Streaming
from rollalloc.rules.sizes import Fixed
from rollalloc.train.loading import one_thread
from rollalloc.train.train import Trainer
from streaming import Line, Task

TASKS = ("walks/long", "walks/brief")
GROUPS, ROWS, BATCHES = 8, 8, 40
RATES, TUNING, SEEDS = (3e-4, 6e-4), 9400, range(9401, 9406)
POINTS = 4  # evaluations between the first and the last


def darts(shortest: int, longest: int, n: int, tail: Literal["exact", "sampled", "none"]) -> Recipe:
    """K shortest and L longest of n rollouts of each prompt, whatever its lengths were before."""
    recipe = recipes.darts(GROUPS, shortest, longest, tail=tail)
    return replace(recipe, stages=(replace(recipe.stages[0], size=Fixed(n)),))


LINES: Mapping[str, tuple[Recipe, int]] = {  # recipe, rollouts of a prompt
    "GRPO, n = 8": (recipes.grpo(GROUPS, ROWS), 8),
    "7 + 1 of 12, exact": (darts(7, 1, 12, "exact"), 12),
    "7 + 1 of 12, sampled": (darts(7, 1, 12, "sampled"), 12),
    "8 + 0 of 12": (darts(8, 0, 12, "none"), 12),
    "6 + 2 of 12, exact": (darts(6, 2, 12, "exact"), 12),
    "7 + 1 of 10, exact": (darts(7, 1, 10, "exact"), 10),
    "7 + 1 of 16, exact": (darts(7, 1, 16, "exact"), 16),
}


@dataclass(frozen=True)
class Point:
    """An evaluation, beside what training had cost when its weights were made."""

    batches: int
    seconds: float
    rollouts: int
    tokens: int
    accuracy: float
    pass_at_k: float
    entropy: float
    length: float


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    line: str
    rate: float
    seed: int
    batches: int
    points: tuple[Point, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return self.task, self.line, self.rate, self.seed, self.batches


def seconds_of_evaluations(trainer: Trainer) -> Callable[[], float]:
    """A function that returns the CPU seconds of this trainer's evaluations so far, which belong to no method."""
    spent, evaluate = 0.0, trainer.evaluate

    def timed() -> Any:
        nonlocal spent
        began = time.process_time()
        found = evaluate()
        spent += time.process_time() - began
        return found

    trainer.evaluate = timed
    return lambda: spent


def trained(task: Task, line: str, rate: float, seed: int, batches: int) -> Cell:
    """Train one line from the initial model."""
    recipe, n = LINES[line]
    told: list[tuple[float, dict[str, Any]]] = []
    trainer = task.trainer(
        Line(recipe, settings={"engine": "async", "streaming": Streaming(overlap=False), "learning_rate": rate}),
        seed,
        lambda said: told.append((time.process_time() - spent(), said)),
        max_batches=batches,
        eval_every=GROUPS * n * batches // (POINTS + 1),
        eval_samples=4,
    )
    spent = seconds_of_evaluations(trainer)
    trainer.run()
    return Cell(task.name, line, rate, seed, batches, tuple(points_of(told)))


def points_of(told: Iterable[tuple[float, dict[str, Any]]]) -> Iterator[Point]:
    """The evaluations among the lines of a run's metrics, each at the end of the last batch before it."""
    first: float | None = None
    seconds, batches = 0.0, 0
    for clock, said in told:
        first = clock if first is None else first
        if said["kind"] == "batch":
            seconds, batches = clock - first, batches + 1
        elif said["kind"] == "eval":
            breadth = said["breadth"]
            yield Point(
                batches,
                seconds,
                said["rollouts_paid"],
                said["tokens_paid"],
                said["accuracy"],
                breadth["pass_at_k"],
                breadth["entropy"],
                breadth["tokens"],
            )


def known(out: Path) -> dict[tuple[Any, ...], Cell]:
    """The runs that are over, by what they are of."""
    cells = {}
    for text in (out / "cells.jsonl").read_text().splitlines() if (out / "cells.jsonl").exists() else ():
        told = json.loads(text)
        cell = Cell(**{**told, "points": tuple(Point(**point) for point in told["points"])})
        cells[cell.key] = cell
    return cells


def run(out: Path, tasks: Path) -> None:
    """Train what is not over yet: the rates first, then seed by seed every line at its own."""
    out.mkdir(parents=True, exist_ok=True)
    made = {name: Task(tasks, name) for name in TASKS}

    def cell(task: str, line: str, rate: float, seed: int, batches: int) -> Cell:
        found = known(out).get((task, line, rate, seed, batches))
        if found is None:
            found = trained(made[task], line, rate, seed, batches)
            with (out / "cells.jsonl").open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
            end = found.points[-1]
            print(f"{task}: {line} @ {rate:g}, {seed}: {end.accuracy:.3f} in {end.seconds:.1f} s", flush=True)
        return found

    rates = {
        (task, line): max(RATES, key=lambda rate: cell(task, line, rate, TUNING, BATCHES // 2).points[-1].accuracy)
        for task in TASKS
        for line in LINES
    }
    for seed in SEEDS:
        for (task, line), rate in rates.items():
            cell(task, line, rate, seed, BATCHES)


def table(out: Path) -> Iterator[str]:
    """Markdown: one table a task."""
    judged = [cell for cell in known(out).values() if cell.batches == BATCHES]
    for task in TASKS:
        by_line = {
            line: {cell.seed: cell for cell in judged if (cell.task, cell.line) == (task, line)} for line in LINES
        }
        grpo = by_line["GRPO, n = 8"]
        yield ""
        yield (
            f"| {task} | rate | seeds | start → end | less GRPO's | at equal seconds, less GRPO's | pass@4 | entropy "
            "| tokens of an answer | tokens paid / GRPO's | CPU seconds / GRPO's |"
        )
        yield "|---" * 11 + "|"
        for line, cells in by_line.items():
            seeds = sorted(cells.keys() & grpo.keys())
            if seeds:
                yield row(line, [cells[seed] for seed in seeds], [grpo[seed] for seed in seeds])


def row(line: str, cells: list[Cell], baselines: list[Cell]) -> str:
    """A line of the table: means over the seeds, and intervals of what is paired with GRPO."""
    ends, pairs = [cell.points[-1] for cell in cells], list(zip(cells, baselines, strict=True))
    start = fmean(cell.points[0].accuracy for cell in cells)
    columns = [
        line,
        ", ".join(sorted({f"{cell.rate:g}" for cell in cells})),
        str(len(cells)),
        f"{start:.3f} → {fmean(end.accuracy for end in ends):.3f}",
        shown(interval([one.points[-1].accuracy - other.points[-1].accuracy for one, other in pairs]), "+.3f"),
        shown(
            interval([at(one, other.points[-1].seconds) - other.points[-1].accuracy for one, other in pairs]), "+.3f"
        ),
        f"{fmean(end.pass_at_k for end in ends):.3f}",
        f"{fmean(end.entropy for end in ends):.2f}",
        f"{fmean(end.length for end in ends):.1f}",
        shown(interval([one.points[-1].tokens / other.points[-1].tokens for one, other in pairs]), ".2f"),
        shown(interval([one.points[-1].seconds / other.points[-1].seconds for one, other in pairs]), ".2f"),
    ]
    return f"| {' | '.join(columns)} |"


def at(cell: Cell, seconds: float) -> float:
    """Accuracy after so many seconds, between evaluations by a straight line."""
    return float(np.interp(seconds, [p.seconds for p in cell.points], [p.accuracy for p in cell.points]))


def shown(found: Interval, form: str) -> str:
    """A mean with its interval, where there is one."""
    text = f"{{:{form}}}".format
    return text(found.point) + (
        "" if found.low is None or found.high is None else f" [{text(found.low)}–{text(found.high)}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=Path, default=Path("runs/tasks"))
    given = parser.parse_args()
    if given.command == "run":
        one_thread()
        run(given.out, given.tasks)
    else:
        print("\n".join(table(given.out)))


if __name__ == "__main__":
    main()
