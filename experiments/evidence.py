"""What does each method pay, by its defaults, on tasks of very different prompts? The evidence of `rollalloc advise`.

    python experiments/evidence.py run RUNS --tasks TASKS [--bench FOLDER]    # resumable

Six methods by their defaults in one shape of 64 rollouts, 6e-4, nothing searched for; a run ends at its task's target. A
cell that a folder of `rollalloc bench --track defaults` holds already is not repeated.

Tasks that were made for this were fixed before any method was run on them, by one rule: a warm model that begins at 20 to
55% with a pass@8 of at least 0.7, and a target of start + 0.6 · (pass@8 at the start − start), to two decimals.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollalloc.lab.bench.compare import compare
from rollalloc.lab.bench.methods import default
from rollalloc.lab.bench.presets import DEFAULT_OPTIMIZER, DEFAULT_RATE, Tuned, made, planned_run
from rollalloc.runs.reader import newest_line
from rollalloc.train.description import Run

FIRST_SEEDS, MORE_SEEDS = (9200, 9201), (9202, 9203)  # the first of the defaults track
BUDGETS: Mapping[str, int] = {  # rollouts, after which a run is censored
    "rg/number_filtering_misled": 9_000,
    "rg/gcd": 5_000,
    "skills/late": 10_000,
    "skills/graded": 5_000,
    "walks/mixed": 10_000,
    "sort": 8_000,
    "walks/late": 8_000,
    "skills/balanced": 8_000,
    "skills/mixed": 8_000,
}
# Carried over from dev/LOG.md, "2026-11-23 · The defaults track, as one command" (plan 60388c55e859, seeds 9200 to 9207):
# the interquartile mean of the rollouts to target of eight seeds, and how many reached it. These cells are not repeated.
CARRIED_SEEDS = 8
CARRIED: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "skills/late": {"grpo_n4": (15_094, 4), "reinforce": (4_528, 8), "foresight": (3_319, 8), "raft": (5_078, 8)},
    "skills/mixed": {"grpo_n4": (9_222, 7), "reinforce": (3_715, 8), "foresight": (2_830, 8), "raft": (4_186, 8)},
    "skills/balanced": {"grpo_n4": (5_406, 8), "reinforce": (1_737, 8), "foresight": (1_622, 8), "raft": (1_923, 8)},
    "skills/graded": {"grpo_n4": (4_000, 6), "reinforce": (2_042, 8), "foresight": (2_371, 8), "raft": (5_000, 0)},
}
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {  # label: recipe, parameters
    "reinforce": ("reinforce", {}),
    "raft": ("raft", {}),
    "foresight": ("foresight", {}),
    "grpo_n4": ("grpo", {}),
    "grpo_n16": ("grpo", {"groups": 4, "n": 16}),
    "grpo_n2": ("grpo", {"groups": 32, "n": 2}),
}
LATER = ("grpo_n2",)  # methods that no other is held against
IN_BENCH = {"grpo_n4": "grpo", "grpo_n2": "shapes.grpo_n2", "grpo_n16": "shapes.grpo_n16"}  # its labels there


def batches_of_runs() -> Iterator[list[Run]]:
    """All of them, a task at a time; what decides most comes first, so that it may be ended at any time."""
    first = [method for method in METHODS if method not in LATER]
    passes = [*(((seed,), first) for seed in FIRST_SEEDS), (FIRST_SEEDS, LATER), (MORE_SEEDS, tuple(METHODS))]
    for seeds, methods in passes:
        for task in BUDGETS:
            wanted = [method for method in methods if method not in CARRIED.get(task, {})]
            yield [run_of(task, method, seed) for seed in seeds for method in wanted]


def run_of(task: str, method: str, seed: int) -> Run:
    """A method by its defaults, until the task's target or its budget."""
    recipe, changes = METHODS[method]
    setting = Tuned(default(recipe) | changes, DEFAULT_RATE, DEFAULT_OPTIMIZER)
    return replace(planned_run(task, recipe, seed, tuned=setting), label=method, max_rollouts=BUDGETS[task])


def bench_place(folder: Path, run: Run) -> Path:
    """Where the defaults track of a bench has a run."""
    label = IN_BENCH.get(run.label, run.label)
    return folder / "defaults" / run.task.replace("/", "-") / f"{label}-{run.settings.seed}"


def is_over(place: Path) -> bool:
    """Whether the run of a folder has ended."""
    last = newest_line(place)
    return last is not None and last["kind"] == "end"


def carry_out(out: Path, tasks: Path, bench: Path | None) -> None:
    """Carry out what is not there; a run process at a time."""
    for batch in batches_of_runs():
        wanted = [run for run in batch if bench is None or not is_over(bench_place(bench, run))]
        compare([made(run, tasks) for run in wanted], out, processes=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("out", type=Path)
    run.add_argument("--tasks", type=Path, required=True, help="folder in which tasks are made and kept")
    run.add_argument("--bench", type=Path, help="folder of a leaderboard whose runs count as well")
    given = parser.parse_args()
    carry_out(given.out, given.tasks, given.bench)


if __name__ == "__main__":
    main()
