"""The plan of a leaderboard. It is frozen in a file before the first run, and its folder cannot be used for another plan."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rollalloc
from rollalloc.core.packing import differences
from rollalloc.files.claims import Claims
from rollalloc.files.regular import read_text, write_text
from rollalloc.files.text import one_line, told
from rollalloc.named import RECIPES, make_recipe, near, sizes_of
from rollalloc.tasks.presets import DEFAULT_RATE, preset_of
from rollalloc_lab.bench.tiers import TIERS, Tier, seconds_of

PLAN, TABLE, DIVERGED = "plan.json", "leaderboard.md", "diverged.json"
KIND = "bench"  # kind of a folder's manifest
_SCHEMA = 5
BASELINE = "grpo"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A method of the leaderboard.

    Attributes:
        recipe: name of the recipe, for `rollalloc.named.make_recipe`.
        label: its name in tables and folders.
        parameters: parameters of the recipe, as plain data.
    """

    recipe: str
    label: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """A task of the plan: its target, budget in rollouts and evaluation grid are fixed before the runs.

    `eval_samples` is the number of samples per held-out prompt, if accuracy is sampled. `rate` is the learning rate; None:
    the plan's rate. `seeds` is the number of the plan's seeds that the task uses; None: all.
    """

    name: str
    target: float
    budget: int
    eval_every: int
    eval_samples: int
    rate: float | None = None
    seeds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan: every method, with its defaults, is run on every task with each seed.

    Attributes:
        contestants: the methods.
        rate: learning rate of every method on tasks without a rate of their own.
        seeds: seeds of the runs.
        made_with: the versions of everything that can change the figures, and the name of the processor.
    """

    tier: str
    tasks: tuple[TaskPlan, ...]
    contestants: tuple[Contestant, ...]
    rate: float
    seeds: tuple[int, ...]
    made_with: Mapping[str, str] = field(default_factory=dict[str, str])

    def described(self) -> dict[str, Any]:
        """The plan as plain data."""
        return json.loads(json.dumps(asdict(self)))

    def seeds_of(self, task: TaskPlan) -> tuple[int, ...]:
        """The seeds of the runs on a task."""
        return self.seeds[: task.seeds]

    def rate_of(self, task: TaskPlan) -> float:
        """The learning rate of every method on a task."""
        return self.rate if task.rate is None else task.rate

    @property
    def rollouts(self) -> int:
        """Maximum number of rollouts that the whole plan pays."""
        return sum(self.runs_of(task) * task.budget for task in self.tasks)

    @property
    def runs(self) -> int:
        """Number of runs of the whole plan."""
        return sum(self.runs_of(task) for task in self.tasks)

    def runs_of(self, task: TaskPlan) -> int:
        """Number of runs on a task."""
        return len(self.contestants) * len(self.seeds_of(task))

    @property
    def seconds(self) -> float:
        """Estimated process seconds for the whole plan, from measured rates. The creation of tasks is not included."""
        return sum(self.seconds_of(task) for task in self.tasks)

    def seconds_of(self, task: TaskPlan) -> float:
        """Estimated process seconds for a task."""
        return seconds_of(task.name, self.runs_of(task) * task.budget, self.runs_of(task))


def make_plan(tier: str, *, tasks: Sequence[str] = (), recipes: Sequence[str] = ()) -> Plan:
    """The plan of a tier.

    Args:
        tier: a key of `TIERS`.
        tasks: names of some of the tier's tasks. Empty: all.
        recipes: names of recipes of this package. Empty: the tier's methods.

    Raises:
        ValueError: a tier, task or recipe is unknown.
    """
    if tier not in TIERS:
        raise ValueError(f"unknown tier {tier!r}{near(tier, TIERS)}; there are {', '.join(TIERS)}")
    sized = TIERS[tier]
    for name in tasks:
        if name not in sized.tasks:
            known = ", ".join(sized.tasks)
            raise ValueError(f"tier {tier} has no task {name!r}{near(name, sized.tasks)}; there are {known}")
    chosen: list[TaskPlan] = []
    for name, budget in sized.tasks.items():
        if not tasks or name in tasks:
            _, preset = preset_of(name)
            chosen.append(
                TaskPlan(
                    name=name,
                    target=preset.target,
                    budget=budget,
                    eval_every=sized.eval_every or preset.eval_every,
                    eval_samples=preset.eval_samples,
                    rate=None if preset.rate == DEFAULT_RATE else preset.rate,
                    seeds=sized.seeds_of.get(name),
                )
            )
    return Plan(
        tier=tier,
        tasks=tuple(chosen),
        contestants=contestants(recipes, sized),
        rate=DEFAULT_RATE,
        seeds=sized.seeds,
        made_with=made_with(),
    )


def contestants(names: Sequence[str], tier: Tier) -> tuple[Contestant, ...]:
    """The methods of a leaderboard: those in `names` or, if `names` is empty, those of the tier.

    A recipe has its default parameters. If the tier defines its own methods, `names` are their labels.

    Raises:
        ValueError: a recipe is unknown, a name occurs twice, or the baseline is missing.
    """
    for name in names:
        if ":" in name:
            raise ValueError(
                f"--recipes {name!r}: a leaderboard has recipes of this package; compare your own with `rollalloc compare`"
            )
    all_names = [*(names or tier.methods or tier.recipes)]
    if twice := {name for name in all_names if all_names.count(name) > 1}:
        raise ValueError(f"named twice: {', '.join(sorted(twice))}; each method is compared once")
    if BASELINE not in all_names:
        raise ValueError(f"{BASELINE} is the baseline of every ratio; add it: --recipes {','.join((BASELINE, *names))}")
    return tuple(_contestant(name, tier) for name in all_names)


def _contestant(label: str, tier: Tier) -> Contestant:
    if label in tier.methods:
        recipe, parameters = tier.methods[label]
    else:
        for unknown in set(label.split("+")) - set(RECIPES):
            make_recipe(unknown, {})  # raises an error that lists the known recipes
        recipe, parameters = label, sizes_of(label, {})
    make_recipe(recipe, parameters)
    return Contestant(recipe=recipe, label=label, parameters=json.loads(json.dumps(dict(parameters))))


@cache
def made_with() -> dict[str, str]:
    """Versions of packages, and the name of the processor. The figures can change if one of these changes."""
    return {
        "rollalloc": rollalloc.__version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "processor": _processor(),
    }


def _processor() -> str:
    """The processor's name. Another kind of processor gives other figures for the same seeds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


# ----------------------------------------------------------------------------------------------------------- the file


def freeze(plan: Plan, folder: Path) -> None:
    """Write the plan to its folder. If the folder already has a plan, it must be the same.

    Raises:
        ValueError: the folder has another plan; the message names the differences.
        FileExistsError: a file that is not ours has a name that the leaderboard needs.
    """
    claims = Claims(folder, KIND)
    if PLAN in claims.names() and (folder / PLAN).exists():
        refuse_another(plan, folder)
        return
    claims.add([PLAN, TABLE, DIVERGED])
    saved = {"schema": _SCHEMA, "date": datetime.now(UTC).date().isoformat(), "plan": plan.described()}
    write_text(folder / PLAN, json.dumps(saved, indent=1))


def place_of(task: TaskPlan, label: str, seed: int) -> str:
    """Path of a run within a leaderboard's folder."""
    return f"{task.name.replace('/', '-')}/{label}-{seed}"


def refuse_another(plan: Plan, folder: Path) -> None:
    """Raise an error if a folder has another plan. A folder without a plan is accepted.

    Raises:
        ValueError: the folder has another plan; the message names the differences.
    """
    if not (folder / PLAN).exists() or PLAN not in Claims(folder, KIND).names():
        return
    frozen, _ = frozen_in(folder)
    if others := list(differences(frozen.described(), plan.described(), "plan")):
        shown = "; ".join(others[:5]) + (f"; and {len(others) - 5} more" if len(others) > 5 else "")
        raise ValueError(
            f"{folder} has another frozen plan: {shown}. Continue with the options, the version and the machine of that "
            "plan, or give another folder (--out)"
        )


def frozen_in(folder: Path) -> tuple[Plan, str]:
    """The plan in a folder, and the date on which it was frozen.

    Raises:
        FileNotFoundError: the folder has no plan.
        ValueError: the plan is damaged, or of another version.
    """
    path = folder / PLAN
    if not path.exists():
        raise FileNotFoundError(f"expected the folder of a leaderboard, with {PLAN} in it, got {folder}")
    try:
        saved = json.loads(read_text(path))
        if saved["schema"] != _SCHEMA:
            raise ValueError(f"schema {saved['schema']!r}, expected {_SCHEMA}")
        plan = saved["plan"]
        tasks = tuple(TaskPlan(**entry) for entry in plan["tasks"])
        methods = tuple(Contestant(**entry) for entry in plan["contestants"])
        revived = Plan(**plan | {"tasks": tasks, "contestants": methods, "seeds": tuple(plan["seeds"])})
        return revived, one_line(str(saved["date"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        shown = one_line(told(error), 300)
        raise ValueError(f"{path} is no plan of this version of rollalloc ({shown})") from None
