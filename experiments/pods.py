"""How soon does PODS come to GRPO's peak, where the update is what takes long? Its own metric, in seconds, beside rollouts.

    python experiments/pods.py run OUT --tasks TASKS      # resumable; TASKS: where built-in tasks are made and kept
    python experiments/pods.py table OUT                  # of what is over

The shape of its runs on eight GPUs, a sixteenth of it: 128 -> 32 rows of 2 prompts beside 32 of 8, so that either generates
256 rollouts a batch, and PODS trains on a quarter of the rows; one optimizer step a batch. Each gets the better of two
learning rates by its accuracy on a seed of its own. Time is what the processor spent on generation and updates, to the first
evaluation with 0.99 of the best accuracy that GRPO had on that seed. What generation takes is then counted at a tenth as
well, decoding in large batches being what GPUs are good at, and at nothing, so that updates alone count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pilots import carried_out, said

from rollalloc.lab.bench.presets import DEFAULT_OPTIMIZER, Tuned, planned_run
from rollalloc.lab.bench.summary import Interval, interval
from rollalloc.runs.reader import lines_in, newest_line
from rollalloc.train.description import Run, folder_of
from rollalloc.train.execution import one_thread

TASK, ROLLOUTS, TUNING_ROLLOUTS, EVERY, SAMPLES = "walks/mixed", 10_240, 5_120, 512, 4
RATES, TUNING, SEEDS = (3e-4, 6e-4), 1000, range(9500, 9505)
METHODS: Mapping[str, dict[str, Any]] = {"grpo": {"groups": 8, "n": 32}, "pods": {"groups": 2, "n": 128, "m": 32}}
GENERATION = {"as measured": 1.0, "a tenth": 0.1, "nothing": 0.0}  # its seconds, times
PEAK = 0.99


@dataclass(frozen=True)
class Point:
    """An evaluation, and what had been spent before it."""

    accuracy: float
    rollouts: int
    generation: float
    update: float

    def seconds(self, generation: float) -> float:
        """With generation at so many times what it took."""
        return generation * self.generation + self.update


def run_of(method: str, rate: float, seed: int, rollouts: int) -> Run:
    """A run that pays so many rollouts."""
    settings = {"target": None, "eval_every": EVERY, "eval_samples": SAMPLES, "checkpoint_minutes": 3.0}
    run = planned_run(TASK, method, seed, tuned=Tuned(METHODS[method], rate, DEFAULT_OPTIMIZER), **settings)
    return replace(run, label=f"{method}@{rate:g}", max_rollouts=rollouts)


def carry_out(out: Path, tasks: Path) -> None:
    """Every run: the rates first, then both methods on one seed before the next; clocks are the processor's."""
    with patch("time.perf_counter", time.process_time):
        for method in METHODS:
            for rate in RATES:
                carried_out(run_of(method, rate, TUNING, TUNING_ROLLOUTS), out / "tuning", tasks)
        for seed in SEEDS:
            for method in METHODS:
                carried_out(run_of(method, tuned_rate(method, out), seed, ROLLOUTS), out / "runs", tasks)


def tuned_rate(method: str, out: Path) -> float:
    """The better of the rates on the tuning seed, at the end."""
    return max(
        RATES, key=lambda rate: points_of(run_of(method, rate, TUNING, TUNING_ROLLOUTS), out / "tuning")[-1].accuracy
    )


def points_of(run: Run, out: Path) -> list[Point]:
    """The evaluations of a run; none unless it has ended."""
    place, found = folder_of(run, out), list[Point]()
    last = newest_line(place)
    if last is None or last["kind"] != "end":
        return found
    update = 0.0
    for line in lines_in(place / "metrics.jsonl"):
        if line["kind"] == "batch":
            update += line["update_seconds"]
        elif line["kind"] == "eval":
            found.append(Point(line["accuracy"], line["rollouts_paid"], line["seconds"] - update, update))
    return found


def table(out: Path) -> Iterable[str]:
    """In Markdown, of the seeds on which both are over: what GRPO took to the aim over what PODS did."""
    rates = {method: tuned_rate(method, out) for method in METHODS}
    pairs = [
        [points_of(run_of(method, rates[method], seed, ROLLOUTS), out / "runs") for method in METHODS] for seed in SEEDS
    ]
    pairs = [pair for pair in pairs if all(pair)]
    aims = [PEAK * max(point.accuracy for point in grpo) for grpo, _ in pairs]
    reached = sum(first(pods, aim) is not None for (_, pods), aim in zip(pairs, aims, strict=True))
    shares = [points[-1].update / points[-1].seconds(1.0) for points, _ in pairs]
    yield f"rates {rates}; PODS reached it on {reached} of {len(pairs)} seeds"
    yield f"update {said(interval(shares), '.0%')} of GRPO's time\n"
    yield "| generation counted at | GRPO over PODS |\n|---|---|"
    for name, share in GENERATION.items():
        yield f"| {name} | {said(ratio(pairs, aims, lambda point, share=share: point.seconds(share)), '.2f')} |"
    yield f"| rollouts | {said(ratio(pairs, aims, lambda point: float(point.rollouts)), '.2f')} |"


def first(points: list[Point], aim: float) -> Point | None:
    """The first evaluation with that accuracy."""
    return next((point for point in points if point.accuracy >= aim), None)


def ratio(pairs: list[list[list[Point]]], aims: list[float], spent: Any) -> Interval:
    """GRPO's over PODS's, paired by seed; an upper bound where PODS did not come to it."""
    found = [(first(grpo, aim), first(pods, aim) or pods[-1]) for (grpo, pods), aim in zip(pairs, aims, strict=True)]
    censored = any(first(pods, aim) is None for (_, pods), aim in zip(pairs, aims, strict=True))
    return interval([spent(base) / spent(ours) for base, ours in found], "<" if censored else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=Path, default=Path("runs/tasks"), help="in which tasks are made and kept")
    given = parser.parse_args()
    if given.command == "run":
        one_thread()
        carry_out(given.out, given.tasks)
    else:
        print("\n".join(table(given.out)))


if __name__ == "__main__":
    main()
