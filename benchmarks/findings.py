"""What is true of Pilot-Commit: the runs, tables and figures of docs/findings.md.

`python benchmarks/findings.py QUESTION --tasks FOLDER --out FOLDER [--seeds K]`; what is there is not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from findings_runs import BUDGET, CELL_SEEDS, CELLS, QUESTIONS, SEEDS, TUNING_BUDGET, answers, cell

from rollalloc.bench.execution import one_thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=[*QUESTIONS, "cells"])
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=len(CELLS))
    given = parser.parse_args()
    one_thread()
    if given.question == "cells":
        for task, n in CELLS[: given.cells]:
            cell(task, n, given.tasks, given.out, CELL_SEEDS[: given.seeds], (TUNING_BUDGET, BUDGET))
    else:
        answers(given.question, given.tasks, given.out, SEEDS[: given.seeds], BUDGET)


if __name__ == "__main__":
    main()
