"""What does evicting solved prompts do to Pilot-Commit: by evidence, as published, or not at all?

    python experiments/eviction.py run OUT --tasks TASKS [--one]  # resumable; --one: carry out the next run and stop
    python experiments/eviction.py table OUT --tasks TASKS        # of what is over

The plan, set before any run. Pools of 1,024 prompts of skills by the initial model's exact success rate, hopeless
(below .01), between, and solved (.93 and above): 35 / 30 / 35 and 10 / 45 / 45 in %. The pools that were asked for
have .005 and .995 as their edges; skills has four prompts above .995, so that those of `findings_runs` are taken.
Pilot-Commit with 4 + 12 rollouts, 4 groups a batch, pilots for three batches; learning rate 3e-4, chosen before and
not tuned for any arm; 24,576 rollouts, about three to six passes over the prompts; seeds 9700 to 9702, each arm on
one seed before the next seed; held-out accuracy, exact, every 2,048 rollouts. Reported for each run: accuracy at the
end and in the mean over the curve, rollouts paid when it ended, and the share of prompts that is evicted at the end.
Three seeds are too few for an interval: every value is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from findings_runs import ONE_VISIT, Variant, carried_out, run_of

from rollalloc.lab.bench.compare import is_finished
from rollalloc.runs.reader import read_metrics
from rollalloc.train.description import Run, folder_of

POOLS, SEEDS, ROLLOUTS, EVERY = ("pool/35-35-1024", "pool/10-45-1024"), (9700, 9701, 9702), 24_576, 2_048
_SIZES = {"groups": 4, "n_pilot": 4, "n_commit": 12, "gen_groups": 12}
ARMS = {"evidence": {}, "as published": ONE_VISIT, "none": {"p_solve": 2.0}}


def planned(tasks: Path) -> Iterator[tuple[Variant, str, int, Run]]:
    """Every run in its order."""
    for seed in SEEDS:
        for pool in POOLS:
            for arm, parameters in ARMS.items():
                variant = Variant("pilot_commit", {**_SIZES, **parameters}, changes={"eval_every": EVERY}, pool=pool)
                label = f"{pool.removeprefix('pool/')} {arm}"
                yield variant, label, seed, run_of(variant, label, seed, tasks, ROLLOUTS)


def carry_out(out: Path, tasks: Path, *, one: bool) -> None:
    """The runs that are not there yet, or the next of them."""
    for variant, label, seed, run in planned(tasks):
        if is_finished(run, folder_of(run, out)):
            continue
        found = carried_out(variant, label, seed, tasks, out, ROLLOUTS)
        print(label, seed, [round(each, 3) for each in found.curve.accuracy], flush=True)
        if one:
            return


def show(out: Path, tasks: Path) -> None:
    """A line for each run that is over."""
    print("| pool, arm | seed | rollouts | accuracy at the end | mean of the curve | evicted at the end |")
    print("|---|---|---|---|---|---|")
    for variant, label, seed, run in planned(tasks):
        place = folder_of(run, out)
        if not is_finished(run, place):
            continue
        curve = carried_out(variant, label, seed, tasks, out, ROLLOUTS).curve.accuracy
        last = read_metrics(place)[-1]
        evicted = last["evicted"] / int(variant.pool.rpartition("-")[2])
        print(
            f"| {label} | {seed} | {last['rollouts_paid']:,} | {curve[-1]:.3f} | {fmean(curve):.3f} | {evicted:.0%} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--one", action="store_true")
    asked = parser.parse_args()
    if asked.action == "run":
        carry_out(asked.out, asked.tasks, one=asked.one)
    else:
        show(asked.out, asked.tasks)
