"""Do groups with long rollouts starve where what is too old is dropped, and does pacing of intake keep them?

    python lab/experiments/paced.py native OUT --tasks TASKS   # resumable; tasks are made if missing
    python lab/experiments/paced.py table OUT
    python lab/experiments/paced.py simulated                  # the scenario of `simulate.py starved`, with the rule

Asked for in tinker-cookbook #822 and marin #8955. The plan, committed before any run. GRPO, 8 x 8, in the native
asynchronous engine without overlap, so that a run can be repeated; skills/late (answers of up to 9 tokens; walks/long, with
128, was planned first and took more than five minutes to make on a shared machine), 0.15M parameters, 3e-4, 4,096 rollouts,
seeds 9701 to 9703. Arms: 2 batches ahead with a staleness of 2 or 4 (4 is the default), 4 ahead with 4 or 8 (8 is the
default), and the rule below with a staleness of 2 or 4.

Reported: the share of groups that are never trained, among those begun at least `staleness` updates before the end; the
share of groups with a long rollout among those trained over the same share among those begun. Long: the longest rollout of
a group is among the longest tenth (a stopped rollout counts with the length that it had); and accuracy at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import simulate as simulations
from rollalloc import Allocator, Recipe, recipes
from rollalloc.core.events import Actions, Cancelled, Done, Event
from rollalloc.core.group import Drawn, GroupView
from rollalloc.core.prompts import PromptTable
from rollalloc.core.rule import IntakeRule, IntakeTraits, Memory, PromptRule, View
from rollalloc.models.settings import Streaming
from rollalloc.rules.prompts import Shuffled
from rollalloc.runs.reader import lines_in
from rollalloc.tasks.presets import DEFAULT_OPTIMIZER, Tuned, planned_run, with_task_files
from rollalloc.train.config import Config, folder_of
from rollalloc.train.loading import one_thread
from rollalloc.train.train import train
from rollalloc_lab.simulate.cluster import Cluster, Scenario

TASK, RATE, ROLLOUTS, SEEDS = "skills/late", 3e-4, 4_096, (9701, 9702, 9703)
SIZE = {"groups": 8, "n": 8}


# ---------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True, slots=True)
class Noted(PromptRule):
    """Draw as `Shuffled` does, and remember at which version each prompt in flight was drawn."""

    order: Shuffled = field(default_factory=Shuffled)

    def init(self, table: PromptTable) -> Memory:
        return self.order.init(table) | {"in_flight": []}

    def pick(
        self, memory: Memory, k: int, free_N: NDArray[np.bool_], view: View, rng: np.random.Generator
    ) -> Sequence[int | Drawn]:
        picked = self.order.pick(memory, k, free_N, view, rng)
        drawn = [each.prompt if isinstance(each, Drawn) else int(each) for each in picked]
        memory["in_flight"] = memory["in_flight"] + [[prompt, view.version] for prompt in drawn]
        return picked

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        memory["in_flight"] = [each for each in memory["in_flight"] if each[0] != group.prompt]


@dataclass(frozen=True, slots=True)
class Paced(IntakeRule):
    """Open only as many groups as can be trained before the oldest one in flight is too old.

        groups in flight ≤ groups of a batch · max(1, max_staleness - age of the oldest)

    Batches can be made without the oldest group only from the others in flight. So it is trained in time, however long it
    takes: the trainer waits for it. Needs `Noted`.
    """

    @property
    def traits(self) -> IntakeTraits:
        return IntakeTraits(looks_ahead=True)

    def __call__(self, view: View, memory: Memory) -> int:
        live = sum(view.running_S) + sum(view.held_S)
        oldest = min((version for _, version in memory["in_flight"]), default=view.version) if live else view.version
        return view.groups * max(1, view.max_staleness - (view.version - oldest)) - live


def paced(groups: int, n: int, max_staleness: int) -> Recipe:
    """GRPO whose intake is paced."""
    return replace(recipes.grpo(groups, n), prompts=Noted(), intake=Paced(), max_staleness=max_staleness)


# --------------------------------------------------------------------------------------------------------------- native


@dataclass(frozen=True)
class Arm:
    """A recipe with the settings of its run."""

    recipe: str
    staleness: int
    ahead: int | None = None

    def run(self, label: str, seed: int, rollouts: int) -> Config:
        parameters = SIZE if self.ahead else {**SIZE, "max_staleness": self.staleness}
        tuned = Tuned(parameters, RATE, DEFAULT_OPTIMIZER)
        how: dict[str, Any] = {"engine": "async", "streaming": Streaming(overlap=False), "ahead": self.ahead}
        how |= {"target": None, "eval_every": rollouts // 4, "eval_samples": 4, "stop_when_barren": False}
        run = planned_run(TASK, self.recipe, seed, tuned=tuned, staleness=self.staleness, **how)
        return replace(run, label=label, max_rollouts=rollouts)


ARMS: Mapping[str, Arm] = {
    "2 ahead, staleness 2": Arm("grpo", 2, 2),
    "2 ahead, staleness 4": Arm("grpo", 4, 2),
    "paced, staleness 2": Arm("paced:paced", 2),
    "4 ahead, staleness 4": Arm("grpo", 4, 4),
    "4 ahead, staleness 8": Arm("grpo", 8, 4),
    "paced, staleness 4": Arm("paced:paced", 4),
}


@dataclass
class Watch:
    """What became of every group of a run: the version when it was begun, its longest rollout, whether it was trained."""

    begun: dict[int, int] = field(default_factory=dict[int, int])
    longest: dict[int, int] = field(default_factory=dict[int, int])
    trained: set[int] = field(default_factory=set[int])
    owner: dict[int, int] = field(default_factory=dict[int, int])
    version: int = 0

    def installed(self) -> Any:
        """A context in which every allocator tells this object."""
        ask, tell, watch = Allocator.ask, Allocator.tell, self

        def asking(allocator: Allocator, *given: Any, **named: Any) -> Actions:
            actions = ask(allocator, *given, **named)
            watch.version = allocator.version
            for order in actions.generate:
                watch.begun.setdefault(order.group, allocator.version)
                watch.owner.update(dict.fromkeys(order.rollouts, order.group))
            if actions.batch is not None:
                watch.trained.update(row.group for row in actions.batch.rows)
            return actions

        def telling(allocator: Allocator, events: Iterable[Event]) -> Any:
            events = list(events)
            for event in events:
                if isinstance(event, (Done, Cancelled)):
                    group = watch.owner[event.rollout]
                    watch.longest[group] = max(watch.longest.get(group, 0), event.tokens)
            return tell(allocator, events)

        return patch.multiple(Allocator, ask=asking, tell=telling)

    def figures(self, staleness: int) -> dict[str, float]:
        """The reported shares."""
        counted = [group for group, version in self.begun.items() if version < self.version - staleness]
        limit = statistics.quantiles([self.longest.get(group, 0) for group in counted], n=10)[-1]
        long = [group for group in counted if self.longest.get(group, 0) >= limit]
        trained = [group for group in counted if group in self.trained]
        share = sum(group in self.trained for group in long) / len(trained)
        return {"long": share / (len(long) / len(counted)), "lost": 1 - len(trained) / len(counted), "limit": limit}


def native(out: Path, tasks: Path, rollouts: int = ROLLOUTS, seeds: Sequence[int] = SEEDS) -> None:
    """Every run that is not over; its figures go into a line of `figures.jsonl`."""
    for seed in seeds:
        for label, arm in ARMS.items():
            if (label, seed) in known(out):
                continue
            run, watch = with_task_files(arm.run(label, seed, rollouts), tasks), Watch()
            with watch.installed():
                train(run, place := folder_of(run, out), overwrite=True)
            curve = [line["accuracy"] for line in lines_in(place / "metrics.jsonl") if line["kind"] == "eval"]
            said = {"arm": label, "seed": seed, "batches": watch.version, "accuracy": curve[-1]}
            with (out / "figures.jsonl").open("a") as file:
                file.write(json.dumps(said | watch.figures(arm.staleness)) + "\n")
            print(said | watch.figures(arm.staleness), flush=True)


def known(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The figures of the runs that are over."""
    file = out / "figures.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(line["arm"], line["seed"]): line for line in lines}


def table(out: Path) -> Iterator[str]:
    """In Markdown, a line an arm, a value a seed."""
    yield "| arm | long among trained over among begun | never trained | accuracy at the end | batches |"
    yield "|---|---|---|---|---|"
    for label in ARMS:
        over = [line for (arm, _), line in known(out).items() if arm == label]
        forms = {"long": ".2f", "lost": ".1%", "accuracy": ".3f", "batches": "d"}
        yield f"| {label} | {' | '.join(' '.join(f'{line[key]:{form}}' for line in over) for key, form in forms.items())} |"


# ------------------------------------------------------------------------------------------------------------ simulated


def simulated() -> None:
    """128 x 8 on 32 GPUs: seconds a batch, groups lost, and the long ones, with and without the rule; three seeds."""
    for ahead, staleness in ((1, 2), (None, 2), (2, 2), (2, 4), (3, 4), (4, 4), (None, 4), (3, 6), (4, 8), (None, 8)):
        for seed in range(3):
            recipe = recipes.grpo(128, 8) if ahead else paced(128, 8, staleness)
            scenario = Scenario(cluster=Cluster(gpus=32, schedule="async", ahead=ahead), batches=16)
            run = simulations.Watched(recipe, scenario, seed, max_staleness=staleness, allocator=Allocator)
            seconds = run.run().per_batch["seconds"]
            begun, longest = dict(enumerate(run.begun)), dict(enumerate(run.longest))
            watch = Watch(begun, longest, set(run.trained), {}, run.allocator.version)
            name = f"{ahead} ahead" if ahead else "paced"
            print(
                f"{name}, staleness {staleness}, seed {seed}: {seconds:.1f} s, {watch.figures(staleness)}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("native", "table", "simulated"))
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/paced"))
    parser.add_argument("--tasks", type=Path, default=Path("runs/tasks"), help="where built-in tasks are made and kept")
    asked = parser.parse_args()
    if asked.command == "native":
        one_thread()
        native(asked.out, asked.tasks)
    elif asked.command == "table":
        print("\n".join(table(asked.out)))
    else:
        simulated()


if __name__ == "__main__":
    main()
