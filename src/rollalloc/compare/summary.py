"""Summarizes a comparison from the `run.json` and `metrics.jsonl` of its runs.

Point estimates are interquartile means: a quarter of the values, rounded down, is cut off at each end before averaging.
Intervals are bootstrapped over seeds. For a censored run, the cost that it had paid is used. This cost is a lower bound.
The point estimate is then a bound too. It is marked as a bound, and has no interval.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from rollalloc.runs.values import number
from rollalloc.train.config import NAMES, OF_DATA_AND_REWARD, Config, read_config

FEWEST = 5  # minimum number of values for an interval
RESAMPLES = 10_000
_ALIKE = 1e-6  # a metric within this distance of 1 counts as 1
# Results of a run's last evaluation. All except the first are fields of `rollalloc.train.evaluation.Breadth`.
LAST = {
    "accuracy": "accuracy",
    "full_marks": "full marks",
    "pass_at_k": "pass@{k}",
    "right_pairs_differ": "differ",
    "distinct_right": "distinct",
    "entropy": "entropy",
    "tokens": "tokens",
}
OF_GRADED = {"accuracy": "mean score", "pass_at_k": "best of {k}"}  # headings for tasks with partial marks
Bound = Literal["", ">", "<"]


@dataclass(frozen=True, slots=True)
class Interval:
    """An interquartile mean over seeds, with its 95% interval.

    Attributes:
        point: the interquartile mean.
        low: lower end. None: there are fewer than five values, or a run is censored.
        high: upper end. None: `low` is None too.
        values: one value per seed, in order. The value of a censored run is a bound.
        bound: ">" if the point is a lower bound, "<" if it is an upper bound, "" if it is neither.
    """

    point: float
    low: float | None
    high: float | None
    values: tuple[float, ...]
    bound: Bound = ""


def in_words(interval: Interval | None, form: str, *, point_only: bool = False) -> str:
    """An interval as text: its point and ends. Without ends, its point and values. "" for None.

    Args:
        interval: the interval to show.
        form: format of each number, such as ".2f".
        point_only: True: show only the point.
    """
    if interval is None:
        return ""
    point = f"{interval.bound}{interval.point:{form}}"
    if point_only:
        return point
    if interval.low is None or interval.high is None:
        return f"{point} ({', '.join(f'{value:{form}}' for value in interval.values)})"
    return f"{point} [{interval.low:{form}}–{interval.high:{form}}]"


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """Costs and results of a recipe on a task, over its seeds.

    Attributes:
        parameters: parameters of the recipe.
        seeds: seeds of the runs that have ended, in order.
        reached: number of runs that reached the target. The other runs are censored.
        costs: costs until the target, by `COSTS`. None: nothing was evaluated, or there is no target.
        ratios: the baseline's cost divided by this recipe's, paired by seed, by `COSTS`. Above 1, this recipe is cheaper.
            None: no seed has both costs, both runs of some seed are censored, or some ratios are upper bounds and others
            lower bounds.
        standard_error: the largest standard error of the recipe's evaluations; 0 if all are exact, None if one is unknown.
        last: results of each run's last evaluation, by `LAST`. None: a run lacks the value.
        k: number of attempts in `pass_at_k`. None: unknown, or different between runs.
        accounts: number of rollouts in all runs, by cause. The sum is `rollouts_paid`.
        folders: folders of the runs, in the order of the seeds.
        grouped: whether the recipe's rollouts are compared within groups.
    """

    label: str
    recipe: str
    parameters: Mapping[str, Any]
    seeds: tuple[int, ...]
    reached: int
    costs: dict[str, Interval | None]
    ratios: dict[str, Interval | None]
    standard_error: float | None
    last: dict[str, Interval | None]
    k: int | None
    accounts: dict[str, int]
    rollouts_paid: int
    folders: tuple[Path, ...]
    grouped: bool = True


@dataclass(frozen=True, slots=True)
class Summary:
    """A comparison on one task ("" if the runs name no task). Runs in `unfinished` are not part of any figure.

    Ratios are to `baseline`, the first recipe: "grpo" or, without it, the first in the order of the package.
    """

    task: str
    target: float | None
    baseline: str
    recipes: tuple[RecipeSummary, ...]
    unfinished: tuple[Path, ...]

    @property
    def measure(self) -> str:
        """The name of the quantity that is compared with the target, see `measure_of`."""
        return measure_of(self.recipes)

    @property
    def last(self) -> dict[str, str]:
        """The headings in the table of last evaluations, by name in `LAST`. Columns without a value are left out."""
        attempts = {recipe.k for recipe in self.recipes}
        k = attempts.pop() if len(attempts) == 1 else None
        return {
            name: words.format(k=k or "k")
            for name, words in (LAST if self.measure == LAST["accuracy"] else LAST | OF_GRADED).items()
            if any(recipe.last[name] is not None for recipe in self.recipes)
            and (name, self.measure) != ("full_marks", "accuracy")  # the two columns would be equal
        }


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A finished run: its evaluations on the grid, the values of its last evaluation by `LAST`, and its last line.

    `target` is the accuracy by which the run is judged. `grouped` says whether its rollouts are compared within groups.
    """

    run: Config
    folder: Path
    curve: Curve
    last: Mapping[str, Any]
    end: Mapping[str, Any]
    target: float | None
    grouped: bool = True

    @property
    def cost(self) -> Cost | None:
        return None if self.target is None else cost_to_target(self.curve, self.target)


def measure_of(recipes: Iterable[RecipeSummary]) -> str:
    """The name for accuracy: "mean score" if some answers are scored as partly right, otherwise "accuracy"."""
    lasts = [(recipe.last["accuracy"], recipe.last["full_marks"]) for recipe in recipes]
    known = [(mean.values, full.values) for mean, full in lasts if mean is not None and full is not None]
    alike = all(np.allclose(mean, full, rtol=0, atol=_ALIKE) for mean, full in known)
    return LAST["accuracy"] if alike else OF_GRADED["accuracy"]


def summaries(folder: Path) -> list[Summary]:
    """Summaries of the comparison in a folder, task by task.

    Raises:
        ValueError: the runs of a task have different targets, or the runs of a label differ in more than their seed.
        FileNotFoundError: there is no run.
    """
    places = sorted(file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/run.json"))
    if not places:
        raise FileNotFoundError(f"expected a folder with runs in it, found no run.json below {folder}")
    return summaries_of(places)


def summaries_of(places: Sequence[Path]) -> list[Summary]:
    """Summaries of the runs in these folders, task by task. Raises the errors of `summaries`."""
    by_task: dict[str, list[tuple[Path, Config]]] = {}
    for place in places:
        run = read_config(place)
        by_task.setdefault(run.task, []).append((place, run))
    return [_summary(task, of_task) for task, of_task in by_task.items()]


def _summary(task: str, runs: Sequence[tuple[Path, Config]]) -> Summary:
    targets = {run.target for _, run in runs}
    if len(targets) > 1:
        raise ValueError(f"the runs of {task or 'a comparison'} have different targets, {sorted(map(str, targets))}")
    read = [(place, ended(run, place)) for place, run in sorted(runs, key=lambda item: item[1].seed)]
    over = [item for _, item in read if item is not None]
    labels = {item.run.name for item in over}
    baseline = "grpo" if "grpo" in labels else min(labels, key=lambda label: _rank(label, over), default="")
    unfinished = tuple(place for place, item in read if item is None)
    return Summary(task, targets.pop(), baseline, summaries_to(baseline, over), unfinished)


def summaries_to(baseline: str, over: Sequence[EndedRun]) -> tuple[RecipeSummary, ...]:
    """Costs and results of each method on one task, with ratios to `baseline`. The baseline comes first.

    Raises:
        ValueError: the runs of a label differ in more than their seed.
    """
    by_label: dict[str, list[EndedRun]] = {}
    for ended_run in over:
        by_label.setdefault(ended_run.run.name, []).append(ended_run)
    for label, of_label in by_label.items():
        _refuse_mixed(label, of_label)
    labels = sorted(by_label, key=lambda label: (label != baseline, _rank(label, over)))
    return tuple(_recipe(by_label[label], by_label[baseline]) for label in labels)


def _rank(label: str, over: Sequence[EndedRun]) -> tuple[int, str]:
    """Sort key: the order of the package's recipes, then alphabetical."""
    names = list(RECIPES)
    recipe = next(ended_run.run.recipe for ended_run in over if ended_run.run.name == label)
    return names.index(recipe) if recipe in names else len(names), label


def ended(run: Config, place: Path, *, target: float | None = None, diverged: bool = False) -> EndedRun | None:
    """The finished run in a folder; None if it has not ended. Only its curve is kept, because metrics may be large.

    Args:
        run: the run in the folder.
        place: the folder.
        target: the accuracy by which to judge the run. None: the run's own target.
        diverged: whether the run's weights diverged, so that its metrics end before its budget is spent.
    """
    if not (place / METRICS).exists():
        return None
    newest: deque[dict[str, Any]] = deque(maxlen=1)
    last: dict[str, Any] = {}
    known: set[bool] = set()

    def lines() -> Iterator[dict[str, Any]]:
        for line in lines_in(place / METRICS):
            newest.append(line)
            if line["kind"] == "batch":
                known.add(compares(line))
            if line["kind"] == "eval":
                last.update(_last_of(line))
            yield line

    curve = curve_of(lines())
    if not newest or not (diverged or newest[0]["kind"] == "end"):
        return None
    held = run.target if target is None else target
    return EndedRun(run, place, curve, last, newest[0], held, known != {False})


def _last_of(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    """The values in an evaluation's line for each name in `LAST` and for `k`. None: the value is missing or not finite."""
    known = {**evaluation.get("breadth", {}), "accuracy": evaluation["accuracy"]}
    return {name: number(known.get(name)) for name in (*LAST, "k")}


def _refuse_mixed(label: str, over: Sequence[EndedRun]) -> None:
    """Raise an error if runs with the same label have different settings: they are not seeds of one method."""
    first, *others = (_setup(ended_run.run) for ended_run in over)
    for ended_run, expected in zip(over[1:], others, strict=True):
        if differing := list(differences(first, expected, label)):
            raise ValueError(
                f"{over[0].folder} and {ended_run.folder} have the same label, but differ in more than their seed: "
                f"{'; '.join(differing)}; give them different labels, or remove one"
            )


def _setup(run: Config) -> dict[str, Any]:
    """Everything that all seeds of a label must have in common."""
    own = {*OF_DATA_AND_REWARD, *NAMES, "seed", "max_rollouts", "staleness", "ahead"}
    return {name: value for name, value in run.description().items() if name not in own}


def _recipe(runs: Sequence[EndedRun], baseline: Sequence[EndedRun]) -> RecipeSummary:
    first, ends = runs[0].run, [run.end for run in runs]
    costs = {run.run.seed: run.cost for run in runs}
    attempts = {run.last.get("k") for run in runs}
    of_baseline = {run.run.seed: run.cost for run in baseline}
    return RecipeSummary(
        label=first.name,
        recipe=first.recipe,
        parameters=first.parameters,
        seeds=tuple(costs),
        reached=sum(cost is not None and not cost.censored for cost in costs.values()),
        costs={name: _cost(name, list(costs.values())) for name in COSTS},
        ratios={name: _ratio(name, of_baseline, costs) for name in COSTS},
        standard_error=_largest(error for run in runs for error in run.curve.standard_error),
        last={name: _known([run.last.get(name) for run in runs]) for name in LAST},
        k=None if len(attempts) > 1 else attempts.pop(),
        accounts=dict(sum((Counter(end["accounts"]) for end in ends), Counter())),
        rollouts_paid=sum(end["rollouts_paid"] for end in ends),
        folders=tuple(run.folder for run in runs),
        grouped=any(run.grouped for run in runs),
    )


def _cost(name: str, costs: Sequence[Cost | None]) -> Interval | None:
    known = [cost for cost in costs if cost is not None]
    if not known or len(known) < len(costs):
        return None
    return interval([cost.paid[name] for cost in known], ">" if any(cost.censored for cost in known) else "")


def _known(values: Sequence[float | None]) -> Interval | None:
    return None if None in values else interval([value for value in values if value is not None])


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
    """The interquartile mean of some values, and its bootstrapped 95% interval.

    There is no interval if `bound` is set, or if there are fewer than five values.

    The ends of the interval are quantiles of the bootstrap distribution. With five seeds, the quantiles at 2.5% and 97.5%
    would cover far less than 95%. So the levels Φ(±√(n/(n−1))·t) are used instead, where Φ is the distribution function of
    N(0, 1), and t the 97.5% quantile of Student's t with n − 1 degrees of freedom (Hesterberg, The American Statistician 69,
    2015).
    """
    point = float(interquartile_mean(values))
    if len(values) < FEWEST or bound:
        return Interval(point, None, None, tuple(values), bound)
    values_N = np.asarray(values, np.float64)
    drawn_RN = np.random.default_rng(0).choice(values_N, size=(RESAMPLES, values_N.size))
    tail = NormalDist().cdf(-sqrt(values_N.size / (values_N.size - 1)) * _student(values_N.size - 1))
    low, high = np.quantile(interquartile_mean(drawn_RN), [tail, 1 - tail])
    return Interval(point, float(low), float(high), tuple(values))


def interquartile_mean(values: ArrayLike) -> NDArray[np.float64]:
    """Mean along the last axis after cutting off the ⌊n/4⌋ smallest and largest values."""
    sorted_N = np.sort(np.asarray(values, np.float64), axis=-1)
    cut = sorted_N.shape[-1] // 4
    return sorted_N[..., cut : sorted_N.shape[-1] - cut].mean(axis=-1)


def _student(degrees: int) -> float:
    """97.5% quantile of Student's t, by its expansion in 1 / degrees. The error is below 0.01 from 4 degrees on."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
