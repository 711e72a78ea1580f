"""Do averaged weights lose on short runs at small rates, and is it the lag, the sampling from the mean, or the rate?

    python lab/experiments/averaging.py run OUT PLAN    # PLAN: short, long or smollm2; resumable; no run after --minutes
    python lab/experiments/averaging.py table OUT PLAN  # of the runs that are over

The plan, set before any run. Arms:

    off      no mean
    now      the mean samples and is evaluated; its window is a ninth of the steps, at most 640 rows
    late     as now, but the mean is the trained weights until 1,280 rows are trained; then the window grows from 0
    later    the same, until 2,560 rows
    half     as now, with a window of an eighteenth of the steps

Every run also evaluates weights that it does not sample from, at each point of the grid: `off` three means of its weights
(`now`, `half` and `late`, by their rules), the others the trained weights. So the lag is measured within one run: the mean
of `off` against its trained weights. What sampling from the mean does beyond that is `now` against the mean of `off`.

`short`: few batches at small rates. REINFORCE and RAFT on skills/late at 6e-4 (its rate), 6e-5 and 2e-5 and on skills/mixed
at 6e-5, seeds 9900 to 9902; RAFT on ladder/8m at 3e-5 (3e-4 is its rate), without `half`, seeds 9900 and 9901; all with
32 x 1, 60 batches, evaluated exactly every 320 rollouts.
`long`: what averaging was chosen for. REINFORCE with 32 x 1 on skills/late, skills/mixed and walks/mixed at 6e-4, 10,000
rollouts, evaluated every 500, without the other weights; seeds 9900 to 9904; reported: rollouts to .85, .80 and .70 on that
grid, accuracy at the end, deepest fall. As time allows: skills first, `now` and `late` before the other arms.
`smollm2`: `make laptop`, that is RAFT with 64 x 1 at 2e-5 and 20 batches on `filter`, seeds 0, 1, 2: off and now; seed 0
again with 32 x 1. An arm that starts late is `off` there: its mean begins where this run ends.

The rule: the default becomes the arm that loses nowhere on `short` against `off` by more than the standard error of the
difference, and keeps what `now` gains over `off` on `long`; if several do, the one with the longest window; if none, off.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rollalloc.cli.app import app
from rollalloc.models import weights
from rollalloc.models.weights import trained
from rollalloc.train import update
from rollalloc.train.train import Loop

Rule = Callable[[float, float], float]  # rows before a step, rows of the step → share that the mean keeps


def window(rows: float, taken: float, share: float = 9.0, most: float = 640.0, after: float = 0.0) -> float:
    """Share that the mean keeps where its window is 1/share of the rows so far after a number of rows, at most `most`."""
    steps = (rows + taken - after) / taken
    return max(0.0, min(1 - taken / most, steps / (steps + share))) if steps > 0 else 0.0


RULES: Mapping[str, Rule] = {
    "now": window,
    "half": lambda rows, taken: window(rows, taken, share=18.0),
    "late": lambda rows, taken: window(rows, taken, after=1280.0),
    "later": lambda rows, taken: window(rows, taken, after=2560.0),
}


@dataclass(frozen=True)
class Planned:
    """One run."""

    name: str
    arm: str
    arguments: tuple[str, ...]


def short() -> Iterator[Planned]:
    for seed in (9900, 9901, 9902):
        for task, rate in (("skills/late", 6e-4), ("skills/late", 6e-5), ("skills/late", 2e-5), ("skills/mixed", 6e-5)):
            for recipe in ("reinforce", "raft"):
                for arm in ("off", "now", "late", "half"):
                    yield planned(task, recipe, rate, arm, seed, 1_920, 320)
    for seed in (9900, 9901):
        for arm in ("off", "now", "late"):
            yield planned("ladder/8m", "raft", 3e-5, arm, seed, 1_920, 320)


def long() -> Iterator[Planned]:
    for seed in range(9900, 9905):
        for task in ("skills/late", "skills/mixed", "walks/mixed"):
            for arm in ("off", "now", "late", "later", "half"):
                yield planned(task, "reinforce", 6e-4, arm, seed, 10_000, 500)


def planned(task: str, recipe: str, rate: float, arm: str, seed: int, rollouts: int, every: int) -> Planned:
    sizes = ("--recipe", recipe, "--set", "groups=32", "--set", "n=1", "--seed", str(seed), "--target", "1")
    steps = ("--learning-rate", str(rate), "--max-rollouts", str(rollouts), "--eval-every", str(every))
    return Planned(
        f"{task.replace('/', '-')}/{recipe}-{rate:g}-{rollouts}/{arm}-{seed}", arm, ("--task", task, *sizes, *steps)
    )


def smollm2() -> Iterator[Planned]:
    data = ("--prompts", "runs/chat/filter/train.parquet", "--heldout", "runs/chat/filter/heldout.parquet")
    reward = ("--reward", "rollalloc.tasks.chat:compute_score", "--max-new-tokens", "24", "--device", "cpu")
    for groups, seed in ((64, 0), (64, 1), (64, 2), (32, 0)):
        for arm in ("off", "now"):
            sizes = ("--recipe", "raft", "--set", f"groups={groups}", "--set", "n=1", "--seed", str(seed))
            steps = ("--learning-rate", "2e-5", "--max-rollouts", "1280", "--eval-every", "1280", "--target", "1")
            arguments = ("--model", "runs/smollm2", *data, *reward, *sizes, *steps)
            yield Planned(f"filter/raft-{groups}/{arm}-{seed}", arm, arguments)


PLANS = {"short": short, "long": long, "smollm2": smollm2}

# ------------------------------------------------------------------------------------------------------------ one run


class Shadows:
    """Follows a run's weights, and evaluates those that it does not sample from."""

    def __init__(self, arm: str, *, shown: bool) -> None:
        self.arm, self.shown, self.rows, self.found = arm, shown, 0, list[dict[str, Any]]()
        self.updater: Any = None
        self.means: dict[str, list[torch.Tensor]] = {}

    def install(self) -> None:
        average: Any = weights.WeightAverage
        updater: Any = update.Updater
        loop: Any = Loop
        kept, take = weights.kept_share, average.take
        begin, evaluate = updater.__init__, loop._evaluate
        shadows = self

        def ruled(_window: int, _step: int, rows: float) -> float:
            return RULES[shadows.arm](shadows.rows, rows)

        def begun(updater: Any, *given: Any) -> None:
            begin(updater, *given)
            shadows.updater = updater
            if shadows.arm == "off" and shadows.shown:
                shadows.means = {name: deepcopy(shadows.weights()) for name in ("now", "half", "late")}

        def taken(average: Any, step: int, rows: int) -> None:
            take(average, step, rows)
            for name, mean in shadows.means.items():
                torch._foreach_lerp_(mean, shadows.weights(), 1 - RULES[name](shadows.rows, rows))
            shadows.rows += rows

        def evaluated(loop: Loop, point: int | None) -> None:
            evaluate(loop, point)
            if point is not None and loop.allocator.version and shadows.shown:
                shadows.found.append({"rows": shadows.rows, "at": point, **shadows.others(loop)})

        assert kept(640, 41, 32) == RULES["late"](1280, 32)  # the rule of today
        weights.kept_share, average.take = ruled, taken
        updater.__init__, loop._evaluate = begun, evaluated

    def weights(self) -> list[torch.Tensor]:
        return [parameter.data for _, parameter in trained(self.updater.model)]

    def others(self, loop: Loop) -> dict[str, float]:
        """The accuracy of each of the other weights."""
        others = self.means if self.arm == "off" else {"trained": self.weights()}
        return {name: self.accuracy(loop, weights) for name, weights in others.items()}

    def accuracy(self, loop: Loop, weights: list[torch.Tensor]) -> float:
        parameters = [parameter for _, parameter in trained(self.updater.policy.model)]
        before = [parameter.data for parameter in parameters]
        try:
            for parameter, other in zip(parameters, weights, strict=True):
                parameter.data = other
            accuracy = loop.evaluate().accuracy
            assert accuracy is not None  # the built-in tasks are scored exactly
            return accuracy
        finally:
            for parameter, own in zip(parameters, before, strict=True):
                parameter.data = own


def carry_out(run: Planned, out: Path, *, shown: bool) -> None:
    shadows = Shadows(run.arm, shown=shown)
    shadows.install()
    folder = out / run.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    window_rows = "0" if run.arm == "off" else "640"
    try:
        app(["train", *run.arguments, "--averaging", window_rows, "--out", str(folder), "--overwrite"])
    except SystemExit as ended:
        if ended.code:
            raise
    (folder / "shadows.json").write_text(json.dumps(shadows.found))


# -------------------------------------------------------------------------------------------------------- its figures


def curve_of(folder: Path) -> tuple[list[tuple[int, float]], list[float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = [(line["at"], line["accuracy"]) for line in lines if line["kind"] == "eval" and line["at"] is not None]
    return points, [line["clip_fraction"] for line in lines if line["kind"] == "batch"]


def show(out: Path, plan: str) -> None:
    cells: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for run in PLANS[plan]():
        folder = out / run.name
        if not (folder / "shadows.json").exists():
            continue
        points, clipped = curve_of(folder)
        accuracies = [accuracy for _, accuracy in points]
        figures = {
            "first": accuracies[0],
            "end": accuracies[-1],
            "mean": fmean(accuracies[1:]),
            "fall": max(max(accuracies[: at + 1]) - accuracy for at, accuracy in enumerate(accuracies)),
            "clipped": fmean(clipped),
        }
        for target in (0.7, 0.8, 0.85):
            figures[f"to {target}"] = next((float(at) for at, accuracy in points if accuracy >= target), math.inf)
        last = json.loads((folder / "shadows.json").read_text())
        figures |= {
            f"end of {name}": value for name, value in (last[-1] if last else {}).items() if name not in ("rows", "at")
        }
        seed = run.name.rpartition("-")[2]
        cells.setdefault(run.name.rpartition("/")[0], {}).setdefault(run.arm, {})[seed] = figures
    for cell, arms in cells.items():
        print(f"\n{cell}")
        for arm, seeds in arms.items():
            names = set.intersection(*(set(each) for each in seeds.values()))
            means = [f"{name} {fmean(each[name] for each in seeds.values()):.3f}" for name in sorted(names)]
            print(f"  {arm:6} {len(seeds)} seeds: {', '.join(means)}")
            if arm != "off" and (both := sorted(seeds.keys() & arms.get("off", {}).keys())):
                gains = [seeds[seed]["end"] - arms["off"][seed]["end"] for seed in both]
                print(f"         end - off: {', '.join(f'{gain:+.3f}' for gain in gains)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--only", default="", help="runs whose name this regular expression finds")
    parser.add_argument("--minutes", type=float, default=4.0, help="after these no run is begun")
    asked = parser.parse_args()
    if asked.action == "table":
        show(asked.out, asked.plan)
    until = time.monotonic() + 60 * asked.minutes
    for each in PLANS[asked.plan]() if asked.action == "run" else ():
        if (
            re.search(asked.only, each.name)
            and not (asked.out / each.name / "shadows.json").exists()
            and time.monotonic() < until
        ):
            if not (child := os.fork()):  # what is imported is imported once; each run has its own process
                carry_out(each, asked.out, shown=asked.plan != "long")
                os._exit(0)
            print(each.name, "failed" if os.waitpid(child, 0)[1] else "", flush=True)
