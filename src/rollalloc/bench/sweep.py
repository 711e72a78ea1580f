"""Tuning with an equal budget for every recipe of a call: as many learning rates, shapes, seeds and rollouts for each.

    python -m rollalloc.bench.sweep --task skills/late --out runs/sweep

The shape of a batch, groups and rollouts a group, matters more than most allocators do, so GRPO's is tuned as the others'.
Writes `sweep.json`, every setting with its costs, and the best of each recipe as `TASK.json`; copied into `tuned/` of this
package, that file is what the presets of the task are read from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rollalloc.bench.compare import compare
from rollalloc.bench.presets import TUNING_SEEDS, Tuned, preset_of, task_run
from rollalloc.bench.runs import Run
from rollalloc.claims import Claims
from rollalloc.whole import write_text

LEARNING_RATES = (3e-4, 6e-4, 1.5e-4, 1e-3)


def _shapes(names: str, rows: Sequence[tuple[Any, ...]], **changes: Any) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) | changes for row in rows]


def _ahead(shapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prompts for three batches are generated at a time."""
    return [shape | {"gen_groups": 3 * shape["groups"]} for shape in shapes]


_GROUPS = _shapes("groups n", ((16, 4), (8, 8), (16, 8), (32, 4), (8, 16), (16, 16)))
_DAPO = _ahead(_shapes("groups n", ((8, 4), (16, 4), (8, 8), (4, 8), (4, 16), (16, 8))))
_PILOTS = ((4, 4, 4), (8, 4, 4), (8, 2, 2), (16, 2, 2), (4, 4, 12), (16, 4, 4))
_MIXED = ((4, 4, 4, 4), (8, 4, 4, 4), (8, 2, 4, 4), (4, 4, 8, 8), (8, 4, 4, 6), (4, 4, 12, 8))
# Recipe -> the shapes tried, the small ones first; as many for each.
GRID: Mapping[str, list[dict[str, Any]]] = {
    "grpo": _GROUPS,
    "dr_grpo": _GROUPS,
    "dapo": _DAPO,
    "dapo_carry": _DAPO,
    "greso": _DAPO,
    "pilot_commit": _ahead(_shapes("groups n_pilot n_commit", _PILOTS)),
    "knapsack": _shapes("groups n most", ((16, 4, 16), (16, 4, 32), (8, 8, 32), (16, 8, 32), (32, 4, 16), (16, 4, 8))),
    "vcrl": _shapes(
        "groups n kappa", ((16, 4, 0.7), (8, 8, 0.7), (16, 4, 0.3), (16, 8, 0.7), (8, 16, 0.8), (8, 8, 0.3))
    ),
    "cgrpo": _shapes(
        "groups sizes_S",
        ((16, (2, 4, 8)), (16, (2, 4)), (8, (2, 4, 8, 16)), (8, (4, 8, 16)), (32, (2, 4)), (16, (4, 8))),
    ),
    "reinforce_ada": _shapes(
        "groups n round_n rounds",
        ((16, 4, 4, 4), (8, 4, 8, 4), (16, 4, 4, 2), (32, 4, 4, 4), (8, 8, 8, 4), (16, 2, 2, 4)),
    ),
    "pods": _shapes("groups n m", ((16, 6, 4), (8, 8, 4), (16, 8, 4), (16, 4, 2), (8, 16, 8), (8, 16, 4))),
    "darts": _shapes("groups shortest longest", ((8, 3, 1), (16, 2, 1), (16, 3, 1), (32, 3, 1), (8, 7, 1), (16, 7, 1))),
    "racing": _ahead(
        _shapes("groups sizes_S", ((8, (2, 4)), (16, (2, 4)), (8, (2, 8)), (4, (4, 8)), (8, (4, 8)), (16, (4, 8))))
    ),
    "reinforce": _shapes(
        "groups baseline neg replay",
        (
            (64, "running", 0.3, 64),
            (64, "running", 0.1, 0),
            (64, "running", 0.1, 64),
            (64, "running", 0.3, 0),
            (64, "batch", 0.1, 0),
            (32, "running", 0.1, 0),
        ),
    ),
    "rloo": _shapes("groups n", ((16, 4), (32, 2), (8, 8), (64, 2), (16, 8), (32, 4))),
    "raft": _shapes("groups n", ((32, 1), (64, 1), (128, 1), (16, 4), (32, 2), (16, 8))),
    "mopps": _shapes(
        "groups n decay", ((16, 4, 0.5), (16, 4, 1.0), (8, 8, 0.5), (16, 8, 0.5), (32, 4, 0.5), (32, 2, 0.5))
    ),
    "spo": _shapes("groups half_way", ((64, 0.06), (64, 0.02), (32, 0.06), (128, 0.06), (64, 0.006), (32, 0.02))),
    "foresight": _shapes(
        "groups exponent neg replay",
        (
            (64, 3.0, 0.3, 64),
            (64, 3.0, 0.1, 0),
            (64, None, 0.3, 64),
            (64, 3.0, 0.1, 64),
            (64, 3.0, 0.3, 0),
            (64, 1.0, 0.3, 64),
        ),
    ),
    "pilot_commit+pods": _ahead(_shapes("groups n_pilot n_commit m", _MIXED)),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What every recipe gets of a sweep.

    Attributes:
        task: to tune on.
        learning_rates: to try with each shape.
        shapes: of a recipe's grid, the first so many.
        seeds: no seed of a comparison.
        budget: rollouts of a run.
    """

    task: str
    learning_rates: tuple[float, ...]
    shapes: int
    seeds: tuple[int, ...]
    budget: int


def candidates(plan: Plan, recipe: str, folder: Path) -> Iterator[tuple[Tuned, list[Run]]]:
    """Each setting of a recipe's grid, with its runs on the tuning seeds."""
    for learning_rate in plan.learning_rates:
        for shape in GRID[recipe][: plan.shapes]:
            tuned = Tuned(shape, learning_rate)
            label = "-".join(str(value).replace(" ", "") for value in (recipe, *shape.values(), learning_rate))
            runs = [task_run(plan.task, "late", recipe, seed, folder / "tasks", tuned=tuned) for seed in plan.seeds]
            yield tuned, [replace(run, label=label, max_rollouts=plan.budget) for run in runs]


def sweep(
    plan: Plan, recipes: Sequence[str], folder: Path, processes: int | None = None, *, overwrite: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Run the grid of each recipe; its settings with their costs, best median first. A censored run costs its budget.

    Args:
        plan: what each recipe gets.
        recipes: keys of `GRID`.
        folder: gets a folder for each recipe; what is finished in it is used again.
        processes: runs at a time, at least 1; one a core by default.
        overwrite: replace runs of another plan that are there.

    Raises:
        FileExistsError: such runs are there and not to be replaced, or files that are not ours.
        ValueError: a task without a target, where no setting has a cost.
        RuntimeError: a run failed.
    """
    if preset_of(plan.task)[1].target is None:
        raise ValueError(f"{plan.task} has no target, so that no setting has a cost; give it a `Preset` with one")
    tables: dict[str, list[dict[str, Any]]] = {}
    for recipe in recipes:
        grid = list(candidates(plan, recipe, folder))
        runs = [run for _, runs in grid for run in runs]
        results = iter(compare(runs, folder / recipe, processes=processes, overwrite=overwrite))
        rows: list[dict[str, Any]] = []
        for tuned, runs in grid:
            paid = [next(results)["rollouts_to_target"] for _ in runs]
            costs = [plan.budget if cost is None else round(cost) for cost in paid]
            rows.append({"parameters": dict(tuned.parameters), "learning_rate": tuned.learning_rate, "costs": costs})
        tables[recipe] = sorted(rows, key=lambda row: (median(row["costs"]), sum(row["costs"])))
    return tables


def tuned_file(plan: Plan, tables: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What `tuned/TASK.json` says: the best setting of each recipe, and how it was found."""
    return {
        "task": plan.task,
        "date": datetime.now(UTC).date().isoformat(),
        "budget": plan.budget,
        "seeds": list(plan.seeds),
        "recipes": {recipe: rows[0] | {"settings_tried": len(rows)} for recipe, rows in tables.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="skills/late")
    parser.add_argument("--recipes", nargs="+", default=list(GRID), choices=list(GRID))
    parser.add_argument("--learning-rates", nargs="+", type=float, default=list(LEARNING_RATES))
    parser.add_argument("--shapes", type=int, default=6, help="of each recipe's grid, the first so many")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(TUNING_SEEDS))
    parser.add_argument("--budget", type=int, help="rollouts of a run; the task's by default")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--overwrite", action="store_true", help="replace runs of another plan in the folder")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    given = parser.parse_args()
    task, preset = preset_of(given.task)
    budget = given.budget or preset.max_rollouts
    plan = Plan(task, tuple(given.learning_rates), given.shapes, tuple(given.seeds), budget)
    made, tuned = "sweep.json", f"{task.replace('/', '-')}.json"
    Claims(given.out, "sweep").add([made, tuned])
    tables = sweep(plan, given.recipes, given.out, given.processes, overwrite=given.overwrite)
    write_text(given.out / made, json.dumps(tables, indent=2))
    write_text(given.out / tuned, json.dumps(tuned_file(plan, tables), indent=2))


if __name__ == "__main__":
    main()
