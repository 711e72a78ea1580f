"""Tuning with an equal budget for every recipe: the same number of learning rates, shapes and seeds.

    python -m rollalloc.bench.sweep --task skills --pool late --out runs/sweep

The shape of a batch, groups and rollouts a group, matters more than most allocators do, so GRPO's is tuned as the others'.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rollalloc.bench.compare import compare
from rollalloc.bench.presets import TUNING_SEEDS, Tuned, preset_of, task_run
from rollalloc.bench.runs import Run

LEARNING_RATES = (1.5e-4, 3e-4, 6e-4, 1e-3)


def _plain(shapes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"groups": groups, "n": n} for groups, n in shapes]


def _dapo(surplus: str) -> list[dict[str, Any]]:
    shapes = ((4, 8), (8, 4), (8, 8), (16, 4), (4, 16), (16, 8))
    return [shape | {"gen_groups": 3 * shape["groups"], "surplus": surplus} for shape in _plain(shapes)]


def _pilot_commit() -> list[dict[str, Any]]:
    shapes = ((4, 4, 4), (8, 2, 2), (8, 4, 4), (16, 2, 2), (4, 4, 12), (16, 4, 4))
    return [
        {"groups": groups, "n_pilot": pilot, "n_commit": commit, "gen_groups": 3 * groups}
        for groups, pilot, commit in shapes
    ]


# Label -> recipe and the shapes tried; as many for each.
GRID: Mapping[str, tuple[str, list[dict[str, Any]]]] = {
    "grpo": ("grpo", _plain(((8, 8), (16, 4), (32, 4), (16, 8), (8, 16), (16, 16)))),
    "dapo": ("dapo", _dapo("discard")),
    "dapo_carry": ("dapo", _dapo("carry")),
    "pilot_commit": ("pilot_commit", _pilot_commit()),
}


def candidates(task: str, pool: str, label: str, folder: Path) -> Iterator[tuple[Tuned, list[Run]]]:
    """Each setting of a label's grid, with its runs on the tuning seeds."""
    recipe, shapes = GRID[label]
    for learning_rate in LEARNING_RATES:
        for shape in shapes:
            tuned = Tuned(shape, learning_rate)
            name = "-".join(str(value) for value in (label, *shape.values(), learning_rate))
            runs = [task_run(task, pool, recipe, seed, folder, tuned=tuned) for seed in TUNING_SEEDS]
            yield tuned, [replace(run, label=name) for run in runs]


def sweep(task: str, pool: str, labels: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Run the grid of each label; each setting with its costs, best first. A run that never got there costs its budget."""
    budget = preset_of(task, pool)[1].max_rollouts
    table: list[dict[str, Any]] = []
    for label in labels:
        grid = list(candidates(task, pool, label, folder))
        results = iter(compare([run for _, runs in grid for run in runs], folder / label))
        rows: list[dict[str, Any]] = []
        for tuned, runs in grid:
            reached = [next(results)["rollouts_to_target"] for _ in runs]
            costs = [budget if cost is None else cost for cost in reached]
            rows.append({"label": label, "median": median(costs), "costs": costs, "learning_rate": tuned.learning_rate}
                        | {"parameters": dict(tuned.parameters)})  # fmt: skip
        table += sorted(rows, key=lambda row: (row["median"], sum(row["costs"])))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="skills")
    parser.add_argument("--pool", default="late")
    parser.add_argument("--labels", nargs="+", default=list(GRID), choices=list(GRID))
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    given = parser.parse_args()
    table = sweep(given.task, given.pool, given.labels, given.out)
    (given.out / "sweep.json").write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
