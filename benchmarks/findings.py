"""What is true of Pilot-Commit: the runs, tables and figures of docs/findings.md.

`python benchmarks/findings.py QUESTION --tasks FOLDER --out FOLDER [--seeds K]`; what is there is not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from findings_decay import rates
from findings_runs import (
    BUDGET,
    CELL_SEEDS,
    CELLS,
    QUESTIONS,
    SEEDS,
    TUNING_BUDGET,
    Variant,
    answers,
    cell,
    pilots,
    tuned_rates,
)
from numpy.typing import NDArray

from rollalloc.bench.execution import one_thread

# What trains while its rates are looked at, and when, in updates of the weights.
DECAYING: dict[str, tuple[Variant, tuple[int, ...]]] = {
    "batches of 32 rows, 1 step": (Variant("pilot_commit", pilots()), (0, 8, 16, 24)),
    "batches of 128 rows, 4 steps": (
        Variant("pilot_commit", pilots(groups=16), changes={"optimizer_steps_per_batch": 4}),
        (0, 4, 8),
    ),
}


def decaying(tasks: Path, out: Path, seeds: int) -> dict[str, NDArray[np.float64]]:
    """The exact rates of two kinds of runs: moments of all seeds, lags, prompts."""
    return {
        name: np.concatenate([rates(*one, tasks, out / "decay" / f"{name}-{seed}.npy", seed) for seed in SEEDS[:seeds]])
        for name, one in DECAYING.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=[*QUESTIONS, "cells", "decay"])
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=len(CELLS))
    given = parser.parse_args()
    one_thread()
    if given.question == "decay":
        decaying(given.tasks, given.out, given.seeds)
    elif given.question == "cells":
        chosen = tuned_rates(given.tasks, given.out, TUNING_BUDGET)
        for at in CELLS[: given.cells]:
            cell(at, chosen, given.tasks, given.out, CELL_SEEDS[: given.seeds], BUDGET)
    else:
        answers(given.question, given.tasks, given.out, SEEDS[: given.seeds], BUDGET)


if __name__ == "__main__":
    main()
