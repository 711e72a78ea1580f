"""What streaming saves in seconds: DARTS and GRPO, synchronous and asynchronous, on walks, part by part.

python benchmarks/streaming.py TASKS                    # the ablation; TASKS: where built-in tasks are made and kept
python benchmarks/streaming.py TASKS --repeats 9 --batches 12 --only "grpo; darts: + overlap"

Every line trains 16 groups of 8 rows a batch, from the same initial model with the same settings. Runs are interleaved: one
of each line, then again; ratios are paired by repeat. Nothing is evaluated meanwhile. Seconds are from the end of the second
batch to that of the last one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollalloc import recipes
from rollalloc.bench.execution import one_thread
from rollalloc.bench.presets import task_source
from rollalloc.core.recipe import Recipe
from rollalloc.data.prompts import encode_prompts, load_prompts
from rollalloc.engines.native import Trainer
from rollalloc.engines.policy import Policy
from rollalloc.engines.sampling import Sampling
from rollalloc.engines.settings import Settings, Streaming
from rollalloc.rewards.function import load_reward
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.rules.sizes import Fixed

GROUPS, SHORTEST, LONGEST = 16, 7, 1
ROWS = SHORTEST + LONGEST
WARM = 2  # batches that are not counted: processes start, pipelines fill


@dataclass(frozen=True)
class Line:
    """A line of the table: a recipe under an engine."""

    recipe: Recipe
    staleness: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


def lines() -> dict[str, Line]:
    """The parts one after the other."""
    grpo = recipes.grpo(GROUPS, ROWS)
    darts = recipes.darts(GROUPS, SHORTEST, LONGEST, tail="sampled")
    even = replace(darts, stages=(replace(darts.stages[0], size=Fixed(12)),))
    short = recipes.darts(GROUPS, SHORTEST, LONGEST, tail="none")
    streams, beside = {"engine": "async", "streaming": Streaming(overlap=False)}, {"engine": "async"}
    return {
        "grpo": Line(grpo),
        "grpo: streaming": Line(grpo, 0, streams),
        "grpo: overlap": Line(grpo, 1, beside),
        "darts: selection": Line(even, 0, streams),
        "darts: + adaptive": Line(darts, 0, streams),
        "darts: + overlap": Line(darts, 1, beside),
        "darts, shortest only: + overlap": Line(short, 1, beside),
        "darts, synchronous": Line(darts),
    }


@dataclass
class Task:
    """Walks, ready to be trained on."""

    folder: Path

    def __post_init__(self) -> None:
        self.source, self.tokens = task_source("walks/mixed", self.folder)
        self.prompts = load_prompts(*self.source.prompts)

    def seconds(self, line: Line, seed: int, batches: int) -> tuple[float, dict[str, float]]:
        """Seconds a batch, and what was done in them."""
        policy = Policy.load(self.source.model, device="cpu")
        encoded = encode_prompts(self.prompts, policy.tokenizer, context=policy.context, max_new_tokens=self.tokens)
        settings = Settings(
            seed=seed,
            sampling=Sampling(self.tokens),
            learning_rate=6e-4,
            max_batches=WARM + batches,
            stop_when_barren=False,
            **line.settings,
        )
        lines: list[tuple[float, dict[str, Any]]] = []
        trainer = Trainer(
            policy,
            replace(line.recipe, max_staleness=line.staleness),
            encoded,
            InlineScorer(load_reward(self.source.reward)),
            settings,
            listener=lambda said: lines.append((time.perf_counter(), said)),
        )
        trainer.run()
        (began, first), (ended, last) = [each for each in lines if each[1]["kind"] == "batch"][WARM - 1 :: batches]
        paid, tokens = (last[name] - first[name] for name in ("rollouts_paid", "tokens_paid"))
        stopped = last["accounts"]["cancelled"] - first["accounts"]["cancelled"]
        update = statistics.mean(said["update_seconds"] for _, said in lines if said["kind"] == "batch")
        done = {"paid": paid, "stopped": stopped, "tokens": tokens, "update": update * batches}
        return (ended - began) / batches, {name: value / batches for name, value in done.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--only", default="", help="names of lines, with ; between; the first is the baseline")
    given = parser.parse_args()
    one_thread()
    task, measured = Task(given.tasks), lines()
    if given.only:
        measured = {name.strip(): measured[name.strip()] for name in given.only.split(";")}
    found: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in measured}
    for repeat in range(given.repeats):
        for name, line in measured.items():
            found[name].append(task.seconds(line, 5000 + repeat, given.batches))
    baseline = [seconds for seconds, _ in found[next(iter(found))]]
    print(f"{'':34} s/batch   faster (least to most)   rollouts  stopped  tokens  update s")
    for name, each in found.items():
        seconds, done = [one for one, _ in each], [other for _, other in each]
        ratios = [before / now for before, now in zip(baseline, seconds, strict=True)]
        mean = {key: statistics.mean(one[key] for one in done) for key in done[0]}
        print(
            f"{name:34} {statistics.median(seconds):7.3f}   {statistics.median(ratios):5.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f})   {mean['paid']:8.0f} {mean['stopped']:8.0f} {mean['tokens']:7.0f} {mean['update']:8.3f}"
        )


if __name__ == "__main__":
    main()
