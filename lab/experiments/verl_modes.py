"""Seconds of a step under verl's synchronous and asynchronous modes, recipe beside recipe, on this machine's CPUs.

    PYTHON=.venv-verl/bin/python python lab/experiments/verl_modes.py FOLDER [--steps 8] [--recipes grpo,dapo]
        [--modes rollalloc]

Each run is examples/verl/cpu.sh, with longer responses and few at once, so that rollouts of one batch end at different
times. Weights hardly move, so that lengths are the same throughout. A run that is there, with all its steps, is not run
again. The first steps are left out, since engines start and compile in them, and the last one, beside which nothing is
generated for a next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "verl" / "cpu.sh"
MODES = ("rollalloc", "rollalloc_colocate_async")
RECIPES = {
    "grpo": {"recipe": "grpo"},
    "dapo": {"recipe": "dapo", "gen_groups": 16},
    "pilot_commit": {"recipe": "pilot_commit", "n_pilot": 4, "n_commit": 4, "gen_groups": 16},
    "darts": {"recipe": "darts", "shortest": 3, "longest": 1, "tail": "sampled"},
    "foresight": {"recipe": "foresight"},
}
SINGLE = ["data.train_batch_size=64", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
ALIKE = [
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "data.max_response_length=192",
    "actor_rollout_ref.rollout.max_model_len=256",
    "actor_rollout_ref.rollout.max_num_seqs=16",
]
LEFT_OUT, LIMIT = 2, 1800  # steps; seconds, against a run that hangs


def finished(folder: Path, steps: int) -> list[dict[str, float]] | None:
    """verl's metrics of each step, where all are there."""
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    rows = [json.loads(line)["data"] for line in lines]
    return rows[:steps] if len(rows) >= steps else None


def run(folder: Path, recipe: str, mode: str, steps: int) -> list[dict[str, float]]:
    """A run's metrics, a dictionary a step.

    Raises:
        RuntimeError: as `carried_out`.
    """
    keys = [f"+trainer.v1.rollalloc.{key}={value}" for key, value in RECIPES[recipe].items()]
    keys += [f"trainer.v1.trainer_mode={mode}", f"trainer.total_training_steps={steps}", "trainer.resume_mode=disable"]
    return carried_out(folder, keys + ALIKE + (SINGLE if recipe == "foresight" else []), steps)


def carried_out(folder: Path, keys: list[str], steps: int) -> list[dict[str, float]]:
    """The metrics of the example with these keys, a dictionary a step; it is not run again where it is over.

    Raises:
        RuntimeError: verl failed, or took longer than `LIMIT`.
    """
    if (rows := finished(folder, steps)) is not None:
        return rows
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that was broken off
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["bash", EXAMPLE, folder, *keys], stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started ends with it
    rows = finished(folder, steps)
    if code != 0 or rows is None:
        raise RuntimeError(f"{folder.name}: exit code {code}, see {folder / 'log'}")
    return rows


def carry_out(
    document: str | None,
    planned: Callable[[Path], Iterable[tuple[str, int, Path, list[str]]]],
    curve_of: Callable[[Path], list[tuple[float, float]]],
    run: Callable[[Path, Path, list[str]], object],
    show: Callable[[Path], None],
) -> None:
    """The command line of an experiment whose runs are planned: `run FOLDER [--one]` and `table FOLDER`.

    Args:
        document: the experiment's description.
        planned: the arm, the seed, the folder and verl's keys of each run, in order.
        curve_of: the curve of a run; empty if it is not over.
        run: carries out a run, given the experiment's folder, the run's folder and keys.
        show: prints the table.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends with this, too
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--one", action="store_true")
    asked = parser.parse_args()
    out = asked.folder.resolve()
    if asked.action == "table":
        show(out)
        return
    for arm, seed, folder, keys in planned(out):
        if not curve_of(folder):
            run(out, folder, keys)
            print(arm, seed, json.dumps(curve_of(folder)), flush=True)
            if asked.one:
                break


def line(recipe: str, mode: str, rows: list[dict[str, float]]) -> str:
    """A row of the table: seconds of a step and of its parts, and what it paid."""
    kept = rows[LEFT_OUT:-1]
    step = [row["timing_s/step"] for row in kept]
    generating, update = (
        statistics.median(row.get(f"timing_s/{name}", float("nan")) for row in kept) for name in ("gen", "update_actor")
    )
    paid = (rows[-2]["rollalloc/rollouts_paid"] - rows[LEFT_OUT - 1]["rollalloc/rollouts_paid"]) / len(kept)
    return (
        f"| {recipe} | {mode} | {statistics.median(step):.1f} ({min(step):.1f}–{max(step):.1f}) "
        f"| {statistics.mean(step):.1f} "
        f"| {generating:.1f} | {update:.1f} | {paid:.0f} |"
    )


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends with this, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--modes", default=",".join(MODES))
    args = parser.parse_args()
    if args.steps < LEFT_OUT + 2:
        parser.error(f"--steps must be {LEFT_OUT + 2} or more, got {args.steps}")
    recipes, modes = args.recipes.split(","), args.modes.split(",")
    if unknown := {*recipes} - {*RECIPES} | {*modes} - {*MODES}:
        parser.error(f"recipes are {', '.join(RECIPES)}, modes {', '.join(MODES)}, got {', '.join(sorted(unknown))}")
    print(
        "| recipe | mode | step, s, median (least–most) | mean | generating | update | rollouts per step |", flush=True
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for recipe in recipes:
        for mode in modes:
            rows = run(args.folder.resolve() / f"{recipe}-{mode}", recipe, mode, args.steps)
            print(line(recipe, mode, rows), flush=True)


if __name__ == "__main__":
    sys.exit(main())
