"""What does Pilot-Commit pay at its authors' own shape, 16 pilots + 48 commits, beside GRPO and DAPO with n = 64?

    python lab/experiments/pilots.py run OUT --tasks TASKS      # resumable; TASKS: where built-in tasks are made and kept
    python lab/experiments/pilots.py table OUT                  # of what is over

Their batch has 128 of 103,000 or 53,000 prompts; 8 of the 3,072 of walks/mixed, or of the 8,192 of skills/late, where half
are solved and a third hopeless, are as many in proportion. Four optimizer steps a batch for all, pilots for three batches'
worth of prompts, DAPO as published: surplus groups are discarded. Each method gets the best of the same learning rates, by
its accuracy on a seed of its own (`TUNING`). A run ends at its target, which was fixed before any run, or is censored.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollalloc.compare.compare import is_finished
from rollalloc.compare.summary import EndedRun, Interval, RecipeSummary, ended, summaries_to
from rollalloc.tasks.presets import DEFAULT_OPTIMIZER, Tuned, planned_run, with_task_files
from rollalloc.train.config import Config, folder_of, is_run_in, read_config
from rollalloc.train.loading import one_thread
from rollalloc.train.train import train

GROUPS, N, PILOTS, STEPS = 8, 64, 16, 4
TASKS: Mapping[str, tuple[float, int]] = {
    "walks/mixed": (0.60, 16_000),
    "skills/late": (0.70, 24_000),
}  # target, rollouts
EVERY, SAMPLES = 1_000, 4  # rollouts between evaluations; samples of a held-out prompt
RATES, TUNING, TUNING_ROLLOUTS, SEEDS = (3e-4, 6e-4), 1000, 3_072, range(9500, 9505)
_AHEAD = {"groups": GROUPS, "gen_groups": 3 * GROUPS}
_ONE_VISIT = {"p_solve": 1.0, "confidence": None, "reprobe_every": None}  # evicts as published
_PILOTS = {**_AHEAD, "n_pilot": PILOTS, "n_commit": N - PILOTS, **_ONE_VISIT}
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {  # label: recipe, parameters
    "grpo": ("grpo", {"groups": GROUPS, "n": N}),
    "pilot_commit": ("pilot_commit", {**_PILOTS, "pilots": "every_round"}),
    "dapo": ("dapo", {**_AHEAD, "n": N}),
}
PUBLISHED = {"grpo": "1.5 to 1.9", "dapo": "2.3 to 4.0"}  # times Pilot-Commit's rollouts


def run_of(task: str, method: str, rate: float, seed: int, rollouts: int | None = None) -> Config:
    """A run until its target, or one that pays so many rollouts whatever it comes to."""
    target, most = TASKS[task]
    recipe, parameters = METHODS[method]
    tuned = Tuned(parameters, rate, DEFAULT_OPTIMIZER)
    settings = {"optimizer_steps_per_batch": STEPS, "eval_every": EVERY, "eval_samples": SAMPLES}
    settings |= {"target": None if rollouts else target, "checkpoint_minutes": 3.0}
    run = planned_run(task, recipe, seed, tuned=tuned, **settings)
    return replace(run, label=f"{method}@{rate:g}" if rollouts else method, max_rollouts=rollouts or most)


def carried_out(planned: Config, out: Path, tasks: Path) -> EndedRun:
    """The run, unless it is there; what it found."""
    run = with_task_files(planned, tasks)
    place = folder_of(run, out)
    if not is_finished(run, place):
        train(run, place, resume=is_run_in(run, place))
    found = ended(run, place)
    assert found is not None
    print(run.task, run.name, run.seed, [round(each, 3) for each in found.curve.accuracy], flush=True)
    return found


def carry_out(out: Path, tasks: Path) -> None:
    """Every run: the rates of a task first, then all methods on one seed before the next."""
    for task in TASKS:
        rates = {method: tuned_rate(task, method, out, tasks) for method in METHODS}
        for seed in SEEDS:
            for method, rate in rates.items():
                carried_out(run_of(task, method, rate, seed), out / "runs", tasks)


def tuned_rate(task: str, method: str, out: Path, tasks: Path) -> float:
    """The learning rate under which a method ends at the highest accuracy on the tuning seed."""
    tried = [
        carried_out(run_of(task, method, rate, TUNING, TUNING_ROLLOUTS), out / "tuning", tasks).last["accuracy"]
        for rate in RATES
    ]
    return RATES[tried.index(max(tried))]


def table(out: Path) -> Iterable[str]:
    """In Markdown, what is over; ratios are paired by seed, interquartile means with 95% intervals over seeds."""
    yield "| task, to | method | rate | reached | rollouts | times Pilot-Commit's | published |"
    yield "|---|---|---|---|---|---|---|"
    for task, (target, _) in TASKS.items():
        over = over_of(task, out)
        found = {each.label: each for each in summaries_to("grpo", over)}
        for label, each in found.items():
            ratio = None if label == "pilot_commit" else over_pilot_commit(over, label)
            cells = (said(each.costs["rollouts"], ",.0f"), said(ratio, ".2f"), PUBLISHED.get(label, ""))
            rate, reached = read_config(each.folders[0]).learning_rate, f"{each.reached} of {len(each.seeds)}"
            yield f"| {task}, {target} | {label} | {rate:g} | {reached} | {' | '.join(cells)} |"


def over_of(task: str, out: Path) -> Sequence[EndedRun]:
    """A task's runs that have ended."""
    places = [file.parent for file in sorted((out / "runs").rglob("run.json"))]
    runs = [(place, run) for place in places if (run := read_config(place)).task == task]
    return [found for place, run in runs if (found := ended(run, place)) is not None]


def over_pilot_commit(over: Sequence[EndedRun], label: str) -> Interval | None:
    """The cost of a method over that of Pilot-Commit."""
    pair: Sequence[RecipeSummary] = summaries_to(
        label, [each for each in over if each.run.name in (label, "pilot_commit")]
    )
    return next((each.ratios["rollouts"] for each in pair if each.label == "pilot_commit"), None)


def said(found: Interval | None, digits: str) -> str:
    """An interval in words."""
    if found is None:
        return ""
    ends = "" if found.low is None else f" [{found.low:{digits}}–{found.high:{digits}}]"
    return f"{found.bound}{found.point:{digits}}{ends}"


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
