"""What a comparison says, from the `run.json` and `metrics.jsonl` of its runs alone.

Point estimates are interquartile means: the mean of what is left when a quarter of the values, rounded down, is cut off
at each end. Their intervals are bootstrapped over seeds. A censored run enters with what it had paid, which is a lower
bound of its cost; then the point is a bound too, marked as such, and no interval is claimed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.packing import differences
from rollalloc.files.names import METRICS
from rollalloc.named import RECIPES
from rollalloc.runs.cost import COSTS, Cost, Curve, cost_to_target, curve_of
from rollalloc.runs.reader import lines_in
from rollalloc.runs.recorded import compares
from rollalloc.train.description import Run

FEWEST = 5  # values for which an interval is given
_RESAMPLES = 10_000
_ALIKE = 1e-6  # a metric as near to 1 as this is full marks
_LARGEST = 2**53  # number that a mean is taken of
# What the last evaluation of a run says; the names after the first are of `rollalloc.train.evaluation.Breadth`.
LAST = {
    "accuracy": "accuracy",
    "full_marks": "full marks",
    "pass_at_k": "pass@{k}",
    "right_pairs_differ": "differ",
    "distinct_right": "distinct",
    "entropy": "entropy",
    "tokens": "tokens",
}
OF_GRADED = {"accuracy": "mean score", "pass_at_k": "best of {k}"}  # where scores lie between wrong and right too
Bound = Literal["", ">", "<"]


@dataclass(frozen=True, slots=True)
class Interval:
    """An interquartile mean over seeds, with its 95% interval.

    Attributes:
        point: the interquartile mean.
        low: lower end; None for fewer than five values, or where a run is censored.
        high: upper end, likewise.
        values: one a seed, in order; a censored run's is a bound.
        bound: ">" where the point is a lower bound, "<" where it is an upper bound, "" where it is neither.
    """

    point: float
    low: float | None
    high: float | None
    values: tuple[float, ...]
    bound: Bound = ""


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """What a recipe paid on a task, over its seeds.

    Attributes:
        parameters: of the recipe.
        seeds: of the runs that have ended, in order.
        reached: runs that reached the target; the others are censored.
        costs: to the target, by `COSTS`; None where nothing was evaluated or there is no target.
        ratios: the baseline's cost over this one's, paired by seed, by `COSTS`; above 1 this one is cheaper. None where no
            seed has both, or bounds point both ways.
        standard_error: the largest of its evaluations'; 0 where all are exact, None where one is not known.
        last: what the last evaluation of each run found, by `LAST`; None where one of them does not know it.
        k: attempts that `pass_at_k` is of; None where it is not known, or not the same in all.
        accounts: cause → rollouts of all runs; they sum to `rollouts_paid`.
        folders: of the runs, in the order of the seeds.
        grouped: whether its rollouts are compared within groups.
        at_target: as `last`, where the target was reached, over the runs that did; None where one of them does not know it.
    """

    label: str
    recipe: str
    parameters: Mapping[str, Any]
    learning_rate: float
    seeds: tuple[int, ...]
    reached: int
    costs: dict[str, Interval | None]
    ratios: dict[str, Interval | None]
    standard_error: float | None
    last: dict[str, Interval | None]
    k: int | None
    accounts: dict[str, int]
    rollouts_paid: int
    tokens_paid: int
    folders: tuple[Path, ...]
    at_target: dict[str, Interval | None] = field(default_factory=dict[str, "Interval | None"])
    grouped: bool = True


@dataclass(frozen=True, slots=True)
class Summary:
    """A comparison on one task, "" where the runs have none; what has not ended is `unfinished`, and in no figure.

    The ratios are to the `baseline`: "grpo", or else the first, which is the first of the recipes.
    """

    task: str
    target: float | None
    baseline: str
    recipes: tuple[RecipeSummary, ...]
    unfinished: tuple[Path, ...]

    @property
    def measure(self) -> str:
        """What the target is of, in words."""
        return measure_of(self.recipes)

    @property
    def last(self) -> dict[str, str]:
        """What the last evaluations say of any recipe: a name of `LAST` → the heading of a table's column."""
        attempts = {recipe.k for recipe in self.recipes}
        k = attempts.pop() if len(attempts) == 1 else None
        return {
            name: words.format(k=k or "k")
            for name, words in (LAST if self.measure == LAST["accuracy"] else LAST | OF_GRADED).items()
            if any(recipe.last[name] is not None for recipe in self.recipes)
            and (name, self.measure) != ("full_marks", "accuracy")  # which says it already
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over: its evaluations on the grid, what each and the last one found, by `LAST`, and its last line.

    `target` is what it is held against; `grouped`, whether its rollouts are compared within groups.
    """

    run: Run
    folder: Path
    curve: Curve
    found: tuple[Mapping[str, Any], ...]
    last: Mapping[str, Any]
    end: Mapping[str, Any]
    target: float | None
    grouped: bool = True

    @property
    def cost(self) -> Cost | None:
        return None if self.target is None else cost_to_target(self.curve, self.target)


def measure_of(recipes: Iterable[RecipeSummary]) -> str:
    """What is called accuracy, in words: "mean score" where answers with full marks are another share than it."""
    lasts = [(recipe.last["accuracy"], recipe.last["full_marks"]) for recipe in recipes]
    known = [(mean.values, full.values) for mean, full in lasts if mean is not None and full is not None]
    alike = all(np.allclose(mean, full, rtol=0, atol=_ALIKE) for mean, full in known)
    return LAST["accuracy"] if alike else OF_GRADED["accuracy"]


def summaries(folder: Path) -> list[Summary]:
    """What the comparison in a folder says, task by task.

    Raises:
        ValueError: runs of a task with different targets, or of a label that differ in more than their seed.
        FileNotFoundError: no run at all.
    """
    places = sorted(file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/run.json"))
    if not places:
        raise FileNotFoundError(f"expected a folder with runs in it, found no run.json below {folder}")
    return summaries_of(places)


def summaries_of(places: Sequence[Path]) -> list[Summary]:
    """What the runs in these folders say, task by task; raises as `summaries`."""
    by_task: dict[str, list[tuple[Path, Run]]] = {}
    for place in places:
        run = Run.described_in(place)
        by_task.setdefault(run.task, []).append((place, run))
    return [_summary(task, of_task) for task, of_task in by_task.items()]


def _summary(task: str, runs: Sequence[tuple[Path, Run]]) -> Summary:
    targets = {run.settings.target for _, run in runs}
    if len(targets) > 1:
        raise ValueError(f"the runs of {task or 'a comparison'} have different targets, {sorted(map(str, targets))}")
    read = [(place, ended(run, place)) for place, run in sorted(runs, key=lambda one: one[1].settings.seed)]
    over = [one for _, one in read if one is not None]
    labels = {one.run.name for one in over}
    baseline = "grpo" if "grpo" in labels else min(labels, key=lambda label: _rank(label, over), default="")
    unfinished = tuple(place for place, one in read if one is None)
    return Summary(task, targets.pop(), baseline, summaries_to(baseline, over), unfinished)


def summaries_to(baseline: str, over: Sequence[Ended]) -> tuple[RecipeSummary, ...]:
    """What each method of some runs of one task paid, with ratios to one of them, which comes first.

    Raises:
        ValueError: runs of a label that differ in more than their seed.
    """
    by_label: dict[str, list[Ended]] = {}
    for one in over:
        by_label.setdefault(one.run.name, []).append(one)
    for label, of_label in by_label.items():
        _refuse_mixed(label, of_label)
    labels = sorted(by_label, key=lambda label: (label != baseline, _rank(label, over)))
    return tuple(_recipe(by_label[label], by_label[baseline]) for label in labels)


def _rank(label: str, over: Sequence[Ended]) -> tuple[int, str]:
    """The order of the package's recipes, then the alphabet's."""
    names = list(RECIPES)
    recipe = next(one.run.recipe for one in over if one.run.name == label)
    return names.index(recipe) if recipe in names else len(names), label


def ended(run: Run, place: Path, *, target: float | None = None, diverged: bool = False) -> Ended | None:
    """The run of a folder; None where it has not ended. Of its metrics, which may be large, only the curve is kept.

    Args:
        run: that the folder holds.
        place: the folder.
        target: to hold it against, where it is not its own.
        diverged: its weights did, and its metrics end there.
    """
    if not (place / METRICS).exists():
        return None
    newest: deque[dict[str, Any]] = deque(maxlen=1)
    last: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    known: set[bool] = set()

    def lines() -> Iterator[dict[str, Any]]:
        for line in lines_in(place / METRICS):
            newest.append(line)
            if line["kind"] == "batch":
                known.add(compares(line))
            if line["kind"] == "eval":
                last.update(last_of(line))
                found.extend([last_of(line)] if None not in (line["at"], line["accuracy"]) else ())
            yield line

    curve = curve_of(lines())
    if not newest or not (diverged or newest[0]["kind"] == "end"):
        return None
    held = run.settings.target if target is None else target
    return Ended(run, place, curve, tuple(found), last, newest[0], held, known != {False})


def last_of(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation's line says by the names of `LAST`, and `k`; None for what it does not know, or is no number."""
    found = evaluation.get("breadth")
    breadth: Mapping[str, Any] = found if isinstance(found, dict) else {}
    known = {**breadth, "accuracy": evaluation["accuracy"]}
    k = known.get("k")
    return {name: _number(known.get(name)) for name in LAST} | {"k": _number(k) if type(k) is int else None}


def _number(value: Any) -> float | None:
    # A file's numbers may be of any size, NaN included, which is not between any two.
    return value if type(value) in (int, float) and -_LARGEST <= value <= _LARGEST else None


def _refuse_mixed(label: str, over: Sequence[Ended]) -> None:
    """Runs left from before, under other settings, must not pass for further seeds."""
    first, *others = (_setup(one.run) for one in over)
    for one, other in zip(over[1:], others, strict=True):
        if found := list(differences(first, other, label)):
            raise ValueError(
                f"{over[0].folder} and {one.folder} are not one method on two seeds: {'; '.join(found)}; compare them "
                "under labels of their own, or remove one"
            )


def _setup(run: Run) -> dict[str, Any]:
    """What is the same for every seed of a label."""
    described = run.description()
    del described["settings"]["seed"]
    return {name: described[name] for name in ("recipe", "parameters", "settings")}


def _recipe(runs: Sequence[Ended], baseline: Sequence[Ended]) -> RecipeSummary:
    first, ends = runs[0].run, [run.end for run in runs]
    costs = {run.run.settings.seed: run.cost for run in runs}
    attempts = {run.last.get("k") for run in runs}
    of_baseline = {run.run.settings.seed: run.cost for run in baseline}
    return RecipeSummary(
        label=first.name,
        recipe=first.recipe,
        parameters=first.parameters,
        learning_rate=first.settings.learning_rate,
        seeds=tuple(costs),
        reached=sum(cost is not None and not cost.censored for cost in costs.values()),
        costs={name: _cost(name, list(costs.values())) for name in COSTS},
        ratios={name: _ratio(name, of_baseline, costs) for name in COSTS},
        standard_error=_largest(error for run in runs for error in run.curve.standard_error),
        last={name: _last(name, runs) for name in LAST},
        k=None if len(attempts) > 1 else attempts.pop(),
        accounts=dict(sum((Counter(end["accounts"]) for end in ends), Counter())),
        rollouts_paid=sum(end["rollouts_paid"] for end in ends),
        tokens_paid=sum(end["tokens_paid"] for end in ends),
        folders=tuple(run.folder for run in runs),
        at_target={name: _at_target(name, runs) for name in LAST},
        grouped=any(run.grouped for run in runs),
    )


def _cost(name: str, costs: Sequence[Cost | None]) -> Interval | None:
    known = [cost for cost in costs if cost is not None]
    if not known or len(known) < len(costs):
        return None
    return interval([cost.paid[name] for cost in known], ">" if any(cost.censored for cost in known) else "")


def _last(name: str, runs: Sequence[Ended]) -> Interval | None:
    return _known([run.last.get(name) for run in runs])


def _at_target(name: str, runs: Sequence[Ended]) -> Interval | None:
    points = [(run, cost.at) for run in runs if (cost := run.cost) is not None and cost.at is not None]
    return _known([run.found[at].get(name) for run, at in points]) if points else None


def _known(found: Sequence[float | None]) -> Interval | None:
    return None if None in found else interval([value for value in found if value is not None])


def _ratio(name: str, baseline: Mapping[int, Cost | None], costs: Mapping[int, Cost | None]) -> Interval | None:
    values: list[float] = []
    bounds: set[Bound] = set()
    for seed, ours in costs.items():
        theirs = baseline.get(seed)
        if ours is None or theirs is None or ours.paid[name] == 0:
            continue
        if ours.censored and theirs.censored:
            return None
        values.append(theirs.paid[name] / ours.paid[name])
        bounds |= {"<"} if ours.censored else {">"} if theirs.censored else set()
    if not values or len(bounds) > 1:
        return None
    return interval(values, bounds.pop() if bounds else "")


def _largest(errors: Iterator[float | None]) -> float | None:
    known = list(errors)
    return None if None in known or not known else max(error for error in known if error is not None)


# ------------------------------------------------------------------------------------------------------------- statistics


def interval(values: Sequence[float], bound: Bound = "") -> Interval:
    """The interquartile mean of some values, with its bootstrapped 95% interval where there are five and no bound.

    Percentiles of the bootstrap's distribution, expanded for few values: those of N(0, 1) at ±√(n/(n−1))·t, with t the
    97.5% quantile of Student's t of n − 1 degrees of freedom (Hesterberg, The American Statistician 69, 2015). The
    plain 2.5% and 97.5% would hold far less than 95% for five seeds.
    """
    point = float(interquartile_mean(values))
    if len(values) < FEWEST or bound:
        return Interval(point, None, None, tuple(values), bound)
    values_N = np.asarray(values, np.float64)
    drawn_RN = np.random.default_rng(0).choice(values_N, size=(_RESAMPLES, values_N.size))
    tail = NormalDist().cdf(-sqrt(values_N.size / (values_N.size - 1)) * _student(values_N.size - 1))
    low, high = np.quantile(interquartile_mean(drawn_RN), [tail, 1 - tail])
    return Interval(point, float(low), float(high), tuple(values))


def interquartile_mean(values: ArrayLike) -> NDArray[np.float64]:
    """Mean along the last axis of what is left when ⌊n/4⌋ values are cut off at each end."""
    sorted_N = np.sort(np.asarray(values, np.float64), axis=-1)
    cut = sorted_N.shape[-1] // 4
    return sorted_N[..., cut : sorted_N.shape[-1] - cut].mean(axis=-1)


def _student(degrees: int) -> float:
    """97.5% quantile of Student's t, by its expansion in 1 / degrees; off by less than 0.01 from 4 degrees on."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
