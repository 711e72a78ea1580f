"""Rules that users of other trainers ask for: does any of them gain over plain GRPO?

    python lab/experiments/asked.py run OUT --tasks TASKS [--only QUESTION]   # resumable; tasks are made if missing
    python lab/experiments/asked.py table OUT                                 # of the runs that have ended

The plan, committed before any run. The rules below are written here and not in the package: a rule enters the package only
if it gains beyond the noise.

    variance  groups kept by reward variance in order (RAGEN-2, arXiv 2604.06268; verl #7894). `share`: the groups of
              highest variance that together have half of the batch's variance, the others without an advantage. (With 90%
              nothing is left out here: in a trial run of 2,048 rollouts it was GRPO to the digit, since fewer than three
              of eight groups vary.) `four`, `two`: so many of 8 groups.
    again     prompts with no success are tried again, with the earlier attempts merged (open-instruct #1861). Such a group
              waits for 8 updates and then gets n more rollouts, 2n in all. `rows`: all rows are trained on, the earlier
              ones with truncated importance weights. `baseline`: rows sampled before this update count in the group's mean
              and deviation only (prime-rl #2960). `apart`: they count for nothing, which is trying again without merging.
    stale     GRPO in the asynchronous engine, 4 batches ahead, deterministic. `all`: every row of a group that is at most
              8 updates old is trained on, our default. `first`: rows whose first token is more than 3 updates old serve the
              baseline only (prime-rl #2960). `tokens`: the same, but a row's age is the mean over its tokens (verl #7569),
              for which (age of the first token + age of the last token) / 2 stands. In a trial run `first` left out two
              thirds of the rows, and `tokens` a fifth.
    spread    a least difference of the metrics of a group (OpenRLHF #1272), on graded rewards: `dapo` with surplus groups
              carried over, and the same with `min_spread` of .25 and .5. Scores are shares of up to eight positions.

Task: skills/late with groups of 8 x 8, and skills/graded with 16 x 4 for `spread`; 0.15M parameters; 8,192 rollouts; the
optimizer's defaults of 2026-11-25. Learning rate: of GRPO and the arms of `variance`, the better of 3e-4 and 6e-4 by the
mean accuracy over the curve on seed 9700; that is 6e-4 for all four, and every other arm has GRPO's. (The first plan chose
each arm's by the accuracy at the end. It was changed when the eight tuning runs of `variance` and three runs on seed 9701,
GRPO's at 3e-4, had ended: the end of one run says little, and a run takes 35 s on a machine that others share. `two` and
`share` were far behind GRPO in the tuning runs at both rates, so that `two` has no further seed. For want of time `apart`
and a `min_spread` of .5 were struck before any of their runs.)
Seeds 9701 to 9703. Reported: the mean accuracy over the curve (nine evaluations, one every 1,024 rollouts, exact except on
skills/graded) and the accuracy at the end, less those of GRPO with the same seed, with 95% intervals of Student's t. A gain
is an interval above 0.
The three arms of `stale` diverged at 6e-4 (means .09 to .24 below GRPO's). So they run again, planned after that: each arm
at the better of 1.5e-4 and 3e-4 by the mean of the curve on seed 9700, seeds 9701 to 9703.
"""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollalloc import Recipe, recipes
from rollalloc.compare.compare import is_finished
from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Stage
from rollalloc.core.rule import (
    Act,
    BatchRule,
    IntakeRule,
    JudgeRule,
    JudgeTraits,
    Memory,
    PromoteRule,
    RowRule,
    Verdict,
    View,
)
from rollalloc.models.settings import Streaming
from rollalloc.rules import advantages, intake, judges, promote, sizes
from rollalloc.runs.reader import lines_in
from rollalloc.tasks.presets import DEFAULT_OPTIMIZER, Tuned, planned_run, with_task_files
from rollalloc.train.config import Config, folder_of, is_run_in
from rollalloc.train.loading import one_thread
from rollalloc.train.train import train

RATES, RATE, TUNING_SEED, SEEDS = (3e-4, 6e-4), 6e-4, 9700, (9701, 9702, 9703)
STALE_RATES = (1.5e-4, 3e-4)
ONLY_TUNED, STRUCK = ("two",), ("apart", "dapo .5")
ROLLOUTS, EVERY = 8_192, 1_024
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, by the number of values


# ---------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True, slots=True)
class TopShare(BatchRule):
    """Keep the groups of highest reward variance that together have a share of the batch's; the others get advantage 0."""

    share: float

    def __call__(
        self,
        advantages: Sequence[NDArray[np.float64]],
        groups: Sequence[GroupView],
        chosen: Sequence[NDArray[np.int64]],
        view: View,
    ) -> Sequence[NDArray[np.float64]]:
        variance_B = np.array([float(np.var(group.rewards_G)) for group in groups])
        order_B = np.argsort(-variance_B, kind="stable")
        before_B = np.cumsum(variance_B[order_B]) - variance_B[order_B]  # of the groups with more variance
        kept = set(order_B[before_B < self.share * variance_B.sum() - judges.TINY].tolist())
        return [made if at in kept else np.zeros_like(made) for at, made in enumerate(advantages)]


class ByMetrics(JudgeRule):
    """Decides by the metrics of a complete group."""

    __slots__ = ()

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=("metrics_G",), waits_for_all=True)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        return None if group.unfinished else self.verdict(group.metrics_G)

    @abstractmethod
    def verdict(self, metrics_G: NDArray[np.float64]) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Solved(ByMetrics):
    """Train on a complete group with a success; let one without wait for its next stage."""

    def verdict(self, metrics_G: NDArray[np.float64]) -> Verdict:
        return Verdict(Act.TRAIN if metrics_G.any() else Act.NEXT)


@dataclass(frozen=True, slots=True)
class Later(PromoteRule):
    """Groups whose first rollouts are at least `updates` updates old, oldest first."""

    updates: int

    def __call__(self, held: Sequence[GroupView], k: int, view: View, rng: np.random.Generator) -> Sequence[GroupView]:
        due = [group for group in held if view.version - group.first_version >= self.updates]
        return sorted(due, key=lambda group: (group.first_version, group.group))[:k]


@dataclass(frozen=True, slots=True)
class FillBeside(IntakeRule):
    """Open as many groups as the batch needs beside those that run; groups that wait for a later stage do not count."""

    def __call__(self, view: View, memory: Memory) -> int:
        return view.need - sum(view.running_S)


@dataclass(frozen=True, slots=True)
class Young(RowRule):
    """Train on rollouts of a limited age; the others have the weight 0.

    Attributes:
        updates: largest age in updates of the weights.
        age: "first": that of the first token. "tokens": the mean of the first token's and the last one's.
    """

    updates: float
    age: Literal["first", "tokens"] = "first"

    def __call__(
        self, group: GroupView, view: View, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        first_G = np.array([view.version - done.version for done in group.in_order], np.float64)
        last_G = np.array(
            [
                view.version - (done.version if done.last_version is None else done.last_version)
                for done in group.in_order
            ]
        )
        age_G = first_G if self.age == "first" else (first_G + last_G) / 2
        young_M = np.flatnonzero(age_G <= self.updates)
        if not young_M.size:  # a group must have a row
            return np.array([0]), np.zeros(1)
        return young_M, np.ones(young_M.size)


@dataclass(frozen=True, slots=True)
class Spread(ByMetrics):
    """Train on a complete group whose largest metric exceeds the smallest by at least `least`; drop it otherwise."""

    least: float

    def verdict(self, metrics_G: NDArray[np.float64]) -> Verdict:
        wide = np.ptp(metrics_G) >= self.least - judges.TINY
        return Verdict(Act.TRAIN) if wide else Verdict(Act.DROP, "zero_variance")


# -------------------------------------------------------------------------------------------------------------- recipes


def top_share(groups: int = 8, n: int = 8, share: float = 0.5) -> Recipe:
    """GRPO on the groups that have most of the batch's variance."""
    return replace(recipes.grpo(groups, n), over_batch=TopShare(share))


def top_number(groups: int = 4, n: int = 8, gen_groups: int = 8) -> Recipe:
    """GRPO on so many of the generated groups, those with the highest variance."""
    made = recipes.grpo(groups, n).replace(promote=promote.TopVariance(always=True))
    return replace(made, intake=intake.KeepInFlight(gen_groups))


def again(groups: int = 8, n: int = 8, updates: int = 8, old: Literal["rows", "baseline", "apart"] = "rows") -> Recipe:
    """GRPO that tries prompts without a success again after so many updates; `old` says what earlier attempts are."""
    base = recipes.grpo(groups, n)
    stages = (
        Stage("first", sizes.Fixed(n), Solved(), None, Later(updates)),
        Stage("again", sizes.Fixed(n), judges.Complete(), None, promote.Oldest()),
    )
    made = replace(base, stages=stages, intake=FillBeside(), max_staleness=2 * updates)
    if old == "rows":
        return made
    over = advantages.OverGroup if old == "baseline" else advantages.OverChosen
    return replace(made, rows=Young(0), advantage=over(advantages.grpo))


def young(groups: int = 8, n: int = 8, updates: float = 3, age: Literal["first", "tokens"] = "first") -> Recipe:
    """GRPO whose older rows serve the baseline only."""
    return replace(recipes.grpo(groups, n), rows=Young(updates, age))


# ----------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Arm:
    """A recipe by name with its parameters, and settings of the run."""

    recipe: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


_SMALL = {"groups": 8, "n": 8}
_AHEAD = {"engine": "async", "ahead": 4, "streaming": Streaming(overlap=False)}
_GRADED = {"groups": 16, "n": 4, "gen_groups": 16}
GRPO = Arm("grpo", _SMALL)
QUESTIONS: Mapping[str, tuple[str, Mapping[str, Arm]]] = {  # task, arms; all are compared with the first
    "variance": (
        "skills/late",
        {
            "grpo": GRPO,
            "share": Arm("asked:top_share"),
            "four": Arm("asked:top_number", {"groups": 4}),
            "two": Arm("asked:top_number", {"groups": 2}),
        },
    ),
    "again": (
        "skills/late",
        {"grpo": GRPO, **{old: Arm("asked:again", {"old": old}) for old in ("rows", "baseline", "apart")}},
    ),
    "stale": (
        "skills/late",
        {
            "grpo": GRPO,
            "all": Arm("grpo", _SMALL, _AHEAD),
            "first": Arm("asked:young", {"age": "first"}, _AHEAD),
            "tokens": Arm("asked:young", {"age": "tokens"}, _AHEAD),
        },
    ),
    "spread": (
        "skills/graded",
        {
            "grpo": Arm("grpo", {"groups": 16, "n": 4}),
            "dapo": Arm("dapo_carry", _GRADED),
            "dapo .25": Arm("asked:spread", {**_GRADED, "min_spread": 0.25}),
            "dapo .5": Arm("asked:spread", {**_GRADED, "min_spread": 0.5}),
        },
    ),
}


def spread(groups: int, n: int, gen_groups: int, min_spread: float) -> Recipe:
    """DAPO that carries surplus groups over, with a least difference of a group's metrics."""
    return recipes.dapo(groups, n, gen_groups, surplus="carry").replace(judge=Spread(min_spread))


LOW = [arm for arm in QUESTIONS["stale"][1] if arm != "grpo"]


def run_of(question: str, arm: str, rate: float, seed: int) -> Config:
    """A run; GRPO's are the same in all questions of a task."""
    task, arms = QUESTIONS[question]
    tuned = Tuned(arms[arm].parameters, rate, DEFAULT_OPTIMIZER)
    settings = {"target": None, "eval_every": EVERY, "checkpoint_minutes": 3.0, "stop_when_barren": False}
    run = planned_run(task, arms[arm].recipe, seed, tuned=tuned, **settings, **arms[arm].settings)
    label = arm if arm == "grpo" else f"{question} {arm}"
    return replace(run, label=f"{label}@{rate:g}", max_rollouts=ROLLOUTS)


def carried_out(run: Config, out: Path, tasks: Path) -> NDArray[np.float64]:
    """The run, unless it is there; the accuracy of its evaluations."""
    made = with_task_files(run, tasks)
    place = folder_of(made, out)
    if not is_finished(made, place):
        train(made, place, resume=is_run_in(made, place))
        print(run.task, run.label, run.seed, accuracies(place).round(3).tolist(), flush=True)
    return accuracies(place)


def accuracies(place: Path) -> NDArray[np.float64]:
    """Accuracy at every point of the grid, the initial model first."""
    lines = [line for line in lines_in(place / "metrics.jsonl") if line["kind"] == "eval" and line["at"] is not None]
    return np.array([line["accuracy"] for line in lines])


def carry_out(out: Path, tasks: Path, only: str | None) -> None:
    """Every run: the rates that are tuned; then question by question."""
    for arm in QUESTIONS["variance"][1]:
        for rate in RATES:
            carried_out(run_of("variance", arm, rate, TUNING_SEED), out, tasks)
    for question in [only] if only else QUESTIONS:
        for seed in SEEDS:
            for arm in QUESTIONS[question][1]:
                if arm not in (*ONLY_TUNED, *STRUCK):
                    carried_out(run_of(question, arm, RATE, seed), out, tasks)
    for arm in LOW:
        means = {rate: carried_out(run_of("stale", arm, rate, TUNING_SEED), out, tasks).mean() for rate in STALE_RATES}
        for seed in SEEDS:
            carried_out(run_of("stale", arm, max(STALE_RATES, key=lambda rate: means[rate]), seed), out, tasks)


# ---------------------------------------------------------------------------------------------------------------- table


def table(out: Path) -> Iterator[str]:
    """In Markdown: the tuning runs, then the seeds on which an arm and GRPO have ended."""
    yield "| tuning | rate | mean of the curve | at the end |"
    yield "|---|---|---|---|"
    tuning = [("variance", arm, rate) for arm in QUESTIONS["variance"][1] for rate in RATES]
    for question, arm, rate in (*tuning, *(("stale", arm, rate) for arm in LOW for rate in STALE_RATES)):
        if (curve := ended(run_of(question, arm, rate, TUNING_SEED), out)) is not None:
            yield f"| {question} {arm} | {rate:g} | {curve.mean():.3f} | {curve[-1]:.3f} |"
    yield ""
    yield "| question | arm | seeds | mean of the curve | at the end | mean, less GRPO's | end, less GRPO's |"
    yield "|---|---|---|---|---|---|---|"
    for question, (_, arms) in QUESTIONS.items():
        tried = {f"{arm}, {RATE:g}": (arm, RATE) for arm in arms}
        tried |= {f"{arm}, {rate:g}": (arm, rate) for arm in arms if arm in LOW for rate in STALE_RATES}
        curves = {
            name: {seed: ended(run_of(question, *how, seed), out) for seed in SEEDS} for name, how in tried.items()
        }
        base = next(iter(curves.values()))
        for name, by_seed in curves.items():
            pairs = [(one, two) for seed, one in by_seed.items() if one is not None and (two := base[seed]) is not None]
            if pairs:
                means = f"{fmean(one.mean() for one, _ in pairs):.3f} | {fmean(one[-1] for one, _ in pairs):.3f}"
                whole = interval([one.mean() - two.mean() for one, two in pairs])
                end = interval([one[-1] - two[-1] for one, two in pairs])
                yield f"| {question} | {name} | {len(pairs)} | {means} | {whole} | {end} |"


def ended(run: Config, out: Path) -> NDArray[np.float64] | None:
    """The accuracies of a run that has ended; None otherwise."""
    place = folder_of(run, out)
    if not (place / "metrics.jsonl").exists():
        return None
    return accuracies(place) if [line["kind"] for line in lines_in(place / "metrics.jsonl")][-1] == "end" else None


def half_width(values: Sequence[float]) -> float:
    """Half of Student's 95% interval of the mean of 2 to 5 values."""
    return T95[len(values)] * stdev(values) / sqrt(len(values))


def interval(values: Sequence[float]) -> str:
    """Mean and Student's 95% interval."""
    if len(values) < 2:
        return ", ".join(f"{value:+.3f}" for value in values)
    half = half_width(values)
    return f"{fmean(values):+.3f} [{fmean(values) - half:+.3f}, {fmean(values) + half:+.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=Path, default=Path("runs/tasks"), help="where built-in tasks are made and kept")
    parser.add_argument("--only", choices=tuple(QUESTIONS))
    asked = parser.parse_args()
    if asked.command == "run":
        one_thread()
        carry_out(asked.out, asked.tasks, asked.only)
    else:
        print("\n".join(table(asked.out)))


if __name__ == "__main__":
    main()
