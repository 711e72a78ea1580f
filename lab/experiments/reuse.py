"""Does replay with a gate save rollouts on every task, where replay without one loses on some?

    python lab/experiments/reuse.py tune OUT SIZE ARMS SEED...    # half of each budget; resumable
    python lab/experiments/reuse.py rank OUT SIZE ARMS SEED...    # mean accuracies of the tuning runs, once all are over
    python lab/experiments/reuse.py run OUT SIZE ARMS [SEED...]   # the final seeds outside, tasks inside; resumable
    python lab/experiments/reuse.py table OUT SIZE ARMS           # of those that are over, the first arm over each

SIZE is 0.15m, 8m or 135m, ARMS such as `plain1-6e-4,gated3-3e-4` (kind, optimizer steps a batch, rate).

The plan, set before any run of it. Arms, all with the defaults of `rollalloc train` (32 x 1, 6e-4, averaging 640,
beta2 .95):

    plain     reinforce
    replay    reinforce, 32 rows replayed
    gated     the same behind a gate; its bound is fixed on other seeds (8900) before the first of its runs

Each of the eight tasks below has a budget and a target, which are those of the leaderboard but for spell_backward: no
method comes near its target, so it gets the accuracy .45. A run goes on to its budget, so that its falls are seen.
Seeds 9741 to 9745, which no other experiment used, as many as the time allows, whole seeds first.

Changed on 2026-11-29 at 01:40, after the first seed of `plain` and `replay` and the look at seed 8900 below, before any
run of the two arms that are added, for want of time (two slots of a busy machine):

    plain3    reinforce, three optimizer steps, added at 02:08: does the gain come from the steps? No replay; seed 9741
    gated3    reinforce, 64 rows replayed behind a gate with the bound .1 and a pause of 4 batches, three optimizer steps
    replay3   the same without a gate; where the gate leaves nothing out it is the same run, so it is made only elsewhere

- Seed 8900: with one step a batch, replay gains little by today's defaults (the replayed rows only share the step); with
  two, skills/late reaches .85 after 2,900 rollouts, two steps without replay 4,800; with 64 rows and three steps 2,200.
  On walks/mixed two steps without replay reach .70 after 4,800, with it 5,700; 64 rows, three steps and the gate 4,300.
  The share of moved tokens is .003 to .04 on skills/late and .14 to .34 on walks/mixed, in every part of the runs; the
  ratio of the head's gradient norm to that on new rows is .4 to 2.3 and .9 to 2.7, which does not tell them apart. So the
  gate reads the share, and its bound lies between.
- Seeds 9741 to 9743, rg tasks last. `plain` ends at the target; its runs of seed 9741 had gone on. The others have three
  quarters of the budget, so that falls are seen. `replay` and `gated` get no further runs.

Cut at 02:08 for want of time: seed 9743, and of the rg tasks the second seed and plain's run of spell_backward.

Reported: rollouts, tokens and processor seconds to the target, `plain` over the others, paired by seed; a run that did
not reach it counts as its budget, so that its ratio is a bound, and none if neither reached it. The deepest fall is the
least accuracy after the target was reached (two evaluations in a row), below the mean of these two.

Bars: `plain` over `gated` in rollouts at least 1.4 on five of eight tasks and below .95 on none; no fall above .04.

Second round, 2026-11-29 at 05:30: both arms tuned alike, then five seeds. Written when the 24 runs of the first tuning
seed on the two tasks on which the first round lost were over and the first of the other six was under way, before any
run of a final seed. What they show: with three steps the rate of 6e-4 does the harm, with replay and without it
(spell_backward, mean accuracy up to 4,000 rollouts: three steps .303, and .413 with replay; at 3e-4 .397 and .447; one
step .369, at 3e-4 .422). An arm is now named by its kind, its optimizer steps a batch and its rate: `plain1-6e-4` is the
former `plain`, `gated3-6e-4` the former `gated3`.

- Tuning: {plain, gated} x {1, 2, 3} steps x {3e-4, 6e-4}; for the number of steps that is best, one rate more on the
  better one's side (1.5e-4 or 1.2e-3). `gated` replays 32 rows for each step beyond the first, and 32 with one step; its
  bound stays .1, its pause 4. Half of the budget, all eight tasks, seed 8900; the best two of each kind, then, on 8901 and
  8902. What is compared is the mean accuracy of the evaluations after the first, mean over tasks, then seeds: one setting
  of each kind for all tasks.
- Final: the best `plain` and the best `gated`, and `plain1-6e-4`, which is the trainer's default, if it is not the best
  plain; seeds 9741 to 9745. An accuracy is held from the first of two evaluations in a row, as above.
- Bars as above, of the best `gated` against the best `plain`: the mean ratio of rollouts and its interval over five seeds.

Added at 05:46, when the 96 runs of seed 8900 were over, the third rates were under way and no other seed had begun:

- Plain also gets 1.2e-3 with one step, outside the rule.
- Second attempt at the harm on spell_backward and number_filtering_misled: it is that of the steps, so the rate falls with
  their number. A rate over the square root of the steps, 6e-4 / sqrt(3) = 3.5e-4, keeps what a batch moves if the steps'
  directions are independent; on the grid this is `gated3-3e-4`. So if `gated3-6e-4` is the best `gated`, both are run on
  the final seeds, and `gated3-3e-4` is the second attempt, with the same bars. There is no third.
- A final run of `plain` ends at the target, or at the budget; one of `gated` at three quarters of the budget, so that falls
  are seen, and on the last two tasks at the whole budget. Runs of the first round that are the same to the last option are
  taken over (skills/late, gated3, seed 9741 was made anew: all its metrics but the seconds are the same to the last digit);
  as they were made on a busier machine, CPU seconds are reported from the seeds that were made today.
- 8M: `plain` with one step at 1.5e-4 and 3e-4 and three at 7.5e-5 and 1.5e-4, `gated` with three steps at 7.5e-5, 1.5e-4 and
  3e-4, half of the budget of skills/late, seed 8900; then the best of each kind on the final seeds, skills/late first,
  as many as the time allows.

Tuned, written at 06:10, when the final runs of the first seed were under way and before a look at them. Mean accuracy over
the tasks, seeds 8900, 8901, 8902: `plain3-3e-4` .6081 .6168 .6044, `plain2-3e-4` .5971 .5994 .5917; `gated3-3e-4` .6458
.6529 .6504, `gated3-6e-4` .6535 .6505 .6363. So the lower rate is the tuned one, `gated3-6e-4` gets no more final runs than
it has, and what was to be the second attempt is now the first arm; the second is open.

Changed at 06:14, after a look at seed 9743: on walks/mixed `gated3-3e-4` had not come to .70 within three quarters of the
budget, so that its ratio would have been a bound that flatters it. It goes on to the whole budget there, on every seed.

Larger models, 2026-11-29 at 09:24, in place of what was planned for 8M. Of 8M, five runs of skills/late were over on seed
8900, and no other:

- 8M: `plain1` and `plain3` at 1.5e-4 and 3e-4, `gated3` at 1.5e-4 and 3e-4, half of the budget of both tasks, seed 8900, one
  setting of each kind for both; if the best rate of a kind is 3e-4, 6e-4 too. Then the best plain and the best gated on
  skills/late and skills/balanced, seeds 9741 to 9745, as many as the time allows, seeds outside.
- 135M on one thread of a CPU: SmolLM2 on `rollalloc data chat filter`, answers of 24 tokens, to a held-out accuracy of .28
  (it begins near .12 and ends near .32), 640 rollouts, an evaluation every 64. `plain1` at 2e-5 and 4e-5, `gated3` at 1e-5
  and 2e-5 on seed 8900; the best of each on seeds 9741 to 9743, as many as the time allows. Three seeds at most, and two
  rates of each.
- Bars as above, and at 135M: CPU seconds no worse than 1.0.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from rollalloc.compare.summary import Bound, in_words, interval
from rollalloc.runs.cost import Curve, cost_to_target, curve_of, whole_curve_of
from rollalloc.runs.reader import newest_line, read_metrics
from rollalloc.tasks.presets import task_files
from rollalloc_lab.tasks.skills_8m import model_8m

SEEDS = (9741, 9742, 9743, 9744, 9745)


def options(arm: str) -> list[str]:
    """The options of an arm such as `gated3-6e-4`: its kind, its optimizer steps a batch and its rate.

    Raises:
        ArgumentTypeError: the name is not of this form.
    """
    named = re.fullmatch(r"(plain|replay|gated)([1-9])-(\d+(?:\.\d+)?e-\d+)", arm)
    if named is None:
        raise argparse.ArgumentTypeError(
            f"expected plain, replay or gated, the steps of a batch and the rate, such as gated3-3e-4, got {arm!r}"
        )
    kind, steps, rate = named[1], int(named[2]), named[3]
    replayed = ["--set", f"replay={32 * max(1, steps - 1)}"]
    of_kind = {
        "plain": [],
        "replay": replayed,
        "gated": [*replayed, "--set", "replay_moved=0.1", "--set", "replay_pause=4"],
    }
    return ["--learning-rate", rate, "--optimizer-steps", str(steps), *of_kind[kind]]


def arms_of(names: str) -> list[str]:
    """The arms in a list with commas. Raises ArgumentTypeError, as `options` does."""
    arms = names.split(",")
    for arm in arms:
        options(arm)
    return arms


@dataclass(frozen=True)
class Task:
    """A built-in task, with the accuracy to reach, and in rollouts the budget, the end with replay, and the grid."""

    name: str
    target: float
    budget: int
    replaying: int
    every: int


SMALL = (
    Task("skills/late", 0.85, 8_000, 6_000, 500),
    Task("walks/mixed", 0.70, 7_000, 7_000, 500),
    Task("skills/balanced", 0.80, 4_000, 3_000, 250),
    Task("skills/mixed", 0.80, 7_000, 5_250, 500),
    Task("skills/graded", 0.93, 4_000, 3_000, 250),
    Task("rg/gcd", 0.55, 3_000, 2_250, 250),
    Task("rg/spell_backward", 0.45, 8_000, 8_000, 500),
    Task("rg/number_filtering_misled", 0.58, 8_000, 8_000, 500),
)
EIGHT_M = (Task("skills/late", 0.85, 6_000, 4_500, 500), Task("skills/balanced", 0.80, 3_000, 2_250, 250))
SMOLLM2 = (Task("chat/filter", 0.28, 640, 640, 64),)
SIZES: Mapping[str, tuple[Task, ...]] = {"0.15m": SMALL, "8m": EIGHT_M, "135m": SMOLLM2}


def place_of(out: Path, task: Task, arm: str, seed: int) -> Path:
    """The folder of a run."""
    return out / task.name.replace("/", "-") / f"{arm}-{seed}"


def is_over(place: Path) -> bool:
    """Whether the folder has a finished run."""
    last = newest_line(place)
    return last is not None and last["kind"] == "end"


def metrics_in(place: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return read_metrics(place / "metrics.jsonl")


def given(task: Task, tasks: Path, size: str) -> list[str]:
    """The options that name a task; at 8M, those of its files with the larger model.

    At 135M, `rollalloc model smollm2` and `rollalloc data chat filter` have made the files, in folders of these names.
    """
    if size == "0.15m":
        return ["--task", task.name, "--tasks", str(tasks)]
    if size == "135m":
        chat, reward = tasks / task.name, "rollalloc.tasks.chat:compute_score"
        data = [
            "--prompts",
            str(chat / "train.parquet"),
            "--heldout",
            str(chat / "heldout.parquet"),
            "--reward",
            reward,
        ]
        return ["--model", str(tasks / "smollm2"), *data, "--max-new-tokens", "24", "--device", "cpu"]
    files, model = task_files(task.name, tasks), model_8m(tasks)
    data = ["--prompts", str(files.train), "--heldout", str(files.heldout), "--reward", files.reward, "--single-answer"]
    return ["--model", str(model), *data, "--max-new-tokens", str(files.max_new_tokens), "--reward-workers", "0"]


def grid_of(rollouts: int, every: int, target: float) -> list[str]:
    """The options of a run's end and evaluations."""
    return ["--max-rollouts", str(rollouts), "--eval-every", str(every), "--target", str(target)]


def run(out: Path, size: str, arms: list[str], seeds: Iterable[int], *, tuning: bool = False) -> None:
    """Make the runs that are missing, in this process; tuning's to half of the budget. Seconds are the processor's."""
    from rollalloc.cli.app import app
    from rollalloc.train import train

    train.time = SimpleNamespace(perf_counter=time.process_time)  # pyright: ignore[reportAttributeAccessIssue]
    for seed in seeds:
        for task in SIZES[size]:
            for arm in arms:
                place = place_of(out, task, arm, seed)
                if is_over(place):
                    continue
                if tuning:
                    grid = grid_of(task.budget // (1 if size == "135m" else 2), min(task.every, 250), 1)
                elif arm.startswith("plain"):
                    grid = grid_of(task.budget, task.every, task.target)
                else:
                    grid = grid_of(task.replaying, task.every, 1)
                kept = ["--out", str(place), "--seed", str(seed)]
                resumed = ["--resume"] if (place / "checkpoints").is_dir() else ["--overwrite"]
                asked = [
                    *given(task, out / "tasks", size),
                    "--recipe",
                    "reinforce",
                    *options(arm),
                    *grid,
                    *kept,
                    *resumed,
                ]
                app(["train", *asked], standalone_mode=False)
                if not is_over(place):  # the run was asked to stop, and so is the queue
                    sys.exit(f"{place} was stopped; the same command resumes it")


# ------------------------------------------------------------------------------------------------------------ the tables


def rank(out: Path, size: str, arms: list[str], seeds: Sequence[int]) -> None:
    """Print the mean accuracy of the evaluations after the first, by task and arm, and its mean over tasks.

    Raises:
        SystemExit: a run is not over; its first evaluations alone would count for less than the others' all.
    """
    places = [place_of(out, task, arm, seed) for arm in arms for task in SIZES[size] for seed in seeds]
    if missing := [str(place) for place in places if not is_over(place)]:
        raise SystemExit(f"{len(missing)} of {len(places)} runs are not over, such as {missing[0]}; first: tune")
    print("| arm |", " | ".join(task.name for task in SIZES[size]), "| mean |")
    print("|---" * (len(SIZES[size]) + 2) + "|")
    for arm in arms:
        means = [
            fmean(fmean(curve_of(metrics_in(place_of(out, task, arm, seed))).accuracy[1:]) for seed in seeds)
            for task in SIZES[size]
        ]
        print(f"| {arm} |", " | ".join(f"{mean:.3f}" for mean in means), f"| {fmean(means):.4f} |")


def fall(curve: Curve, at: int) -> float:
    """How far the accuracy fell after it had reached the target at an index of the curve."""
    level = fmean(curve.accuracy[at : at + 2])
    return max(0.0, level - min(curve.accuracy[at + 1 :], default=level))


def bound_of(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Bound | None:
    """On which side of the mean of the pairs' ratios the truth is, as a run that missed the target needs more than it paid.

    None: on neither, because there is no pair, or each arm missed the target on a seed of its own.
    """
    missed = {(a["reached"] < 1, b["reached"] < 1) for a, b in pairs} - {(False, False)}
    if len(missed) > 1 or not pairs:
        return None
    return "" if not missed else ">" if (True, False) in missed else "<"


def rows(out: Path, task: Task, arms: list[str]) -> Iterator[str]:
    """One line of the table for each arm."""
    over = [seed for seed in SEEDS if all(is_over(place_of(out, task, arm, seed)) for arm in arms)]
    paid: dict[str, list[Mapping[str, float]]] = {arm: [] for arm in arms}
    for arm in arms:
        reached, falls, ends = 0, [0.0], list[float]()
        for seed in over:
            metrics = metrics_in(place_of(out, task, arm, seed))
            curve, cost = curve_of(metrics), cost_to_target(curve_of(metrics), task.target)
            assert cost is not None
            paid[arm].append(cost.paid | {"reached": float(not cost.censored)})
            ends.append(whole_curve_of(metrics).accuracy[-1])
            if cost.at is not None:
                reached += 1
                falls.append(fall(curve, cost.at))
        if over:
            # A run that did not reach the target has paid more than it is counted with.
            pairs = [(a, b) for a, b in zip(paid[arms[0]], paid[arm], strict=True) if b["reached"] or a["reached"]]
            bound = bound_of(pairs)
            ratios = [
                None if bound is None else interval([a[name] / b[name] for a, b in pairs], bound)
                for name in ("rollouts", "tokens", "seconds")
            ]
            shown = " | ".join(in_words(ratio, ".2f") for ratio in ratios)
            each = " ".join(f"{cost['rollouts']:,.0f}" for cost in paid[arm])
            end = " ".join(f"{accuracy:.3f}" for accuracy in ends)
            yield f"| {task.name} | {arm} | {reached} of {len(over)} | {each} | {shown} | {end} | {max(falls):.3f} |"


def table(out: Path, size: str, arms: list[str]) -> None:
    """Print the table of the seeds that every arm has.

    Raises:
        SystemExit: there is no such seed of any task.
    """
    lines = [line for task in SIZES[size] for line in rows(out, task, arms)]
    if not lines:
        raise SystemExit(f"{out} has no seed of {', '.join(map(str, SEEDS))} of which every arm is over; first: run")
    print("| task | arm | reached | rollouts | first arm over this: rollouts | tokens | seconds | at the end | fall |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(*lines, sep="\n")


def main() -> None:
    """Tune, rank, run or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "rank", "run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("size", choices=tuple(SIZES))
    parser.add_argument("arms", type=arms_of)
    parser.add_argument("seeds", type=int, nargs="*")
    asked = parser.parse_args()
    tunes = asked.what in ("tune", "rank")
    if tunes and (not asked.seeds or set(asked.seeds).intersection(SEEDS)):
        parser.error(f"{asked.what} needs seeds other than the final ones, {', '.join(map(str, SEEDS))}")
    if asked.what == "table" and asked.seeds:
        parser.error("table takes no seeds: it shows each final seed of which every arm is over")
    where = asked.out, asked.size, asked.arms
    if asked.what == "tune":
        run(*where, asked.seeds, tuning=True)
    elif asked.what == "rank":
        rank(*where, asked.seeds)
    elif asked.what == "run":
        run(*where, asked.seeds or SEEDS)
    else:
        table(*where)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
