"""What does each method pay, by its defaults, on tasks of very different prompts? The evidence of `rollalloc advise`.

    python experiments/evidence.py run OUT --tasks TASKS [--bench FOLDER]        # resumable
    python experiments/evidence.py profile OUT --tasks TASKS [--only TASK ...]   # of each task's model before training
    python experiments/evidence.py write OUT [--bench FOLDER ...]                # lab/advise/evidence.json
    python experiments/evidence.py table docs/advise.md                          # its table of tasks left out

Six methods by their defaults in one shape of 64 rollouts, 6e-4, nothing searched for; a run ends at its task's target. A
cell that a folder of `rollalloc bench --track defaults` holds already is not repeated. Rungs of the ladder are of folders of
`rollalloc bench --tier ladder`, which have seeds, budgets and rates of their own. Tasks without a run in OUT or those
folders stay in the file as they are.

Tasks that were made for this were fixed before any method was run on them, by one rule: a warm model that begins at 20 to
55% with a pass@8 of at least 0.7, and a target of start + 0.6 · (pass@8 at the start − start), to two decimals:
rg/letter_counting .558 and .942 (a hair above), rg/spell_backward .414 and .716, rg/count_bits .235 and .822.
Where fewer than two methods come to the target, half of the largest gain stands for it (`target_or_milestone`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from left_out import BEGIN, END, LEGEND, always, left_out, markdown, summary

import rollalloc.lab.advise
from rollalloc.files.names import ROLLOUTS
from rollalloc.lab.advise.evidence import FILE, evidence
from rollalloc.lab.advise.profile import profile_of
from rollalloc.lab.advise.sampling import sample_profile
from rollalloc.lab.bench.compare import compare
from rollalloc.lab.bench.methods import default
from rollalloc.lab.bench.plan import frozen_in, made_with
from rollalloc.lab.bench.presets import DEFAULT_OPTIMIZER, DEFAULT_RATE, Tuned, made, planned_run, preset_of
from rollalloc.lab.bench.rungs import RUNGS
from rollalloc.lab.bench.summary import Ended, ended
from rollalloc.lab.waste.readers import read_log
from rollalloc.runs.cost import cost_to_target
from rollalloc.runs.reader import newest_line
from rollalloc.train.description import Run, folder_of

FIRST_SEEDS, MORE_SEEDS = (9800, 9801), (9802, 9803)  # the first of the defaults track
BENCH_SEEDS = range(9800, 9808)  # all of it
LADDER_SEEDS = range(9700, 9708)
PROFILES = range(5)  # seeds
BUDGETS: Mapping[str, int] = {  # rollouts, after which a run is censored
    "walks/mixed": 10_000,
    "rg/letter_counting": 8_000,
    "rg/spell_backward": 8_000,
    "walks/late": 16_000,
    "rg/number_filtering_misled": 12_000,
    "rg/gcd": 5_000,
    "skills/late": 10_000,
    "skills/graded": 5_000,
    "skills/balanced": 8_000,
    "skills/mixed": 8_000,
    "rg/count_bits": 6_000,
    "sort": 8_000,
}
LADDER = tuple(rung.task for rung in RUNGS.values())  # of folders of the ladder alone
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {  # label: recipe, parameters
    "reinforce": ("reinforce", {}),
    "raft": ("raft", {}),
    "foresight": ("foresight", {}),
    "grpo_n4": ("grpo", {}),
    "grpo_n16": ("grpo", {"groups": 4, "n": 16}),
    "grpo_n2": ("grpo", {"groups": 32, "n": 2}),
}
LATER = ("grpo_n2",)  # a method that no other is held against
IN_BENCH = {"grpo_n4": "grpo", "grpo_n2": "shapes.grpo_n2", "grpo_n16": "shapes.grpo_n16"}  # its labels there
IN_LADDER = {"grpo_n4": "grpo_4", "grpo_n16": "grpo"}  # and on the ladder


def batches_of_runs() -> Iterator[list[Run]]:
    """All of them, a task at a time; what decides most comes first, so that it may be ended at any time."""
    first = [method for method in METHODS if method not in LATER]
    passes = [*(((seed,), first) for seed in FIRST_SEEDS), (FIRST_SEEDS, LATER), (MORE_SEEDS, tuple(METHODS))]
    for seeds, methods in passes:
        for task in BUDGETS:
            yield [run_of(task, method, seed) for seed in seeds for method in methods]


def run_of(task: str, method: str, seed: int) -> Run:
    """A method by its defaults, until the task's target or its budget."""
    recipe, changes = METHODS[method]
    setting = Tuned(default(recipe) | changes, DEFAULT_RATE, DEFAULT_OPTIMIZER)
    planned = planned_run(task, recipe, seed, tuned=setting)
    return replace(planned, label=method, max_rollouts=BUDGETS.get(task, planned.max_rollouts))


def bench_place(folder: Path, run: Run) -> Path:
    """Where the defaults track of a bench has a run."""
    label = (IN_LADDER if run.task in LADDER else IN_BENCH).get(run.label, run.label)
    return folder_of(replace(run, label=label), folder / "defaults")


def profile(out: Path, tasks: Path, only: Sequence[str] = ()) -> None:
    """Sample profiles of every task's model as it is before training, or of some tasks'; resumable."""
    for seed, task in product(PROFILES, only or (*BUDGETS, *LADDER)):
        run = made(planned_run(task, "grpo", seed), tasks)
        sample_profile(run, profile_place(out, task, seed), seed=seed)


def profile_place(out: Path, task: str, seed: int) -> Path:
    """Where a task's profile is."""
    return out / "profiles" / f"{task.replace('/', '-')}-{seed}"


def write(out: Path, bench: Sequence[Path], to: Path) -> None:
    """Write what profiles say and what was paid; what nothing here says anything of stays as it is."""
    before = json.loads(to.read_text(encoding="utf-8"))
    found: dict[str, Any] = before["tasks"]
    written: dict[str, list[int]] = {}
    for task in (*BUDGETS, *LADDER):
        places = [place for seed in PROFILES if (place := profile_place(out, task, seed)).exists()]
        profiles = [profile_of(read_log(place / ROLLOUTS)).signals() for place in places]
        rounded = [{name: round(value, 4) for name, value in signals.items()} for signals in profiles]
        rounded = rounded or found.get(task, {}).get("profiles")  # a task without any cannot be learned from
        if rounded and (over := over_of(task, out, bench)):
            found[task] = {"profiles": rounded, **paid_of(task, over)}
            written[task] = sorted({one.run.settings.seed for of_method in over.values() for one in of_method})
    update = {
        "seeds": written,
        "bench": [frozen_in(each)[0].digest[:12] for each in bench],
        "made_with": json.dumps(made_with()),
        "date": datetime.now(UTC).date().isoformat(),
    }
    origin = before["origin"] | {"updates": [*before["origin"].get("updates", []), update]}
    to.write_text(json.dumps({"origin": origin, "tasks": found}, indent=1) + "\n", encoding="utf-8")


def over_of(task: str, out: Path, bench: Sequence[Path]) -> dict[str, list[Ended]]:
    """Method → its runs that are over; of a bench's beside ours, where both have one, ours."""
    over: dict[str, list[Ended]] = {}
    for method, seed in product(METHODS, LADDER_SEEDS if task in LADDER else BENCH_SEEDS):
        run = run_of(task, method, seed)
        places = (folder_of(run, out), *(bench_place(each, run) for each in bench))
        place = next((place for place in places if is_over(place)), None)
        one = None if place is None else ended(Run.described_in(place), place, target=run.settings.target)
        if one is not None and one.run.parameters == run.parameters:  # not those of a default that was another
            over.setdefault(method, []).append(one)
    return over


def paid_of(task: str, over: Mapping[str, list[Ended]]) -> dict[str, Any]:
    """Target, whether it is a milestone, and method → what it paid, as `rollalloc.lab.advise.evidence.Paid` has it."""
    target, milestone = target_or_milestone(task, over)
    paid: dict[str, Any] = {}
    for method, runs in over.items():
        costs = [cost for run in runs if (cost := cost_to_target(run.curve, target)) is not None]
        paid[method] = [(round(cost.paid["rollouts"], 1), cost.censored, 1) for cost in costs]
    return {"target": round(target, 4), "milestone": milestone, "paid": paid}


def target_of(task: str) -> float:
    """As it was fixed before the runs."""
    _, preset = preset_of(task)
    assert preset.target is not None
    return preset.target


def target_or_milestone(task: str, over: Mapping[str, list[Ended]]) -> tuple[float, bool]:
    """The target; where fewer than two methods came to it, half of the largest mean gain, and True.

    Such a target tells nobody apart within the budget. The milestone is the same for all methods, and that of the best.
    """
    target = target_of(task)
    reached = [any((cost := run.cost) and not cost.censored for run in runs) for runs in over.values()]
    if sum(reached) >= 2:
        return target, False
    runs_of = [[run.curve.accuracy for run in runs] for runs in over.values()]
    start = mean(accuracy[0] for runs in runs_of for accuracy in runs)
    return start + max(mean(accuracy[-1] for accuracy in runs) - start for runs in runs_of) / 2, True


def with_table(guide: str) -> str:
    """A guide with what stands between its marks made anew."""
    before, _, rest = guide.partition(BEGIN)
    after = rest.partition(END)[2]
    known = evidence()
    tasks, families = left_out(known), left_out(known, families=True)
    parts = (
        LEGEND,
        summary(tasks),
        always(known, "reinforce"),
        f"With all tasks of its family left out besides:\n{summary(families)}",
        markdown(tasks),
    )
    return "\n".join((before + BEGIN, "\n\n".join(parts), END + after))


def is_over(place: Path) -> bool:
    """Whether the run of a folder has ended."""
    last = newest_line(place)
    return last is not None and last["kind"] == "end"


def carry_out(out: Path, tasks: Path, bench: Sequence[Path]) -> None:
    """Carry out what is not there; a run process at a time."""
    for batch in batches_of_runs():
        wanted = [run for run in batch if not any(is_over(bench_place(each, run)) for each in bench)]
        compare([made(run, tasks) for run in wanted], out, processes=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("run", "profile", "write", "table"))
    parser.add_argument("out", type=Path, help="folder of runs and profiles, or the guide")
    parser.add_argument("--tasks", type=Path, default=Path("runs/tasks"), help="in which tasks are made and kept")
    parser.add_argument("--only", nargs="+", default=[], help="tasks whose profiles are sampled; default: all")
    parser.add_argument(
        "--bench", type=Path, action="append", default=[], help="folder of a leaderboard whose runs count; repeatable"
    )
    parser.add_argument(
        "--to", type=Path, default=Path(str(files(rollalloc.lab.advise))) / FILE, help="what is written"
    )
    given = parser.parse_args()
    if given.command == "run":
        carry_out(given.out, given.tasks, given.bench)
    elif given.command == "profile":
        profile(given.out, given.tasks, given.only)
    elif given.command == "write":
        write(given.out, given.bench, given.to)
    else:
        given.out.write_text(with_table(given.out.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
