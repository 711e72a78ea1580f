"""Coverage of `rollalloc forecast`'s interval on finished runs, each forecast from its first two evaluations.

    python benchmarks/budget.py COMPARISON...        folders of finished runs, each with run.json and metrics.jsonl

The spread is taken from the runs of all other tasks (or recipes), so that what is judged was not seen.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from rollalloc.bench.budget import Unforeseeable, forecast_to
from rollalloc.bench.runs import Run
from rollalloc.runs.cost import cost_to_target, curve_of, read_metrics


def errors(folders: list[str]) -> list[tuple[str, str, float]]:
    """Task, recipe and log of cost over forecast, of each run that has a forecast and reached its target."""
    found: list[tuple[str, str, float]] = []
    runs = left_out = 0
    for path in sorted(path for folder in folders for path in Path(folder).rglob("metrics.jsonl")):
        run, curve = Run.described_in(path.parent), curve_of(read_metrics(path))
        target = run.settings.target
        cost = None if target is None else cost_to_target(curve, target)
        runs += 1
        if target is None or cost is None or cost.censored or cost.paid["rollouts"] <= curve.rollouts[1]:
            left_out += 1
            continue
        try:
            value = forecast_to(curve, target, upto=curve.rollouts[1]).rollouts.value
        except Unforeseeable:
            left_out += 1
            continue
        found.append((run.task, run.name, float(np.log(cost.paid["rollouts"] / value))))
    print(f"{runs} runs, {left_out} of them at the target by the second evaluation, never there, or without a rise")
    return found


def main() -> None:
    found = errors(sys.argv[1:])
    error_R = np.array([error for *_, error in found])
    print(
        "cost over forecast, quantiles 5, 10, 50, 90, 95%:",
        np.exp(np.quantile(error_R, (0.05, 0.1, 0.5, 0.9, 0.95))).round(2),
    )
    for by, name in ((0, "task"), (1, "recipe")):
        of_R = np.array([row[by] for row in found])
        for tail in (0.1, 0.05):
            inside = {}
            for held in sorted(set(of_R)):
                low, high = np.quantile(error_R[of_R != held], (tail, 1 - tail))
                inside[held] = (error_R[of_R == held] >= low) & (error_R[of_R == held] <= high)
            each = ", ".join(f"{held} {hits.mean():.2f} of {len(hits)}" for held, hits in inside.items())
            print(
                f"{tail:.0%} to {1 - tail:.0%}, {name} held out: {np.concatenate(list(inside.values())).mean():.3f} ({each})"
            )


if __name__ == "__main__":
    main()
