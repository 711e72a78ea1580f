"""TRL's own `GRPOTrainer` against the same script with `AllocatedGRPOTrainer` in its place.

    python lab/benchmarks/against_trl.py tune  SIZE OUT             # learning rates, on the tuning seeds
    python lab/benchmarks/against_trl.py final SIZE OUT             # every arm at its best rate, on the final seeds
    python lab/benchmarks/against_trl.py seconds SIZE OUT           # the final runs again to the target, for their seconds
    python lab/benchmarks/against_trl.py report OUT DOCS            # figure, summary and tables of what is over
    python lab/benchmarks/against_trl.py pairs SIZE OUT             # ratios of the final runs on a U-shaped pool
    python lab/benchmarks/against_trl.py run SIZE ARM RATE SEED OUT # one run

A run is a process of its own and leaves one file in OUT; what is there is not run again. Two of these commands may share
OUT. `--arms A,B` restricts the arms; after `--minutes M` no run is begun, and the exit status is 3 if some are missing.
`ablate`, `others` and `falls` are as `final`, for the other arms of the plan.

The plan, set before any run
----------------------------
Both sides get the same model, data, reward, float32, one thread and one optimizer step for a batch, a constant learning
rate, and TRL 1.16's other defaults. Held-out accuracy is exact (teacher forcing, the whole held-out file at 0.15M and 512
of its prompts at 8M) and outside the clock.

- Task: skills/late, target .85, at 0.15M (the task's own model) and at 8M (a Llama of 288 x 6, warmed up on the same
  examples).
- 135M, planned on 2026-11-26 at 09:05 before any run: SmolLM2-135M of `rollalloc-lab bench --tier ladder`, warmed up thus,
  on one GPU, TRL's autocast to bfloat16 on both sides, target .7 (.5 is told as well), held-out accuracy in float32 on 512
  prompts every 128 rollouts. Rates 1e-5, 2e-5, 4e-5, 8e-5 on seed 100 for stock with n = 4 and with n = 8, `line` and
  `foresight`; the better stock arm, `line-only`, `line` and `foresight` on seeds 200 to 204, as many as the time allows.
  Several runs share the GPU. `seconds` makes the runs to the target again, one at a time, from seed 200 on, as many seeds
  as the time allows; only these are compared in seconds, by the clock on the wall. A GPU's sums are in no fixed order, so
  that their accuracies may differ from the first runs'.
  Run in part on 2026-11-26: the tuning and seeds 200 to 202 at a rate that the tuning could not choose, since the held-out
  accuracies were void (lab/log).
- 135M on a CPU, planned on 2026-11-26 at 12:35 before any run: as above, but on one thread, 256 held-out prompts every 256
  rollouts, 1,536 rollouts at least. Nothing is tuned: stock with n = 4, `line-only` and `line` have the rate 2e-5, at which
  each of them had the most right rollouts among the first 2,304 of the GPU's tuning runs (docs/trl.md as of that day; stock
  with n = 4 and n = 8 were equal). Seeds 200 to 204, first stock and `line`, as many as the time allows. Right rollouts
  among the first 1,536 are told as well, if the target is not reached. No run was over on that day (lab/log).
- 135M on a GPU again, planned on 2026-11-26 at 16:45 before any run, with the fault of the first plan mended: the same
  model, precision and target, 512 held-out prompts every 192 rollouts. Rates 1e-5, 2e-5, 4e-5, 8e-5 on seed 100 for stock
  with n = 4, `line`, `foresight` and `line-64`, which is `line` with 64 rows in a step, because a step of 64 takes a GPU
  hardly longer than one of 32. Then all four and `line-only` on seeds 200 to 204, seeds outside, in this order, as many
  as the time allows. About ten runs share the GPU, so that only rollouts and tokens are compared; `seconds` is run for
  stock and `line-64` alone, if time is left.
- 135M with vLLM, planned on 2026-11-27 at 00:20 before any run: `135m-vllm` is `135m`, but both sides set TRL's
  `use_vllm=True` with the engine in the training process (`vllm_mode="colocate"`), in bfloat16, with CUDA graphs for
  decoding. Nothing is tuned: each arm has the rate that was best without vLLM. Stock with n = 4, `line-64`, `line` and
  `foresight` on seeds 200 to 204, seeds outside, in this order, as many as the time allows. The runs are prepared
  together, and train one at a time, so that each is alone on the GPU and the seconds of all are compared. Beside these,
  if time is left, without vLLM and in a crowd, to see whether the settings of stock were its best: n = 8, 32 rows in a
  step, and `adam_beta2=0.95`, each at 2e-5 on seeds 200 to 202.
- Gemma 3 270M, a second pretrained family, planned on 2026-11-29 at 01:30 before any run of it: `run 270m ARM RATE 200 OUT`
  on one thread of a CPU, autocast to bfloat16 on both sides, without a warm-up, on few-shot questions
  (rollalloc_lab.tasks.shots), of which the untrained model was seen to solve some: 96 held-out prompts in float32 every 128
  rollouts, 384 rollouts a run. Stock with n = 4 and `line` at 2e-5, then both at 4e-5; the better rate of each counts, by
  its last accuracy. One seed, so there is no interval, and the rates are chosen on the seed that is told.
  Cut at 01:55, before any evaluation of a trained model was read, as the machine gave a fifth of a core: stock, then
  `line`, at 2e-5, to the first evaluation after 128 rollouts.
- Stock: 64 rows in a step, in groups of 4, 8 and 16. Ours: `recipes.reinforce(groups=32)`, which is 32 rows in a step.
- Rates, four for each arm at 0.15M: 1.5e-4, 3e-4, 6e-4, 1.2e-3.
  Tuning seed 100. A tuning run ends at the target, or without
  it after 1.5 times the least budget, and counts as twice that then. The best rate has the fewest rollouts to the target;
  ties go to the mean accuracy. At 8M stock is tuned and run with the n that is best at 0.15M.
- Final arms: the best stock arm at its best rate; `line-only`: the one line and nothing else, at the rate and with the
  optimizer of the best stock arm; `line`: the one line with `averaging=640` and `adam_beta2=0.95`, as rollalloc's own
  trainer has them, at its best rate. Final seeds 200 to 207; seeds outside, arms inside.
- Foresight, added on 2026-11-25 at 23:30 when stock and `line` had their final runs and foresight had one or two at 6e-4:
  `foresight` is `line` with `recipes.foresight(groups=32)`, which README recommends where most prompts are solved or
  hopeless, as they are here. Four rates on seed 100, then the final seeds at the best. This arm is held against the bars,
  whatever it shows. `foresight-unaveraged` is the same with `averaging=0`, tuned by itself and reported beside it. Seconds
  contain the predictor's.
- Seconds, added on 2026-11-25 at 23:55, when the step had become faster and five seeds of foresight were over: the final
  runs of four arms (stock, `line-only`, `line`, `foresight`) are made again, seeds outside and arms inside, and end at the
  target. Their seconds count, so that all arms ran under one load and with one code. Their accuracies must equal those of
  the first runs.
- 8M, cut on 2026-11-26 at 00:45 before any run was over, for want of time: stock with n = 4, `line` and `foresight`.
  First 1.5e-4 and 3e-4 on seed 100, to the target or to 12,288 rollouts. Then each at its best rate on seeds 200, 201, 202,
  in this order, as many as the time allows. Fewer than three seeds have no interval, and README does not quote them. Added
  at 01:12, when TRL's trainer had lost accuracy at both rates: 7.5e-5 on seed 100, for all three arms; no final run.
  Added on 2026-11-26 at 03:40, before any final run: 3.75e-5 on seed 100 for stock alone, whose best rate was the lowest
  of the three (the other two arms have theirs in the middle), and final seeds 200 to 207 for all three arms.
- Ablations at 0.15M, seeds 200 to 202, all beside the best stock n: other losses of TRL (`grpo`, `dr_grpo` without scaled
  rewards; TRL's default is `dapo`); batches of 32 rows; `adam_beta2=0.95`; averaged weights, that sample and are
  evaluated; the last three together. Added on 2026-11-26 at 12:45, before any run: `stock-evaluated-mean`, averaged weights
  that are evaluated, while the trained weights sample.
  Each at 3e-4 and at 6e-4, of which the better one counts. `line-unaveraged` is `line`
  without its mean, at the same two rates.
- Other recipes by the one line, seeds 200 to 202: GRPO, PODS, DAPO and Pilot-Commit, at the same two rates.
  Foresight with `once=False`, and with and without an adaptive clip of 1.5, which has been taken out since, seeds 200 to
  204, at 6e-4 only: does it fall?
- Changes of `line`, planned and run on 2026-11-26 (plan, its cuts and the code: commits 34288dcc to 6c51d922; lab/log).
  A search of some 20 changes on the seeds 100 to 102, and of the winner on 103 to 107: can plain REINFORCE reach the bar
  of rollouts? The winner (replay of 32 rows, a running baseline, nearly certain successes left out) fell in one of its
  final runs. Then `line-replay`, which had also been below every rate of `line` on all three seeds, was run on the final
  seeds at 6e-4, each compared with a run of stock on the same machine. So it is a second look at these seeds.
- `line-replay` at 8M, planned on 2026-11-26 at 18:04 before any run of it there: `run 8m line-replay 1.5e-4 SEED OUT` on
  seeds 200 to 207, at the best rate of `line`, no other tried; stock beside it, at its best rate to the target
  (`seconds`), on as many of these seeds as the time allows, for the seconds.
- U-shaped pools, planned on 2026-11-29 at 00:50 before any run: `0.15m-u` and `8m-u` are the ladder's twins
  (`rollalloc_lab.tasks.twins`), of whose 4,096 prompts a third is hopeless and a third solved. Held-out accuracy is exact,
  on the first 512 (8M: 256) prompts of the U-shaped set and of the balanced set. The target on each set is fixed by the
  model before training: its accuracy, and 60% of the way from there to its pass@8, rounded to .01.
  0.15M: three rates (1.5e-4, 3e-4, 6e-4) for stock with n = 4, `line` and `foresight` on seed 100, to the U-shaped target;
  then these and `foresight-again` (`once=False`, at the rate of `foresight`) on the seeds 300 to 304, as many as the time
  allows. If the best rate of an arm is the highest, 1.2e-3 is tried too. (Cut at 01:25, before any run, because the machine
  is crowded: there were four rates, and n = 8.)
  8M: nothing is tuned, for want of time; each arm has its best rate at 8M on skills/late (stock 7.5e-5, the others 1.5e-4).
  Seeds 300 to 302, first the better foresight of 0.15M, `line` and stock with n = 4. If time is left, `line` and that
  foresight at 3e-4 on seed 100 beside 1.5e-4.
  A final run ends when both targets are reached and its least budget of 4,096 is spent, or at twice that. 135M (`135m-u`,
  where there is a GPU): as `135m`, its targets by the same rule; not run here. Bars: `line` over foresight at 8M on the
  U-shaped set, 1.4 in rollouts and 1.0 in tokens; stock over foresight 5 in rollouts and 3 in CPU seconds. The balanced set
  is told beside it, whatever it shows.
  8M again, planned on 2026-11-29 at 06:09 before any run at 8M (in place of the above), when the twin had been
  made and its targets set by the rule (.54, balanced .74), on a machine with a core to itself. Rates 7.5e-5, 1.5e-4 and 3e-4
  on seed 100 for stock with n = 4, `line` and `foresight`, to the target or to 4,608 rollouts; while an arm's best rate is
  at an end of those tried, the next by a factor of two. Then, on seed 100 too: stock with n = 8 at the best rate of n = 4,
  which is the stock arm if it is better, and at the best rate of `line` two arms with replay, `line-replay` (32 rows) and
  `line-gated` (64 rows, `replay_moved=.1`), of which the better one has final runs; should that rate be bad for both, half
  of it. Final seeds 300 to 304, as many as the time allows, seeds outside: stock, `line`, `foresight`, the arm with replay,
  `foresight-again` at the rate of `foresight`. A final run ends when the U-shaped target is reached and 3,072 rollouts are
  spent, or at 8,192; the balanced target is not waited for. Bars as above; stock over the best arm of ours, whichever it
  is, is told against the joint bar (5 in rollouts, 3 in CPU seconds), as a choice among four.
  Cut at 06:40, when stock, `line` and `foresight` were over on seed 300 and read, for want of time: these three on seeds 301
  to 304 first; replay and `foresight-again` after them, if time is left.
  Added at 09:18, when these were over and `line-gated` had been read on seeds 300 and 301: the joint bar again, second and
  last attempt. `line-replay` at 3e-4, which the choice between the two arms with replay had left out although its seconds
  on seed 100 were the best, on seeds 300 to 304; `line-gated` on the three that it lacks; `foresight-replay` (foresight with
  replay of 32 rows) at 1.5e-4 and 3e-4 on seed 100, then at the better one on seeds 300 to 304. Stock is tuned further, so
  that the other side is at its best too: on seed 100 `stock-all` (32 rows, averaged, `adam_beta2=.95`) at 7.5e-5, 1.5e-4 and
  3e-4, and `stock-beta2` at 1.5e-4; if one of these comes to a higher accuracy than stock with n = 4 did there within 4,608
  rollouts, or to the target, it is run on the final seeds, and the bars are told against the better of the two.
  `foresight-again` on the seeds it lacks, last. The joint bar is a choice among five arms now.
- U-shaped pool at 0.15M again, planned on 2026-11-29 at 10:38, when three runs of `foresight-replay` at 8M had been read:
  `foresight-replay` and `line-replay` at 3e-4, 6e-4 and 1.2e-3 on seed 100 (2.4e-3 too for an arm whose best rate is
  1.2e-3), then each at its best rate on seeds 300 to 304, and `stock-4`, `line`, `foresight` on seed 304, which they lack.
- U-shaped pool at 135M on a CPU, planned on 2026-11-29 at 16:40 before any run, while the twin was being made: `135m-cpu-u`,
  one thread a run, autocast to bfloat16 on both sides, 192 prompts of each held-out set in float32 every 192 rollouts, the
  targets by the rule (set at 17:02, when the twin had been made: .60 from .517, balanced .74 from .510). `line` and
  `foresight-replay`, which gained most at 8M, at 2e-5 and 4e-5 on seed 100, to the target or to 1,152 rollouts; while an
  arm's best rate is at an end of those tried, the next by a factor of two, if time is left. Then both on seeds 300 to 304,
  seeds outside, each to the target and to 768 rollouts at least, 2,304 at most, as many as the time allows. After them, as
  far as there is time, stock with n = 4, tuned in the same way, `foresight` at the rate of `foresight-replay`, and
  `line-replay` at that of `line`. Bar: `line` over `foresight-replay` 1.4 in rollouts and 1.0 in tokens. Seconds are the
  processor's, beside other work.
  Changed at 17:22, before any final run, when three of the four tuning runs had, or nearly, come to the target by 384
  rollouts: an evaluation every 96 rollouts, and 384 of them at least, since 192 were too coarse to compare.
- A run but for the tuning goes on to its least budget (12,288 rollouts at 0.15M, 8,192 at 8M, 1,792 at 135M) or until two
  successive evaluations are at the target, whichever is later, and ends at twice the least budget.
- This plan was cut after four runs of the tuning (all arms at 1.5e-4), because the machine was busier than expected: before,
  there were two tuning seeds, and all three stock arms had final runs.
- Bars: the best stock arm over `line`, and over `foresight`, at least 3 in rollouts and 2 in seconds; lower ends of the 95%
  intervals above 2.5 and 1.5. `line` and `foresight` do not fall by more than .04 below the mean of the first two
  evaluations at the target.

Seconds are those of the training loop, evaluation excluded: wall-clock and the processor's. The machine does other work
too, so that the processor's seconds are the ones to compare.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOTrainer

from rollalloc import recipes
from rollalloc.compare.summary import Interval, interval
from rollalloc.data.prompts import load_prompts
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.files.regular import write_text
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.models.weights import kept_share
from rollalloc.runs.cost import Cost, Curve, cost_to_target
from rollalloc.tasks.files import TaskFiles
from rollalloc.tasks.presets import task_files
from rollalloc.train.loading import one_thread
from rollalloc_lab.tasks import ladder, shots, twins
from rollalloc_lab.tasks.rungs import RUNGS
from rollalloc_lab.tasks.skills_8m import model_8m
from trl_driver import config

MORE = 3  # exit status if runs are missing that nobody has begun
RATES_OF_ABLATIONS = (3e-4, 6e-4)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model's task and its budget.

    Attributes:
        about: model and task, for the figure.
        rates: tried for each arm.
        tuning: seeds.
        final: seeds.
        least: rollouts that each run goes on to; it ends at twice as many.
        every: rollouts between two evaluations.
        heldout: prompts that are evaluated, from the file's beginning.
        arms: that are tuned at this size; the stock arms among them compete.
        target: held-out accuracy.
        bf16: whether both sides compute in bfloat16 by autocast, with weights in float32, on a GPU if there is one.
        vllm: whether both sides generate with vLLM, in the process that trains.
        most: rollouts at which a run ends without the target; None: twice `least`.
        chosen: rate of each arm, if nothing is tuned at this size.
        balanced: accuracy to be reached on a twin's balanced held-out set; None: the task is no twin.
        awaited: names of the targets, of `targets`, without which no run ends before `most`.
    """

    about: str
    rates: tuple[float, ...]
    tuning: tuple[int, ...] = (100,)
    final: tuple[int, ...]
    least: int
    every: int
    heldout: int
    arms: tuple[str, ...] = ("stock-4", "line", "foresight")
    target: float = 0.85
    bf16: bool = False
    vllm: bool = False
    most: int | None = None
    chosen: Mapping[str, float] = field(default_factory=dict[str, float])
    balanced: float | None = None
    awaited: tuple[str, ...] = ("accuracy", "balanced")

    @property
    def targets(self) -> dict[str, float]:
        """The target of each held-out set, by the name of its accuracy in a `Point`."""
        return {"accuracy": self.target} | ({} if self.balanced is None else {"balanced": self.balanced})

    @property
    def device(self) -> str:
        """The device of the model."""
        return "cuda" if self.bf16 and torch.cuda.is_available() else "cpu"


SIZES = {
    "0.15m": Size(
        about="0.15M parameters, skills/late, CPU",
        rates=(1.5e-4, 3e-4, 6e-4, 1.2e-3),
        final=tuple(range(200, 208)),
        least=12_288,
        every=512,
        heldout=1024,
        arms=("stock-4", "stock-8", "stock-16", "line", "foresight", "foresight-unaveraged"),
    ),
    "8m": Size(
        about="8M parameters, skills/late, CPU",
        rates=(7.5e-5, 1.5e-4, 3e-4),
        final=tuple(range(200, 208)),
        least=8_192,
        every=1024,
        heldout=512,
    ),
    "135m": Size(
        about="SmolLM2-135M, short questions, H100",
        rates=(1e-5, 2e-5, 4e-5, 8e-5),
        final=tuple(range(200, 205)),
        least=1_792,
        every=192,
        heldout=512,
        arms=("stock-4", "line", "foresight", "line-64"),
        target=0.7,
        bf16=True,
    ),
}
SIZES["270m"] = Size(
    about="Gemma 3 270M, few-shot questions, CPU",
    rates=(2e-5, 4e-5),
    final=(200,),
    least=384,
    most=384,
    every=128,
    heldout=96,
    arms=("stock-4", "line"),
    target=0.9,
    bf16=True,
)
SIZES["135m-vllm"] = replace(
    SIZES["135m"],
    about="SmolLM2-135M, short questions, H100, vLLM",
    arms=("stock-4", "line-64", "line", "foresight"),
    vllm=True,
    chosen={"stock-4": 2e-5, "line-64": 4e-5, "line": 2e-5, "foresight": 2e-5},
)
SIZES |= {
    "0.15m-u": replace(
        SIZES["0.15m"],
        about="0.15M parameters, U-shaped pool, CPU",
        rates=(1.5e-4, 3e-4, 6e-4, 1.2e-3),
        final=tuple(range(300, 305)),
        least=4_096,
        heldout=512,
        arms=("stock-4", "line", "foresight"),
        target=0.55,
        balanced=0.72,
    ),
    "8m-u": replace(
        SIZES["8m"],
        about="8M parameters, U-shaped pool, CPU",
        final=tuple(range(300, 305)),
        least=3_072,
        most=8_192,
        every=512,
        heldout=256,
        target=0.54,
        balanced=0.74,
        awaited=("accuracy",),
    ),
    "135m-u": replace(
        SIZES["135m"],
        about="SmolLM2-135M, U-shaped pool, GPU",
        arms=("stock-4", "line-64", "foresight", "foresight-again"),
        target=0.6,
        balanced=0.75,
    ),
}
SIZES["135m-cpu-u"] = replace(
    SIZES["135m-u"],
    about="SmolLM2-135M, U-shaped pool, CPU",
    rates=(2e-5, 4e-5),
    final=tuple(range(300, 305)),
    least=384,
    most=2_304,
    every=96,
    heldout=192,
    arms=("stock-4", "line", "foresight-replay"),
    target=0.6,
    balanced=0.74,
    awaited=("accuracy",),
)


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        about: in words, for the table.
        changes: settings of `GRPOConfig`.
        recipe: of the one line; None: TRL's own trainer.
        averaging: rows over which weights are averaged; TRL's own trainer gets an average that the benchmark adds.
        samples_mean: whether TRL's own trainer samples from that average; otherwise the average is only evaluated.
    """

    about: str
    changes: Mapping[str, Any]
    recipe: Callable[[], Any] | str | None = None
    averaging: int = 0
    samples_mean: bool = True


OURS = {"per_device_train_batch_size": 32, "num_generations": 2}
LIKE_OURS: dict[str, Any] = {"adam_beta2": 0.95}


def stock(n: int, about: str = "", averaging: int = 0, **changes: Any) -> Arm:
    """TRL's own trainer with 64 rows in a step, in groups of n."""
    settings = {"per_device_train_batch_size": 64, "num_generations": n} | changes
    return Arm(about or f"TRL's own, groups of {n}", settings, averaging=averaging)


def line(about: str, recipe: Callable[[], Any] | str, averaging: int = 640, **changes: Any) -> Arm:
    """The one line."""
    return Arm(about, {**OURS, **changes}, recipe, averaging)


reinforce = partial(recipes.reinforce, groups=32)
replayed = partial(recipes.reinforce, groups=32, replay=32)
gated = partial(recipes.reinforce, groups=32, replay=64, replay_moved=0.1)
foresight = partial(recipes.foresight, groups=32)
MAIN = {
    "stock-4": stock(4),
    "stock-8": stock(8),
    "stock-16": stock(16),
    "line": line("the one line, averaged", reinforce, **LIKE_OURS),
    "line-64": line(
        "the one line, 64 rows in a step, averaged",
        partial(recipes.reinforce, groups=64),
        **LIKE_OURS,
        per_device_train_batch_size=64,
    ),
    "foresight": line("the one line, foresight, averaged", foresight, **LIKE_OURS),
    "foresight-unaveraged": line("the one line, foresight, not averaged", foresight, 0, **LIKE_OURS),
}


def finals(best: int) -> dict[str, Arm]:
    """The arms of the final runs, by name; `best` is the n of the best stock arm."""
    return MAIN | {
        "line-only": line("the one line, nothing else", reinforce, 0),
        "line-replay": line("the one line, averaged, replay of 32 rows", replayed, **LIKE_OURS),
        "line-gated": line("the one line, averaged, replay of 64 rows with a gate", gated, **LIKE_OURS),
        "foresight-replay": line(
            "the one line, foresight, averaged, replay of 32 rows", partial(foresight, replay=32), **LIKE_OURS
        ),
    }


def ablations(n: int) -> dict[str, Arm]:
    """Arms between TRL's own trainer and the one line."""
    rows = {"per_device_train_batch_size": 32}
    return {
        "stock-grpo": stock(n, "loss grpo", loss_type="grpo"),
        "stock-dr_grpo": stock(n, "loss dr_grpo, rewards not scaled", loss_type="dr_grpo", scale_rewards="none"),
        "stock-rows": stock(n, "32 rows in a step", **rows),
        "stock-beta2": stock(n, "adam_beta2 .95", **LIKE_OURS),
        "stock-mean": stock(n, "averaged", 640),
        "stock-evaluated-mean": replace(stock(n, "averaged, evaluated only", 640), samples_mean=False),
        "stock-all": stock(n, "averaged, adam_beta2 .95, 32 rows", 640, **rows, **LIKE_OURS),
        "line-unaveraged": line("the one line, not averaged", reinforce, 0, **LIKE_OURS),
    }


def others(n: int) -> dict[str, Arm]:
    """Other recipes by the one line; those of groups take their sizes from TRL's settings."""
    groups = {"per_device_train_batch_size": 64, "num_generations": n}
    return {
        "grpo": line("GRPO", "grpo", **groups, **LIKE_OURS),
        "pods": line("PODS", "pods", **groups, **LIKE_OURS),
        "dapo": line("DAPO", "dapo", **groups, **LIKE_OURS),
        "pilot_commit": line("Pilot-Commit", "pilot_commit", **groups, **LIKE_OURS),
    }


def falls() -> dict[str, Arm]:
    """Foresight in another way, which may fall after the target."""
    again = partial(recipes.foresight, groups=32, once=False)
    return {
        "foresight-again": line("foresight, once=False", again, **LIKE_OURS),
    }


# ------------------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Asked:
    """Held-out prompts with their right answers, as tokens."""

    prompts: list[tuple[int, ...]]
    answers: list[tuple[int, ...]]

    @classmethod
    def read(cls, file: Path, count: int, policy: Policy) -> Asked:
        """The first prompts of a file."""
        heldout = load_prompts(str(file))
        prompts = [tuple(ids) for ids in policy.tokenizer(list(heldout.prompts[:count]))["input_ids"]]
        return cls(prompts, [policy.answer(str(truth)) for truth in heldout.ground_truths[:count]])

    def accuracy(self, policy: Policy) -> float:
        """The mean of the exact success rates."""
        chance_N, _ = exact_answers(policy.model, self.prompts, self.answers, pad_id=policy.pad_id)
        return float(chance_N.mean())


@dataclass(frozen=True)
class Task:
    """What both sides are given; the held-out sets by the name of their accuracy in a `Point`."""

    policy: Policy
    data: Dataset
    tokens: int
    heldout: Mapping[str, Asked]


def task_of(size: str, tasks: Path) -> Task:
    """The model and the prompts, made in the folder if missing."""
    task = files_of(size, tasks)
    policy = Policy.load(str(task.model), device=SIZES[size].device)
    train = load_prompts(str(task.train))
    files = {"accuracy": task.heldout, "balanced": twins.balanced_of(task)}
    return Task(
        policy,
        Dataset.from_dict({"prompt": list(train.prompts), "answer": [str(truth) for truth in train.ground_truths]}),
        task.max_new_tokens,
        {name: Asked.read(files[name], SIZES[size].heldout, policy) for name in SIZES[size].targets},
    )


def files_of(size: str, tasks: Path) -> TaskFiles:
    """The files of a size's task, made in the folder if missing."""
    if size.endswith(twins.SUFFIX):
        rung = size.partition("-")[0]
        return twins.prepare(tasks / "ladder", RUNGS[rung], twins.TWINS[rung], device=SIZES[size].device)
    if size.startswith("135m"):
        return ladder.prepare(tasks / "ladder", RUNGS["135m"], device=SIZES[size].device)
    if size == "270m":
        return shots.prepare(tasks / "shots")
    task = task_files("skills/late", tasks)
    return replace(task, model=model_8m(tasks)) if size == "8m" else task


class Reward:
    """1 for the right answer, else 0; counts what both sides generate."""

    __name__ = "right"

    def __init__(self) -> None:
        self.rollouts = self.tokens = 0

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float | None]:
        self.rollouts += len(completions)
        self.tokens += sum(map(len, completion_ids))
        return [float(text.split() == truth.split()) for text, truth in zip(completions, answer, strict=True)]


@dataclass(frozen=True)
class Point:
    """An evaluation: what had been paid when the weights were made, and their accuracy."""

    rollouts: int
    tokens: int
    seconds: float
    cpu: float
    steps: int
    accuracy: float
    balanced: float | None = None  # on a twin's balanced held-out set


def clocks() -> list[float]:
    """Seconds by the clock on the wall and of the processor, when the GPU has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return [time.perf_counter(), time.process_time()]


class Watch(TrainerCallback):
    """Evaluates on a grid of rollouts, with the clocks stopped, and ends the run."""

    def __init__(self, task: Task, reward: Reward, size: Size, tunes: bool) -> None:
        self.task, self.reward, self.size, self.tunes = task, reward, size, tunes
        self.trainer: Any = None
        self.points: list[Point] = []
        self._away = [0.0, 0.0]  # seconds spent on evaluations, by either clock

    def begin(self) -> None:
        """Start the clocks."""
        self._began = clocks()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.reward.rollouts >= len(self.points) * self.size.every:
            self._evaluate(state.global_step)
            control.should_training_stop = self.over()

    def over(self) -> bool:
        """Whether the run may end."""
        paid = self.reward.rollouts
        awaited = ("accuracy",) if self.tunes else self.size.awaited
        reached = len(self.points) > 1 and not any(
            to_target(self.points, target, name).censored
            for name, target in self.size.targets.items()
            if name in awaited
        )
        if self.tunes:
            return reached or paid >= 1.5 * self.size.least
        return paid >= (self.size.most or 2 * self.size.least) or (paid >= self.size.least and reached)

    def _evaluate(self, step: int) -> None:
        now = clocks()
        seconds, cpu = (at - began - away for at, began, away in zip(now, self._began, self._away, strict=True))
        averaged = getattr(self.trainer, "averaged", None)
        with averaged.sampling() if averaged else nullcontext():
            found = {name: asked.accuracy(self.task.policy) for name, asked in self.task.heldout.items()}
        self.points.append(Point(self.reward.rollouts, self.reward.tokens, seconds, cpu, step, **found))
        print(self.points[-1], flush=True)
        self._away = [away + after - before for away, after, before in zip(self._away, clocks(), now, strict=True)]


class Mean(TrainerCallback):
    """The average that `averaging=` gives, for TRL's own trainer; it samples and is evaluated."""

    def __init__(self, model: Any, window: int, rows: int) -> None:
        self.model, self.window, self.rows = model, window, rows
        self.other = [parameter.detach().clone() for parameter in model.parameters()]

    def sampling(self) -> Any:
        """A context in which the model has the average."""
        return _Swapped(self)

    def swap(self) -> None:
        """Exchange the average and the trained weights."""
        before = [parameter.data for parameter in self.model.parameters()]
        for parameter, tensor in zip(self.model.parameters(), self.other, strict=True):
            parameter.data = tensor
        self.other = before

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trained = [parameter.data for parameter in self.model.parameters()]
        torch._foreach_lerp_(self.other, trained, 1 - kept_share(self.window, state.global_step + 1, self.rows))


class _Swapped:
    def __init__(self, mean: Mean) -> None:
        self.mean = mean

    def __enter__(self) -> None:
        self.mean.swap()

    def __exit__(self, *_: Any) -> None:
        self.mean.swap()


class AveragedStock(GRPOTrainer):
    """TRL's own trainer, sampling from an average of its weights."""

    averaged: Mean

    def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
        with self.averaged.sampling():
            return super()._generate_single_turn(*given, **named)


def trainer_of(arm: Arm, task: Task, rate: float, seed: int, reward: Reward, watch: Watch, out: str) -> GRPOTrainer:
    """The script that both sides share."""
    shared: dict[str, Any] = {
        "learning_rate": rate,
        "max_completion_length": task.tokens,
        "max_steps": 10**6,
        "seed": seed,
        "logging_steps": 100,
    }
    if watch.size.bf16:
        shared |= {"use_cpu": task.policy.model.device.type == "cpu", "bf16": True}
    if watch.size.vllm:
        shared |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": 128,
            "vllm_gpu_memory_utilization": 0.05,
        }
    args = config(out, **shared | dict(arm.changes))
    model: Any = task.policy.model
    given: dict[str, Any] = {"processing_class": task.policy.tokenizer, "callbacks": [watch]}
    if arm.recipe is not None:
        recipe = arm.recipe if isinstance(arm.recipe, str) else arm.recipe()
        more: dict[str, Any] = {"recipe": recipe, "averaging": arm.averaging}
        return AllocatedGRPOTrainer(model, reward, args, task.data, **given, **more)
    if not arm.averaging:
        return GRPOTrainer(model, reward, args, task.data, **given)
    kind: Any = AveragedStock if arm.samples_mean else GRPOTrainer
    trainer = kind(model, reward, args, task.data, **given)
    trainer.averaged = Mean(model, arm.averaging, args.per_device_train_batch_size)
    trainer.add_callback(trainer.averaged)
    return trainer


@dataclass(frozen=True)
class Key:
    """Names one run."""

    size: str
    arm: str
    rate: float
    seed: int
    n: int = 8

    @property
    def name(self) -> str:
        return f"{self.size}_{self.arm}_{self.rate:g}_{self.seed}.json"


def arms_with(n: int) -> dict[str, Arm]:
    """Every arm, by name; `n` is that of the best stock arm, which some arms have."""
    return {**finals(n), **ablations(n), **others(n), **falls()}


def arm_of(key: Key) -> Arm:
    """The arm of a run."""
    return arms_with(key.n)[key.arm]


def small_engine() -> None:
    """Let TRL start vLLM in bfloat16, with a cache of 1 GB, and with CUDA graphs, but without compiling.

    TRL passes none of these settings on. With a share of the GPU's memory instead of a size, vLLM measures the memory that
    is free, and runs that start together disturb each other's measurements.
    """
    from trl.generation import vllm_generation

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    module: Any = vllm_generation
    module.LLM = partial(module.LLM, dtype="bfloat16", kv_cache_memory_bytes=1 << 30, compilation_config=graphs)


@contextmanager
def turn(place: Path | None) -> Iterator[None]:
    """Wait until no other process is in this context with the same file."""
    if place is None:
        yield
        return
    with place.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(key: Key, out: Path, tasks: Path, timed: bool = False, alone: Path | None = None) -> None:
    """Carry out one run and write its file. A timed run ends at the target, as those of the tuning do.

    Runs with the same file `alone` are prepared together, and train one after the other.
    """
    one_thread()
    size, reward = SIZES[key.size], Reward()
    if size.vllm:
        small_engine()
    task = task_of(key.size, tasks)
    watch = Watch(task, reward, size, timed or key.seed in size.tuning)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(arm_of(key), task, key.rate, key.seed, reward, watch, folder)
        watch.trainer = trainer
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if alone:
            print(f"{key.name}: prepared", flush=True)
        with turn(alone):
            watch.begin()
            trainer.train()
    found = {
        "key": asdict(key),
        "points": [asdict(point) for point in watch.points],
        "megabytes_before": before / 1024,
        "megabytes": most_megabytes(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {each.__name__: each.__version__ for each in (torch, transformers, trl)},
    }
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / key.name, json.dumps(found))
    last = watch.points[-1]
    print(f"{key.name}: {last.rollouts} rollouts, {last.cpu:.0f} s, {last.accuracy:.3f}", flush=True)


def most_megabytes() -> float:
    """The most memory that the process had: on the GPU, if it uses one."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ------------------------------------------------------------------------------------------------------- what was found


def to_target(points: Sequence[Point], target: float, accuracy: str = "accuracy") -> Cost:
    """What a run paid until it reached the target (`rollalloc.runs.cost`); its seconds are the processor's.

    `accuracy` is "accuracy" or "balanced", the held-out set on which the target is reached.
    """

    def column(name: str) -> tuple[Any, ...]:
        return tuple(getattr(point, name) for point in points)

    exact = (0.0,) * len(points)
    costs = [column(name) for name in ("rollouts", "tokens", "cpu", "steps")]
    cost = cost_to_target(
        Curve(costs[0], costs[1], costs[2], costs[3], column("steps"), column(accuracy), exact), target
    )
    assert cost is not None
    return cost


def wall_to_target(points: Sequence[Point], target: float) -> Cost:
    """As `to_target`, by the clock on the wall."""
    return to_target([replace(point, cpu=point.seconds) for point in points], target)


def fall_after(points: Sequence[Point], target: float) -> float | None:
    """How far the accuracy falls, at worst, below the mean of the first two evaluations at the target. None: not reached."""
    at = to_target(points, target).at
    if at is None:
        return None
    level = fmean(point.accuracy for point in points[at : at + 2])
    return level - min(point.accuracy for point in points[at:])


@dataclass(frozen=True)
class Run:
    """A run that is over."""

    key: Key
    points: list[Point]
    megabytes: float
    date: str
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    timed: list[Point] = field(default_factory=list[Point])  # of the run that was made again for its seconds, if any

    @property
    def clocked(self) -> list[Point]:
        """The points whose seconds count."""
        return self.timed or self.points

    @property
    def size(self) -> Size:
        return SIZES[self.key.size]

    @property
    def cost(self) -> Cost:
        return to_target(self.points, self.size.target)


def over(out: Path, size: str) -> list[Run]:
    """The runs of a size that are over."""
    found: list[Run] = []
    for place in sorted(out.glob(f"{size}_*.json")):
        read = json.loads(place.read_text())
        points = [Point(**point) for point in read["points"]]
        timed = timed_points(out / "seconds" / place.name, points, SIZES[size].device == "cpu")
        found.append(Run(Key(**read["key"]), points, read["megabytes"], read["date"], read["versions"], timed))
    return found


def timed_points(place: Path, points: Sequence[Point], equal: bool) -> list[Point]:
    """The points of a run that was made again for its seconds; none if it was not.

    Raises:
        SystemExit: its training must be equal to the first run's and is not.
    """
    if not place.exists():
        return []
    timed = [Point(**point) for point in json.loads(place.read_text())["points"]]
    for first, again in zip(points, timed, strict=False):
        same = (first.rollouts, first.tokens, first.accuracy) == (again.rollouts, again.tokens, again.accuracy)
        if equal and not same:
            raise SystemExit(f"{place.name} did not train as before: {first} became {again}")
    return timed


def score_of(runs: Sequence[Run], size: str) -> tuple[float, float]:
    """What tuning minimises: rollouts to the target in the mean, and less the mean accuracy for ties."""
    most = 3 * SIZES[size].least
    costs = [most if one.cost.censored else one.cost.paid["rollouts"] for one in runs]
    return fmean(costs), -fmean(point.accuracy for one in runs for point in one.points)


def rates_of(out: Path, size: str, arm: str, seeds: Sequence[int]) -> dict[float, tuple[float, float]]:
    """The score of each learning rate of an arm, of those that all these seeds tried."""
    by_rate: dict[float, list[Run]] = {}
    for one in over(out, size):
        if one.key.arm == arm and one.key.seed in seeds:
            by_rate.setdefault(one.key.rate, []).append(one)
    return {rate: score_of(runs, size) for rate, runs in sorted(by_rate.items()) if len(runs) == len(seeds)}


def two_best(out: Path, size: str, arm: str) -> list[float]:
    """The two rates of an arm that were best on the first tuning seed. Raises ValueError if a run is missing."""
    scores = rates_of(out, size, arm, SIZES[size].tuning[:1])
    if len(scores) < len(SIZES[size].rates):
        raise ValueError(f"{out} lacks runs of {arm} at {size}; first: against_trl.py tune {size} {out}")
    return sorted(scores, key=lambda rate: scores[rate])[:2]


def tuned(out: Path, size: str) -> dict[str, float]:
    """The best rate of each tuned arm. Raises ValueError if a run of the tuning is missing."""
    best: dict[str, float] = dict(SIZES[size].chosen)
    for arm in () if best else SIZES[size].arms:
        scores = rates_of(out, size, arm, SIZES[size].tuning)
        if not scores.keys() >= set(two_best(out, size, arm)):
            raise ValueError(f"{out} lacks runs of {arm} at {size}; first: against_trl.py tune {size} {out}")
        best[arm] = min(scores, key=lambda rate: scores[rate])
    return best


def best_stock(out: Path, size: str) -> tuple[str, int]:
    """The name and the n of the stock arm that tuned best, of those that were tuned."""
    best = tuned(out, size)
    stocks = [arm for arm in best if arm.startswith("stock")]
    name = stocks[0]
    if len(stocks) > 1:
        scores = {arm: rates_of(out, size, arm, SIZES[size].tuning)[best[arm]] for arm in stocks}
        name = min(stocks, key=lambda arm: scores[arm])
    return name, int(name.removeprefix("stock-"))


# ------------------------------------------------------------------------------------------------------------- many runs


def tuning_keys(out: Path, size: str) -> Iterator[Key]:
    """The runs of the tuning, in order; those of the second seed follow from the first seed's."""
    one, arms = SIZES[size], SIZES[size].arms
    for seed in one.tuning[:1]:
        for rate in one.rates:
            for arm in arms:
                yield Key(size, arm, rate, seed)
    for seed in one.tuning[1:]:
        for arm in arms:
            for rate in two_best(out, size, arm):
                yield Key(size, arm, rate, seed)


def final_keys(out: Path, size: str) -> Iterator[Key]:
    """The final runs, in order."""
    best, (name, n) = tuned(out, size), best_stock(out, size)
    for seed in SIZES[size].final:
        if SIZES[size].balanced is not None:
            arms = {name: best[name], "line": best["line"], "foresight": best["foresight"]}
            arms["foresight-again"] = best["foresight"]
        else:
            others = (arm for arm in best if not arm.startswith("stock"))
            arms = {arm: best.get(arm, best[name]) for arm in (name, *others, "line-only")}
        for arm, rate in arms.items():
            yield Key(size, arm, rate, seed, n)


def more_keys(out: Path, size: str, arms: Callable[[int], Mapping[str, Arm]]) -> Iterator[Key]:
    """The runs of the ablations, or of the other recipes."""
    _, n = best_stock(out, size)
    for seed in SIZES[size].final[:3]:
        for arm in arms(n):
            for rate in RATES_OF_ABLATIONS:
                yield Key(size, arm, rate, seed, n)


def fall_keys(size: str) -> Iterator[Key]:
    """Runs of foresight that show whether it falls."""
    for seed in SIZES[size].final[:5]:
        for arm in ("foresight", *falls()):
            yield Key(size, arm, RATES_OF_ABLATIONS[1], seed)


def chosen_keys(command: str, out: Path, size: str, arms: str) -> list[Key]:
    """The runs of a command, of these arms only; `arms` is a list with commas, or empty for all.

    Raises:
        ValueError: runs that must come before are missing, or the command has no such arm.
    """
    keys = {
        "tune": lambda: tuning_keys(out, size),
        "final": lambda: final_keys(out, size),
        "seconds": lambda: final_keys(out, size),
        "ablate": lambda: more_keys(out, size, ablations),
        "falls": lambda: fall_keys(size),
        "others": lambda: more_keys(out, size, others),
    }[command]()
    made = list(keys)
    there, wanted = dict.fromkeys(key.arm for key in made), arms.split(",") if arms else []
    if unknown := [arm for arm in wanted if arm not in there]:
        raise ValueError(f"{command} at {size} has no arm {unknown[0]!r}; it has {', '.join(there)}")
    return [key for key in made if not wanted or key.arm in wanted]


def carry_out(keys: Iterable[Key], out: Path, tasks: Path, minutes: float, timed: bool = False) -> bool:
    """Carry out runs that are missing, each in a process of its own, and begin none after so many minutes.

    Several of these may work on the same folder: a run that one of them has claimed is not begun by another. A claim that a
    killed one left is to be removed by hand. Returns whether runs are missing that nobody has claimed.
    """
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    keys = list(keys)
    for size in {key.size for key in keys}:
        _in_process(files_of, size, tasks)  # a process that has used a GPU cannot be forked
    for key in keys:
        claim = out / f"{key.name}.claim"
        if (out / key.name).exists() or claim.exists():
            continue
        if time.monotonic() - began > 60 * minutes:
            return True
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            _in_process(run, key, out, tasks, timed)
        finally:
            claim.unlink()
    return False


def _in_process(call: Callable[..., Any], *args: Any) -> None:
    """Call a function in a process of its own.

    Raises:
        SystemExit: it failed.
    """
    child = get_context("fork").Process(target=call, args=args)
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"{call.__name__}{args} failed")


# -------------------------------------------------------------------------------------------------------------- report


def measures(one: Run, *, beside: Run | None = None) -> dict[str, tuple[float, bool]]:
    """What a run paid until the target, and whether it is more than that because the target was not reached.

    The seconds are those of the run that was made again for them, if there is one; `beside` another run, only if that has
    one as well, so that both were taken under one load.
    """
    target, clocked = one.size.target, one.clocked if beside is None or beside.timed else one.points
    cost, cpu, wall = one.cost, to_target(clocked, target), wall_to_target(clocked, target)
    paid = {name: cost.paid[name] for name in ("rollouts", "tokens")}
    paid |= {"cpu seconds": cpu.paid["seconds"], "wall seconds": wall.paid["seconds"]}
    found = {name: (value, cost.censored) for name, value in paid.items()}
    if one.size.balanced is not None:
        other = to_target(one.points, one.size.balanced, "balanced")
        costs = {"rollouts": "rollouts", "tokens": "tokens", "seconds": "cpu seconds"}
        found |= {f"{shown}, balanced": (other.paid[name], other.censored) for name, shown in costs.items()}
    return found


def seconds_per_step(points: Sequence[Point]) -> float:
    """The processor's seconds of a step, from the first evaluation after the start, by which the run is prepared."""
    first, last = points[1], points[-1]
    return (last.cpu - first.cpu) / (last.steps - first.steps)


def ratio(over_them: Sequence[Run], ours: Sequence[Run], name: str) -> tuple[Interval, bool] | None:
    """The ratio of costs, paired by seed, and whether it is a lower bound because a run of theirs was censored.

    None if one of ours was censored, or without pairs.
    """
    theirs = {one.key.seed: one for one in over_them}
    both = [(theirs[one.key.seed], one) for one in ours if one.key.seed in theirs]
    pairs = [(measures(their, beside=one)[name], measures(one, beside=their)[name]) for their, one in both]
    if not pairs or any(censored for _, (_, censored) in pairs):
        return None
    return interval([a / b for (a, _), (b, _) in pairs]), any(censored for (_, censored), _ in pairs)


def summary_of(out: Path, size: str) -> dict[str, Any]:
    """All figures of a size: costs of each arm, ratios to the best stock arm, curves. Of final runs, if there are any."""
    (name, n), best = best_stock(out, size), tuned(out, size)
    everyone = over(out, size)
    if not everyone:
        raise ValueError(f"{out} has no runs at {size}")
    runs = by_arm(final_of(everyone, size) or everyone)  # a size may have runs of the tuning only
    theirs, about = runs.get((name, best[name]), []), arms_with(n)
    arms = [row_of(arm, about[arm].about, rate, found, theirs) for (arm, rate), found in sorted(runs.items())]
    tuning = {
        arm: {rate: score[0] for rate, score in rates_of(out, size, arm, SIZES[size].tuning[:1]).items()}
        for arm in SIZES[size].arms
    }
    dates, versions = sorted({one.date for one in everyone}), everyone[0].versions
    return {"best_stock": name, "tuning": tuning, "arms": arms, "dates": dates, "versions": dict(versions)}


def final_of(runs: Iterable[Run], size: str) -> list[Run]:
    """The runs on the final seeds."""
    return [one for one in runs if one.key.seed in SIZES[size].final]


def by_arm(runs: Iterable[Run]) -> dict[tuple[str, float], list[Run]]:
    """Runs by arm and learning rate."""
    found: dict[tuple[str, float], list[Run]] = {}
    for one in runs:
        found.setdefault((one.key.arm, one.key.rate), []).append(one)
    return found


def row_of(arm: str, about: str, rate: float, found: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    """The figures of one arm at one rate; `theirs` are the runs of the best stock arm."""
    return {
        "arm": arm,
        "about": about,
        "rate": rate,
        "seeds": [one.key.seed for one in found],
        "costs": {
            measure: [[round(value, 1), censored] for value, censored in (measures(one)[measure] for one in found)]
            for measure in measures(found[0])
        },
        "over": {measure: _shown(ratio(theirs, found, measure)) for measure in measures(found[0])},
        "fall": [_rounded(fall_after(one.points, one.size.target)) for one in found],
        "end": [round(one.points[-1].accuracy, 3) for one in found],
        "megabytes": round(max(one.megabytes for one in found)),
        "seconds_per_step": round(fmean(seconds_per_step(one.clocked) for one in found), 4),
        "curve": curve(found),
    }


def merged(before: Mapping[str, Any], out: Path, size: str) -> dict[str, Any]:
    """An earlier summary, with rows of arms whose final runs were made later, beside new runs of the best stock arm.

    The earlier rows stay as they are. The later rows, that of the stock arm with "-again" in its name, have their own
    dates and are compared with each other alone, because another processor rounds in another way.
    """
    runs = by_arm(final_of(over(out, size), size))
    theirs = [one for (arm, _), found in runs.items() if arm == before["best_stock"] for one in found]
    new: list[dict[str, Any]] = []
    for (arm, rate), found in runs.items():
        about = arm_of(found[0].key).about
        if arm == before["best_stock"]:
            arm, about = f"{arm}-again", f"{about}, made again"
        new.append(row_of(arm, about, rate, found, theirs) | {"dates": sorted({one.date for one in found})})
    replaced = {(arm["arm"], arm["rate"]) for arm in new}
    kept = [arm for arm in before["arms"] if (arm["arm"], arm["rate"]) not in replaced]
    return {**before, "arms": sorted(kept + new, key=lambda arm: (arm["arm"], arm["rate"]))}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _shown(found: tuple[Interval, bool] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    one, bound = found
    return {"point": one.point, "low": one.low, "high": one.high, "values": one.values, "lower_bound": bound}


def curve(found: Sequence[Run]) -> dict[str, list[float]]:
    """Mean, least and largest accuracy over seeds, as far as all runs went."""
    points = min(len(one.points) for one in found)
    accuracy_SP = np.array([[point.accuracy for point in one.points[:points]] for one in found])
    at_P = np.array([[point.rollouts for point in one.points[:points]] for one in found]).mean(axis=0)
    columns = {"rollouts": at_P, "mean": accuracy_SP.mean(0), "low": accuracy_SP.min(0), "high": accuracy_SP.max(0)}
    return {name: [round(float(value), 4) for value in values] for name, values in columns.items()}


def table_of(found: Mapping[str, Any], target: float) -> list[str]:
    """The table of a size, one line for each arm."""
    measured = ("rollouts", "tokens", "cpu seconds", "wall seconds")
    heading = (
        "rate",
        "seeds",
        *measured,
        "ms a step",
        "TRL's rollouts over these",
        "cpu seconds",
        "deepest fall",
        "MB",
    )
    lines = [f"| to {target} | {' | '.join(heading)} |", "|---" * (len(heading) + 1) + "|"]
    for arm in found["arms"]:
        costs = [_cost(arm["costs"][name]) for name in measured]
        ratios = [_ratio(arm["over"][name]) for name in ("rollouts", "cpu seconds")]
        falls = [each for each in arm["fall"] if each is not None]
        cells = [
            arm["about"],
            f"{arm['rate']:g}",
            str(len(arm["seeds"])),
            *costs,
            f"{1000 * arm['seconds_per_step']:.0f}",
            *ratios,
            f"{max(falls):.3f}" if falls else "–",
            str(arm["megabytes"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cost(costs: Sequence[tuple[float, bool]]) -> str:
    """The interquartile mean with its interval; the number of runs that reached the target if some did not."""
    reached = [value for value, censored in costs if not censored]
    if len(reached) < len(costs):
        return f"{len(reached)} of {len(costs)} reach it"
    return _interval(interval(reached), ",.0f")


def _ratio(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "–"
    # Where a run missed the target, its ratio is a bound, and of bounds there is no interval.
    return f"> {one['point']:.2f}" if one["lower_bound"] else _interval(interval(one["values"]), ".2f")


def _interval(one: Interval, form: str) -> str:
    if one.low is None or one.high is None:
        return f"{one.point:{form}}"
    return f"{one.point:{form}} [{one.low:{form}}–{one.high:{form}}]"


def pairs(out: Path, size: str) -> list[str]:
    """A table of a twin's final runs: what each arm paid to both targets, and what others paid over it.

    Raises:
        ValueError: the size is no twin, or none of its final runs is over.
    """
    runs = by_arm(final_of(over(out, size), size))
    if SIZES[size].balanced is None or not runs:
        raise ValueError(
            f"{out} has no final run of a U-shaped pool at {size}; first: against_trl.py final {size} {out}"
        )
    names = [
        "rollouts",
        "tokens",
        "cpu seconds",
        *(f"{name}, balanced" for name in ("rollouts", "tokens", "cpu seconds")),
    ]
    one = SIZES[size]
    lines = [f"| {size}: to {one.target}, and balanced to {one.balanced} | seeds | {' | '.join(names)} |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for (arm, rate), found in runs.items():
        costs = [_cost([measures(each)[name] for each in found]) for name in names]
        lines.append(f"| {arm} at {rate:g} | {len(found)} | {' | '.join(costs)} |")
    for (arm, rate), found in runs.items():
        for (dear, dear_rate), theirs in runs.items():
            if (dear, dear_rate) == (arm, rate):
                continue
            shown = [_ratio(_shown(ratio(theirs, found, name))) for name in names]
            seeds = len({each.key.seed for each in found} & {each.key.seed for each in theirs})
            lines.append(f"| {dear} at {dear_rate:g} over {arm} at {rate:g} | {seeds} | {' | '.join(shown)} |")
    return lines


# The rows of the picture, from above, in words. Hues are Okabe and Ito's, which colour-blind readers can tell apart.
DRAWN = {
    "stock": ("TRL's GRPOTrainer,\n64 rollouts a step", "#d55e00"),
    "line-only": ("REINFORCE, 32 prompts a step,\nnothing else changed", "#0072b2"),
    "line": ("REINFORCE, 32 prompts a step,\nweights averaged, β₂ 0.95", "#0072b2"),
    "line-64": ("REINFORCE, 64 prompts a step,\nweights averaged, β₂ 0.95", "#0072b2"),
    "foresight": ("foresight, 32 prompts a step,\nweights averaged, β₂ 0.95", "#009e73"),
}


def draw(found: Mapping[str, Mapping[str, Any]], to: Path) -> None:
    """Rollouts to the target: interquartile means with 95% intervals, each seed in grey; a panel for each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {size: rows for size, one in found.items() if not SIZES[size].vllm and (rows := drawn(one))}
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(7, 1 + 0.5 * sum(map(len, shown.values()))), squeeze=False, layout="constrained",
        height_ratios=[len(rows) for rows in shown.values()],
    )  # fmt: skip
    for axis, (size, rows) in zip(axes[:, 0], shown.items(), strict=True):
        for at, (label, colour, arm) in enumerate(rows):
            cost = interval([value for value, _ in arm["costs"]["rollouts"]])
            axis.plot(cost.values, [at] * len(cost.values), ".", color="0.6", markersize=5)
            if cost.low is not None and cost.high is not None:
                axis.plot((cost.low, cost.high), (at, at), color=colour, linewidth=2.5)
            axis.plot(cost.point, at, "o", color=colour, markersize=7)
            times = "" if label == rows[0][0] else f", {_ratio(arm['over']['rollouts'])} times fewer"
            said, beside = f"{cost.point:,.0f}{times}", (max(cost.values), at)
            axis.annotate(said, beside, xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)
        axis.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlim(0, 1.15 * axis.get_xlim()[1])
        seeds = max(len(arm["seeds"]) for _, _, arm in rows)
        axis.set_title(
            f"{SIZES[size].about}, {seeds} seeds: to accuracy {SIZES[size].target:.2f}", fontsize=10, loc="left"
        )
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.2)
    axes[-1, 0].set_xlabel("rollouts until the held-out accuracy is reached")
    figure.savefig(to, dpi=150)
    pyplot.close(figure)


def drawn(one: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """The label, hue and figures of each arm of the picture of which several seeds ran and all reached the target."""
    names = {one["best_stock"] if name == "stock" else name: row for name, row in DRAWN.items()}
    arms = {arm["arm"]: arm for arm in one["arms"]}
    kept = {name: arms[name]["costs"]["rollouts"] for name in names if name in arms}
    reached = [name for name, costs in kept.items() if len(costs) > 1 and not any(censored for _, censored in costs)]
    return [(*names[name], arms[name]) for name in reached]


def report(out: Path, docs: Path) -> None:
    """Write the summary, the tables and the figure. If OUT lacks the tuning of a size, the summary in DOCS is completed."""
    summary = docs / "against_trl.json"
    before = json.loads(summary.read_text()) if summary.exists() else {}
    found: dict[str, Any] = {}
    for size in SIZES:
        try:
            found[size] = summary_of(out, size)
        except ValueError as error:
            print(error)
            if size in before:
                found[size] = merged(before[size], out, size)
    write_text(summary, json.dumps(found, indent=1) + "\n")
    for size, one in found.items():
        print(f"\n{size}, {', '.join(one['dates'])}, {one['versions']}\n")
        print(*table_of(one, SIZES[size].target), sep="\n")
    if any(drawn(one) for one in found.values()):
        draw(found, docs / "against_trl.png")


def main() -> None:
    # With it, asking whether there is a GPU does not use CUDA, so that this process can still be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, more in (
        ("tune", ("size",)),
        ("final", ("size",)),
        ("seconds", ("size",)),
        ("ablate", ("size",)),
        ("others", ("size",)),
        ("falls", ("size",)),
        ("pairs", ("size",)),
        ("run", ("size", "arm", "rate", "seed")),
    ):
        command = commands.add_parser(name)
        for each in more:
            allowed = {"size": tuple(SIZES), "arm": tuple(arms_with(8))}.get(each)
            command.add_argument(each, type={"rate": float, "seed": int}.get(each, str), choices=allowed)
        command.add_argument("out", type=Path)
        command.add_argument(
            "--tasks", type=Path, default=Path("runs/tasks"), help="where the task and models are kept"
        )
        command.add_argument("--minutes", type=float, default=600.0, help="begin no run after so many")
        command.add_argument("--arms", default="", help="of these arms only, by comma")
        command.add_argument("--n", type=int, default=8, help="of the best stock arm; for `run`")
        command.add_argument("--timed", action="store_true", help="end at the target; for `run`")
        command.add_argument("--alone", type=Path, help="file; runs that name it train one at a time; for `run`")
    command = commands.add_parser("report")
    command.add_argument("out", type=Path)
    command.add_argument("docs", type=Path)
    given = parser.parse_args()
    disable_progress_bar()
    if given.command == "report":
        report(given.out, given.docs)
        return
    if given.command == "pairs":
        try:
            print(*pairs(given.out, given.size), sep="\n")
        except ValueError as error:
            parser.error(str(error))
        return
    if given.command == "run":
        key = Key(given.size, given.arm, given.rate, given.seed, given.n)
        run(key, given.out, given.tasks, timed=given.timed, alone=given.alone)
        return
    try:
        chosen = chosen_keys(given.command, given.out, given.size, given.arms)
    except ValueError as error:
        parser.error(str(error))
    timed = given.command == "seconds"
    out = given.out / "seconds" if timed else given.out
    raise SystemExit(MORE if carry_out(chosen, out, given.tasks, given.minutes, timed) else 0)


if __name__ == "__main__":
    main()
