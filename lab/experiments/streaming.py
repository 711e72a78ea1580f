"""What streaming saves in seconds: DARTS and GRPO, synchronous and asynchronous, on walks, part by part.

python lab/experiments/streaming.py TASKS                    # the ablation; TASKS: where built-in tasks are made and kept
python lab/experiments/streaming.py TASKS --repeats 9 --batches 12 --only "grpo; darts: + overlap" --task walks/mixed
python lab/experiments/streaming.py TASKS --only "grpo; darts: + overlap @ 3e-4"   # at a learning rate of its own

Every line trains 128 rows per batch from the same initial model with the same settings: 16 groups of 8, RAFT 128 prompts,
foresight and REINFORCE 64 with as many rows replayed, Pilot-Commit 16 groups of 4 + 4 ("pilots"). Runs are interleaved: one
of each line, then again; ratios are paired by repeat. The policy is evaluated before the first batch and after the last one:
accuracy and tokens of an answer at equal batches. Decoding steps are of lines that stream. Seconds are from the end of the
second batch to that of the last one. On a machine that others share they say little, so that processor seconds stand beside
them: of the trainer, and of the generator where it has a process of its own. No batch can be quicker than the larger of the
two.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc import recipes
from rollalloc.core.recipe import Recipe
from rollalloc.data.prompts import encode_prompts, load_prompts
from rollalloc.models.featurizer import features_of
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Sampling, Streaming
from rollalloc.recipes.streaming import streamed
from rollalloc.rewards.function import load_reward
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.rules.sizes import Fixed
from rollalloc.tasks.presets import task_files
from rollalloc.train.config import Config
from rollalloc.train.evaluation import HeldOut
from rollalloc.train.loading import one_thread
from rollalloc.train.train import Trainer

GROUPS, SHORTEST, LONGEST = 16, 7, 1
ROWS = SHORTEST + LONGEST
RATE = 6e-4  # GRPO's of walks/mixed, where a line says no other
WARM = 2  # batches that are not counted: processes start, pipelines fill


@dataclass(frozen=True)
class Line:
    """A line of the table: a recipe under an engine."""

    recipe: Recipe
    staleness: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


def measured_curve(steps: Sequence[tuple[int, float]], points: int = 8) -> tuple[tuple[int, float], ...]:
    """How long a decoding step takes, by how many rollouts are in it: a curve through an engine's own steps.

    The steps are sorted by rollouts and cut into groups of equal size. Each group gives a point: its mean number of
    rollouts, rounded, and its median seconds. Neighbouring points are pooled until seconds increase with rollouts
    (isotonic regression), since a step of more rollouts is not cheaper.

    Args:
        steps: (rollouts, seconds) of each step; at least one step, rollouts at least 1.
        points: the most that the curve may have.
    """
    found: dict[int, tuple[float, int]] = {}
    for part in np.array_split(np.array(sorted(steps), np.float64), min(points, len(steps))):
        at = max(1, round(float(part[:, 0].mean())))
        seconds, count = found.get(at, (0.0, 0))
        both = count + len(part)
        found[at] = (seconds * count + float(np.median(part[:, 1])) * len(part)) / both, both
    pooled: list[tuple[list[int], float, int]] = []
    for at, (seconds, count) in sorted(found.items()):
        pooled.append(([at], seconds, count))
        while len(pooled) > 1 and pooled[-2][1] >= pooled[-1][1]:
            there, more, many = pooled.pop()
            before, earlier, few = pooled.pop()
            pooled.append((before + there, (earlier * few + more * many) / (few + many), few + many))
    return tuple((at, seconds) for places, seconds, _ in pooled for at in places)


def lines(latency: tuple[tuple[int, float], ...]) -> dict[str, Line]:
    """The parts one after the other."""
    grpo = recipes.grpo(GROUPS, ROWS)
    darts = recipes.darts(GROUPS, SHORTEST, LONGEST, tail="sampled")
    even = replace(darts, stages=(replace(darts.stages[0], size=Fixed(12)),))
    priced = recipes.darts(GROUPS, SHORTEST, LONGEST, tail="sampled", latency=latency)
    whole = recipes.darts(GROUPS, SHORTEST, LONGEST, tail="sampled", latency=latency, solved=0.9)
    short = recipes.darts(GROUPS, SHORTEST, LONGEST, tail="none")
    pilots = recipes.pilot_commit(GROUPS, 4, 4, 2 * GROUPS)
    streams, beside = {"engine": "async", "streaming": Streaming(overlap=False)}, {"engine": "async"}
    single = {"raft": recipes.raft(GROUPS * ROWS), "foresight": recipes.foresight(64, replay=64)}
    within = {
        f"{name}{part}": Line(recipe, 0, how)
        for name, recipe in {"grpo": grpo, **single}.items()
        for part, how in {"": {}, ": a process": beside}.items()
    }
    further = {
        f"{name}: {ahead} ahead": Line(made, made.max_staleness, beside)
        for name, recipe in {
            "grpo": grpo,
            "reinforce": recipes.reinforce(64, replay=64),
            **single,
            "pilots": pilots,
        }.items()
        for ahead in (0, 1, 2, 4)
        for made in [streamed(recipe, staleness=None if ahead else 0, ahead=ahead or None)]
    }
    return {
        **within,
        **further,
        "grpo: streaming": Line(grpo, 0, streams),
        "grpo: overlap": Line(grpo, 1, beside),
        "darts: selection": Line(even, 0, streams),
        "darts: + adaptive": Line(darts, 0, streams),
        "darts: + cost model": Line(priced, 0, streams),
        "darts: + solved without a tail": Line(whole, 0, streams),
        "darts: + overlap": Line(whole, 1, beside),
        "darts, shortest only": Line(short, 0, streams),
        "darts, shortest only: a process": Line(short, 0, beside),
        "darts, shortest only: + overlap": Line(short, 1, beside),
        "darts, synchronous": Line(darts),
    }


@dataclass
class Task:
    """A task, ready to be trained on."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        self.files = task_files(self.name, self.folder)
        self.tokens = self.files.max_new_tokens
        self.prompts, self.heldout = load_prompts(str(self.files.train)), load_prompts(str(self.files.heldout))
        self.steps: list[tuple[int, float]] = []  # decoding steps of the last run that streamed

    def trainer(
        self,
        line: Line,
        seed: int,
        listener: Callable[[dict[str, Any]], None],
        log: Path | None = None,
        **settings: Any,
    ) -> Trainer:
        """A trainer of the initial model under a line, which tells `listener` each line of its metrics."""
        policy = Policy.load(str(self.files.model), device="cpu")
        encoded, heldout = (
            encode_prompts(each, policy.tokenizer, context=policy.context, max_new_tokens=self.tokens)
            for each in (self.prompts, self.heldout)
        )
        features = None
        if line.recipe.reads_features:
            features = features_of(policy.model, encoded.tokens, pad_id=policy.pad_id)
        asked = {"eval_samples": 8, "learning_rate": RATE, **settings, **line.settings}
        return Trainer(
            policy,
            replace(line.recipe, max_staleness=line.staleness),
            encoded,
            InlineScorer(load_reward(self.files.reward)),
            Config(
                seed=seed,
                sampling=Sampling(self.tokens),
                stop_when_barren=False,
                log_rollouts=log is not None,
                **asked,
            ),
            heldout=HeldOut(heldout),
            folder=log,
            features=features,
            listener=listener,
        )

    def seconds(self, line: Line, seed: int, batches: int, log: Path | None = None) -> tuple[float, dict[str, float]]:
        """Seconds a batch, and what was done in them; `log` is a folder for the run, with all its rollouts."""
        lines: list[tuple[tuple[float, ...], dict[str, Any]]] = []
        trainer = self.trainer(
            line,
            seed,
            lambda said: lines.append((clocks(trainer), said)),
            log,
            max_batches=WARM + batches,
            eval_every=10**9,
        )
        trainer.run()
        self.steps = list(getattr(trainer.engine, "steps", ()))
        trained = [each for each in lines if each[1]["kind"] == "batch"]
        (began, first), (ended, last) = trained[WARM - 1 :: batches]
        paid, tokens = (last[name] - first[name] for name in ("rollouts_paid", "tokens_paid"))
        stopped = last["accounts"]["cancelled"] - first["accounts"]["cancelled"]
        seconds, trainer_s, generator_s, steps = (after - before for before, after in zip(began, ended, strict=True))
        update_s = sum(said["update_seconds"] for _, said in trained[WARM:])
        done = {"trainer": trainer_s, "generator": generator_s, "update": update_s}
        done |= {"paid": paid, "stopped": stopped, "tokens": tokens, "steps": steps}
        found = [said for _, said in lines if said["kind"] == "eval"][-1]
        return seconds / batches, {
            **{name: value / batches for name, value in done.items()},
            "accuracy": found["accuracy"],
            "length": found["breadth"]["tokens"],
        }


def clocks(trainer: Trainer) -> tuple[float, ...]:
    """Now; processor seconds of this process, and of the generator's, 0 where it has none; decoding steps, likewise."""
    spawned = getattr(getattr(trainer.engine, "_backend", None), "_spawned", None)
    generator = 0.0
    if spawned is not None:
        fields = Path(f"/proc/{spawned.process.pid}/stat").read_text().rpartition(")")[2].split()
        generator = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), time.process_time(), generator, float(len(getattr(trainer.engine, "steps", ())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--task", default="walks/long")
    parser.add_argument("--seed", type=int, default=5000, help="of the first repeat; the others count on from it")
    parser.add_argument(
        "--only",
        default="",
        help="names of lines, ; between, @ and a learning rate after each; the first is the baseline",
    )
    given = parser.parse_args()
    one_thread()
    task = Task(given.tasks, given.task)
    task.seconds(lines(((1, 1.0),))["grpo: streaming"], 4999, given.batches)
    points = measured_curve([(rows, seconds) for rows, seconds in task.steps if rows])
    print("seconds per token by rollouts at once:", ", ".join(f"{at}: {seconds:.4f}" for at, seconds in points))
    measured = lines(points)
    if given.only:
        measured = {each.strip(): at_a_rate_of_its_own(measured, each) for each in given.only.split(";")}
    found: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in measured}
    for repeat in range(given.repeats):
        for name, line in measured.items():
            seconds, done = task.seconds(line, given.seed + repeat, given.batches)
            print(
                f"{repeat + 1}: {name}: {seconds:.3f} s, cpu {done['trainer']:.3f} and {done['generator']:.3f}, "
                f"{done['steps']:.2f} steps, {done['tokens']:.1f} tokens, accuracy {done['accuracy']:.4f} in "
                f"{done['length']:.1f} tokens",
                flush=True,
            )
            found[name].append((seconds, done))
    baseline = found[next(iter(found))]
    print(
        f"{'':34} s/batch  faster (least to most)   cpu s: trainer generator  bound  rollouts stopped tokens steps  "
        "accuracy, less the first's (standard error)  tokens of an answer"
    )
    for name, each in found.items():
        ratios = [before / now for (before, _), (now, _) in zip(baseline, each, strict=True)]
        bounds = [least(before) / least(now) for (_, before), (_, now) in zip(baseline, each, strict=True)]
        middle = {key: statistics.median(done[key] for _, done in each) for key in each[0][1]}
        gained = [now["accuracy"] - before["accuracy"] for (_, before), (_, now) in zip(baseline, each, strict=True)]
        error = statistics.stdev(gained) / len(gained) ** 0.5 if len(gained) > 1 else math.nan
        accuracy = statistics.fmean(done["accuracy"] for _, done in each)
        print(
            f"{name:34} {statistics.median(seconds for seconds, _ in each):7.3f}  {statistics.median(ratios):5.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})   {middle['trainer']:14.3f} {middle['generator']:9.3f}  "
            f"{statistics.median(bounds):5.2f} ({min(bounds):.2f} to {max(bounds):.2f})  {middle['paid']:8.0f} "
            f"{middle['stopped']:7.0f} {middle['tokens']:6.0f} {middle['steps']:5.1f}  {accuracy:.3f} "
            f"{statistics.fmean(gained):+.3f} ({error:.3f})  {middle['length']:.1f}"
        )


def at_a_rate_of_its_own(known: Mapping[str, Line], asked: str) -> Line:
    """The line of a name, such as "darts: + overlap", or of a name and a learning rate, "darts: + overlap @ 3e-4"."""
    name, _, rate = asked.partition("@")
    line = known[name.strip()]
    return replace(line, settings={**line.settings, "learning_rate": float(rate)}) if rate else line


def least(done: Mapping[str, float]) -> float:
    """Seconds that a batch takes at least: those of the process that works longest."""
    return max(done["trainer"], done["generator"])


if __name__ == "__main__":
    main()
