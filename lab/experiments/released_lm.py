"""Pilot-Commit against GRPO, and PODS against GRPO, in their published shapes with a language model.

    python lab/experiments/released_lm.py run OUT --tasks TASKS [--size 135m] [--minutes 14] [--device cuda]
    python lab/experiments/released_lm.py table OUT --tasks TASKS [--size 135m]

Sizes are the rungs of `rollalloc-lab bench --tier ladder`: `0.15m`, `8m` and `135m` (SmolLM2-135M; `rollalloc model smollm2
TASKS/smollm2` makes it first), each warmed up to about 30% right answers. `run` is resumable: it carries out the plan in its
order until the minutes are over, and begins no run after that. For a GPU, 14 minutes are meant.

Pool: 4,096 training and 512 held-out questions of the ladder, chosen by the exact success rates of the warmed-up model: a
third below .01, which give no signal, half between .125 and .75, where about half of the pilots pass at the start as in the
published runs (.35 to .6), 10% between, and 7% above .75. (The warmed-up models are sure of no question: at 0.15M none of
24,576 has a rate above .99, so that the third without signal is all hopeless.)

Arms: `grpo` 8 prompts x 64; `pc` 8 x (16 + 48), pilots for 24 prompts in every round, published order and eviction; both
take 4 optimizer steps a batch, importance weights for stale rows, no averaged weights. `grpo16` 8 x 16 and `pods`
8 x (16 of 64), on rewards that are the share of right symbols, with one step a batch. One learning rate for all of a size:
the best of its rung for GRPO on earlier data (lab/docs/scale.md, docs/trl.md), not tuned again here.

Reported: rollouts, batches and seconds (generation, scoring and updates, without evaluation) until the mean of three
evaluations comes to each accuracy; GRPO's cost over the method's on the same seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from rollalloc.compare.compare import is_finished
from rollalloc.data.prompts import load_prompts, write_prompts
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Sampling
from rollalloc.runs.reader import lines_in
from rollalloc.tasks.files import TaskFiles, make_once
from rollalloc.tasks.skills import Pool
from rollalloc.train.config import Config, folder_of, is_run_in
from rollalloc.train.train import train
from rollalloc_lab.tasks.bands import chosen_by_rate
from rollalloc_lab.tasks.ladder import Mixture, prepare
from rollalloc_lab.tasks.rungs import RUNGS, LadderRung

EDGES = (0.01, 0.125, 0.75, 0.99)
SHARES = (0.33, 0.1, 0.5, 0.07, 0.0)  # of the bands between the edges, from hopeless to solved
WINDOW = 3  # evaluations that a level is read from
LEVELS = (0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8)
GRADED = "rollalloc.tasks.files:graded_score"


@dataclass(frozen=True)
class Scale:
    """A rung with its pool, its learning rate, and the rollouts of a run."""

    rung: LadderRung
    learning_rate: float
    rollouts: int
    seeds: tuple[int, ...]
    train: int = 4096
    heldout: int = 512
    groups: int = 8
    n: int = 64
    every: int = 2
    shares: tuple[float, ...] = SHARES
    mixture: Mixture = field(default_factory=lambda: Mixture(train=24_576, heldout=4096))

    @property
    def eval_every(self) -> int:
        """Rollouts between evaluations: GRPO's for `every` batches."""
        return self.every * self.groups * self.n


SCALES = {
    "0.15m": Scale(RUNGS["0.15m"], 3e-4, 49_152, (60, 61, 62)),
    "8m": Scale(RUNGS["8m"], 2e-4, 32_768, (60, 61, 62)),
    "135m": Scale(RUNGS["135m"], 2e-5, 20_480, (60, 61)),
}


@dataclass(frozen=True)
class Arm:
    recipe: str
    base: str
    steps: int = 4
    graded: bool = False

    def parameters(self, scale: Scale) -> Mapping[str, Any]:
        """The recipe's parameters: a quarter of a group are pilots, or the rows that PODS trains on."""
        quarter = scale.n // 4
        if self.recipe == "pilot_commit":
            return {
                "groups": scale.groups, "n_pilot": quarter, "n_commit": scale.n - quarter, "gen_groups": 3 * scale.groups,
                "pilots": "every_round", "promote": "top_variance", "p_solve": 1.0, "confidence": None,
                "reprobe_every": None,
            }  # fmt: skip
        if self.recipe == "pods":
            return {"groups": scale.groups, "n": scale.n, "m": quarter}
        return {"groups": scale.groups, "n": quarter if self.graded else scale.n}


ARMS = {
    "grpo": Arm("grpo", "grpo"),
    "pc": Arm("pilot_commit", "grpo"),
    "grpo16": Arm("grpo", "grpo16", steps=1, graded=True),
    "pods": Arm("pods", "grpo16", steps=1, graded=True),
}


@dataclass(frozen=True)
class Planned:
    """A run of the plan."""

    arm: str
    seed: int

    def config(self, scale: Scale, pool: TaskFiles) -> Config:
        arm = ARMS[self.arm]
        return Config(
            model=str(pool.model),
            prompts=(str(pool.train),),
            heldout=str(pool.heldout),
            reward=GRADED if arm.graded else pool.reward,
            single_answer=True,
            reward_workers=0,
            device=pool.device,
            recipe=arm.recipe,
            parameters=arm.parameters(scale),
            max_rollouts=scale.rollouts if arm.recipe != "grpo" or not arm.graded else scale.rollouts // 4,
            label=self.arm,
            task=scale.rung.name,
            seed=self.seed,
            sampling=Sampling(pool.max_new_tokens),
            learning_rate=scale.learning_rate,
            optimizer_steps_per_batch=arm.steps,
            averaging=0,
            eval_every=scale.eval_every if arm.recipe != "grpo" or not arm.graded else scale.eval_every // 4,
            stop_when_barren=False,
            checkpoint_minutes=2.0,
        )


def plan(scale: Scale) -> Iterator[Planned]:
    """Pilot-Commit's comparison first, on one seed after the other; then that of PODS."""
    for arms in (("grpo", "pc"), ("grpo16", "pods")):
        for seed in scale.seeds:
            yield from (Planned(arm, seed) for arm in arms)


# ----------------------------------------------------------------------------------------------------------------- pool


@dataclass(frozen=True)
class PoolSettings:
    """What a pool was made with."""

    model: str
    train: int
    heldout: int
    shares: tuple[float, ...] = SHARES
    edges: tuple[float, ...] = EDGES
    seed: int = 19


def pool_of(scale: Scale, tasks: Path, device: str | None) -> TaskFiles:
    """The rung's warmed-up model, and the pool, made in the folder if missing."""
    files = prepare(tasks, scale.rung, scale.mixture, device=device)
    settings = PoolSettings(files.model.name, scale.train, scale.heldout, scale.shares)
    made = make_once(tasks / f"pool-{files.model.name}", settings, lambda to: _make_pool(to, files, settings, device))
    return replace(files, train=made / "train.parquet", heldout=made / "heldout.parquet")


def _make_pool(to: Path, files: TaskFiles, settings: PoolSettings, device: str | None) -> None:
    """Choose prompts by the exact success rates of the model: from its training questions, and from its held-out ones."""
    policy = Policy.load(str(files.model), device=device)
    rng = np.random.default_rng(settings.seed)
    for split, source, size in (("train", files.train, settings.train), ("heldout", files.heldout, settings.heldout)):
        asked = load_prompts(source)
        tokens = [tuple(policy.tokenizer(str(text))["input_ids"]) for text in asked.prompts]
        right = [policy.answer(str(answer)) for answer in asked.ground_truths]
        rate_N, _ = exact_answers(policy.model, tokens, right, pad_id=policy.pad_id)
        chosen = chosen_by_rate(rate_N, size, Pool(settings.edges, settings.shares), rng)
        rows = [
            {
                "data_source": "ladder/pool",
                "prompt": str(asked.prompts[at]),
                "reward_model": {"style": "rule", "ground_truth": str(asked.ground_truths[at])},
                "extra_info": {"split": split, "index": index, "exact_p": float(rate_N[at])},
            }
            for index, at in enumerate(chosen)
        ]
        write_prompts(to / f"{split}.parquet", rows)


# -------------------------------------------------------------------------------------------------------------- running


def carry_out(scale: Scale, out: Path, tasks: Path, minutes: float, device: str | None) -> int:
    """The plan's runs until the minutes are over. Returns how many ended."""
    begun, done = monotonic(), 0
    pool = pool_of(scale, tasks, device)
    print(f"the pool is ready after {(monotonic() - begun) / 60:.1f} minutes", flush=True)
    for each in plan(scale):
        config = each.config(scale, pool)
        place = folder_of(config, out)
        if not is_finished(config, place):
            if monotonic() - begun > 60 * minutes:
                print("the minutes are over; the same command goes on", flush=True)
                break
            train(config, place, resume=is_run_in(config, place))
            print(f"{each.arm}, seed {each.seed}: {(monotonic() - begun) / 60:.1f} minutes so far", flush=True)
        done += 1
    return done


@dataclass(frozen=True)
class Curve:
    """Smoothed accuracies of a run, and what it had spent by then."""

    accuracy: Sequence[float]
    spent: Mapping[str, Sequence[float]]

    def until(self, level: float, cost: str) -> float:
        """What was spent at the first evaluation whose smoothed accuracy is at least this; infinite if none is."""
        return next((spent for at, spent in zip(self.accuracy, self.spent[cost], strict=True) if at >= level), inf)


COSTS = {"rollouts": "rollouts_paid", "batches": "version", "seconds": "seconds"}


def curve_in(place: Path) -> Curve:
    lines = [line for line in lines_in(place / "metrics.jsonl") if line["kind"] == "eval"]
    smooth = np.convolve([line["accuracy"] for line in lines], np.full(WINDOW, 1 / WINDOW), "valid").tolist()
    return Curve(smooth, {cost: [line[key] for line in lines][WINDOW - 1 :] for cost, key in COSTS.items()})


def show(scale: Scale, out: Path, tasks: Path, device: str | None) -> None:
    """Each run's costs to each accuracy, and its baseline's costs over its own, in Markdown."""
    pool = pool_of(scale, tasks, device)
    found: dict[Planned, Curve] = {}
    for each in plan(scale):
        config = each.config(scale, pool)
        if is_finished(config, folder_of(config, out)):
            found[each] = curve_in(folder_of(config, out))
    print("| arm | seed | at the end | to | " + " | ".join(COSTS) + " | baseline's over its |\n|" + "---|" * 8)
    for each, curve in found.items():
        base = found.get(Planned(ARMS[each.arm].base, each.seed))
        for level in LEVELS:
            spent = {cost: curve.until(level, cost) for cost in COSTS}
            cells = " | ".join("never" if value == inf else f"{value:,.0f}" for value in spent.values())
            ratios = [] if base is None else [_ratio(base.until(level, cost), spent[cost]) for cost in COSTS]
            print(f"| {each.arm} | {each.seed} | {curve.accuracy[-1]:.3f} | {level} | {cells} | {', '.join(ratios)} |")


def _ratio(base: float, own: float) -> str:
    return "–" if inf in (base, own) else f"{base / own:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=Path, required=True, help="where model and pool are made and kept")
    parser.add_argument("--size", choices=tuple(SCALES), default="135m")
    parser.add_argument("--minutes", type=float, default=14.0, help="no run begins after these")
    parser.add_argument("--device", help="cpu or cuda; by default a GPU if there is one")
    asked = parser.parse_args()
    if asked.action == "run":
        carry_out(SCALES[asked.size], asked.out, asked.tasks, asked.minutes, asked.device)
    else:
        show(SCALES[asked.size], asked.out, asked.tasks, asked.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
