"""How soon does PODS come to GRPO's peak, where the update is what takes long? Its own metric, in seconds, beside rollouts.

    python lab/experiments/pods.py run OUT --tasks TASKS [--shape one] [--one]   # resumable; --one: the next run only
    python lab/experiments/pods.py table OUT [--shape one]                       # of the runs that have ended

Two shapes, of which each gets the better of two learning rates by its accuracy on a seed of its own; one optimizer step a
batch. "eight": its runs on eight GPUs, a sixteenth of them: 128 -> 32 rows of 2 prompts beside 32 of 8, so that both
generate 256 rollouts a batch and PODS trains on a quarter of the rows. "one": its runs on one GPU, where both take the same
number of prompts and train on the same number of rows: 64 -> 16 rows of 4 prompts beside 16 of 4, and as many batches. (Its
authors take one prompt a step.) Planned for "one" before any run: 240 batches, tuned over 120, seeds 9500 to 9502. Seeds
9503 and 9504 were added on 2026-11-26 after these three, whose seconds differ too much for an interval of use.

Time is what the processor spent on generation and updates, to the first evaluation with 0.99 of the best accuracy that GRPO
had on that seed. What generation takes is then counted at a tenth as well, decoding in large batches being what GPUs are
good at, and at nothing, so that updates alone count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pilots import carried_out, said
from rollalloc.compare.summary import Interval, interval
from rollalloc.runs.reader import lines_in, newest_line
from rollalloc.tasks.presets import DEFAULT_OPTIMIZER, Tuned, planned_run
from rollalloc.train.config import Config, folder_of
from rollalloc.train.loading import one_thread

TASK, SAMPLES = "walks/mixed", 4
RATES, TUNING = (3e-4, 6e-4), 1000
METHODS = ("grpo", "pods")


@dataclass(frozen=True)
class Shape:
    """Parameters of each method; batches of a run and of a tuning run, and between two evaluations; seeds."""

    parameters: Mapping[str, dict[str, Any]]
    batches: int
    tuning: int
    every: int
    seeds: Sequence[int]

    def rollouts(self, method: str, batches: int) -> int:
        return batches * self.parameters[method]["groups"] * self.parameters[method]["n"]


SHAPES = {
    "eight": Shape(
        {"grpo": {"groups": 8, "n": 32}, "pods": {"groups": 2, "n": 128, "m": 32}}, 40, 20, 2, range(9500, 9505)
    ),
    "one": Shape(
        {"grpo": {"groups": 4, "n": 16}, "pods": {"groups": 4, "n": 64, "m": 16}}, 240, 120, 8, range(9500, 9505)
    ),
}
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


def run_of(shape: Shape, method: str, rate: float, seed: int, batches: int) -> Config:
    """A run of so many batches."""
    every = shape.rollouts(method, shape.every)
    settings = {"target": None, "eval_every": every, "eval_samples": SAMPLES, "checkpoint_minutes": 3.0}
    tuned = Tuned(shape.parameters[method], rate, DEFAULT_OPTIMIZER)
    run = planned_run(TASK, method, seed, tuned=tuned, **settings)
    return replace(
        run, label=f"{method} {tuned.parameters['n']}@{rate:g}", max_rollouts=shape.rollouts(method, batches)
    )


def tuning_run(shape: Shape, method: str, rate: float) -> Config:
    """The run that tries a learning rate."""
    return run_of(shape, method, rate, TUNING, shape.tuning)


def planned(shape: Shape, out: Path) -> Iterator[tuple[Config, Path]]:
    """Every run and its folder: the rates first, then both methods on one seed before the next."""
    for method in METHODS:
        for rate in RATES:
            yield tuning_run(shape, method, rate), out / "tuning"
    for seed in shape.seeds:
        for method in METHODS:
            yield run_of(shape, method, tuned_rate(shape, method, out), seed, shape.batches), out / "runs"


def carry_out(shape: Shape, out: Path, tasks: Path, *, one: bool) -> None:
    """The runs that have not ended, or the first of them; clocks are the processor's."""
    with patch("time.perf_counter", time.process_time):
        for run, folder in planned(shape, out):
            if points_of(run, folder):
                continue
            carried_out(run, folder, tasks)
            if one:
                return


def tuned_rate(shape: Shape, method: str, out: Path) -> float:
    """The better of the rates on the tuning seed, at the end."""
    return max(RATES, key=lambda rate: points_of(tuning_run(shape, method, rate), out / "tuning")[-1].accuracy)


def points_of(run: Config, out: Path) -> list[Point]:
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


def table(shape: Shape, out: Path) -> Iterable[str]:
    """In Markdown, of the seeds on which both are over: what GRPO took to the aim over what PODS did."""
    rates = {method: tuned_rate(shape, method, out) for method in METHODS}
    runs = [[run_of(shape, method, rates[method], seed, shape.batches) for method in METHODS] for seed in shape.seeds]
    pairs = [[points_of(run, out / "runs") for run in pair] for pair in runs]
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
    parser.add_argument("--shape", choices=tuple(SHAPES), default="eight")
    parser.add_argument("--tasks", type=Path, default=Path("runs/tasks"), help="in which tasks are made and kept")
    parser.add_argument("--one", action="store_true", help="carry out the next run only")
    asked = parser.parse_args()
    shape = SHAPES[asked.shape]
    if asked.command == "run":
        one_thread()
        carry_out(shape, asked.out, asked.tasks, one=asked.one)
    else:
        print("\n".join(table(shape, asked.out)))


if __name__ == "__main__":
    main()
