"""The figures of a run or a comparison, as data: what is drawn, from the metrics of the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from rollalloc.compare.summary import FEWEST
from rollalloc.files.text import one_line
from rollalloc.report import series
from rollalloc.report.charts import Area, Bars, Between, Chart, Line, Mark, Panel, thinned
from rollalloc.report.style import BLUE, METHODS, MUTED, Colour, Kind, by_cause, by_status
from rollalloc.runs.recorded import RecordedRun

Methods = Mapping[str, Sequence[RecordedRun]]  # the runs of each label, one per seed; the first label is the baseline
Sort = Callable[[Mapping[str, float]], list[tuple[Kind, float]]]  # amounts by name, as kinds in the order of a view
_MARKED = 60  # a run's evaluations are drawn as points if there are at most this many
_DASHES = ("solid", "dash", "dot")  # for more methods than there are colours
_COSTS = {"rollouts": "rollouts paid", "tokens": "tokens generated", "seconds": "seconds, without evaluations"}


def charts(methods: Methods, target: float | None) -> Iterator[Chart]:
    """The figures for which the runs have data, in the order of the page."""
    draws: tuple[Callable[[Methods], Chart | None], ...] = (
        where_rollouts_went,
        where_over_time,
        partial(accuracy, cost="rollouts", target=target),
        partial(accuracy, cost="tokens", target=target),
        partial(accuracy, cost="seconds", target=target),
        states_of_prompts,
        training,
        lengths,
    )
    for draw in draws:
        if (chart := draw(methods)) is not None:
            yield chart


def where_rollouts_went(methods: Methods) -> Chart | None:
    """A bar for each method: its parts are the rollouts trained on, stale, cancelled and so on, means over seeds."""
    paid = {label: series.paid_by_cause(runs) for label, runs in methods.items()}
    paid = {label: accounts for label, accounts in paid.items() if sum(accounts.values())}
    if not paid or (len(paid) == 1 and len(by_cause(*paid.values())) < 2):  # a single bar of one colour is useless
        return None
    labels = [one_line(label, 18) for label in paid]
    together = dict.fromkeys((cause for accounts in paid.values() for cause in accounts), 1.0)
    parts = {kind.words: kind for kind, _ in by_cause(together)}
    counts = [{kind.words: count for kind, count in by_cause(accounts)} for accounts in paid.values()]
    bars = [
        Bars(words, kind.colour, labels, [of_label.get(words, 0.0) for of_label in counts])
        for words, kind in parts.items()
        if any(words in of_label for of_label in counts)
    ]
    mean = ", mean of the seeds" if _seeds(methods) > 1 else ""
    return Chart(
        "where",
        "Where every rollout went",
        "The length of a bar is the number of rollouts that a method paid; green is the part that was trained on.",
        [Panel(f"rollouts paid{mean}", "", bars)],
    )


def where_over_time(methods: Methods) -> Chart | None:
    """The shares of the causes among the rollouts that were settled in each part of the run, a panel for each method."""
    panels = _stacked(methods, series.causes_over_time, by_cause, "share", share=True)
    if not panels:
        return None
    return Chart(
        "where-over-time",
        "Where rollouts went over time",
        "Of the rollouts settled in each fortieth of the run, the share that was trained on, and why the others were "
        f"not{_over(methods)}. A rollout is settled when it is trained on or left out.",
        panels,
    )


def states_of_prompts(methods: Methods) -> Chart | None:
    """The number of prompts by the result of their last visit, over the run, a panel for each method."""
    panels = _stacked(methods, series.prompts_over_time, by_status, "prompts", from_zero=True)
    if not panels:
        return None
    return Chart(
        "prompts",
        "What became of the prompts",
        f"Prompts by the result of their last visit{_over(methods)}; grey: not visited yet.",
        panels,
    )


def _stacked(
    methods: Methods,
    over_time: Callable[[Sequence[RecordedRun]], series.OverTime | None],
    sort: Sort,
    y: str,
    *,
    share: bool = False,
    from_zero: bool = False,
) -> list[Panel]:
    """A panel of stacked areas for each method whose runs have the series."""
    known = {label: over for label, runs in methods.items() if (over := over_time(runs)) is not None}
    return [
        Panel(_unit(methods), y, _areas(over, sort), one_line(label, 40), share=share, from_zero=from_zero)
        for label, over in known.items()
    ]


def _areas(over: series.OverTime, sort: Sort) -> list[Mark]:
    """Stacked areas in the order of `sort`. Names that `sort` shows as one become one area."""
    heights: dict[str, series.Array] = {}
    for name, y_X in over.values.items():
        words = sort({name: 1.0})[0][0].words
        heights[words] = heights.get(words, 0) + y_X
    kinds = [kind for kind, _ in sort(dict.fromkeys(over.values, 1.0))]
    return [Area(kind.words, kind.colour, over.x_X, heights[kind.words]) for kind in kinds if heights[kind.words].any()]


def accuracy(methods: Methods, cost: str, target: float | None) -> Chart | None:
    """Held-out accuracy against a cost: a thin line for each run, a thick line for the interquartile mean, and its interval.

    Args:
        methods: the runs of each method.
        cost: "rollouts", "tokens" or "seconds".
        target: the accuracy at which a line is drawn. None: no line.

    Returns:
        The figure; None if no run was evaluated, or if the cost is unknown.
    """
    bands: list[Mark] = []
    thin: list[Mark] = []
    thick: list[Mark] = []
    for label, runs, colour, dash in _styled(methods):
        middle = series.accuracy_over_seeds(runs, cost)
        if middle is None or not np.any(middle.x_X):
            continue
        name, one = one_line(label, 24), runs[0].curve
        if len(runs) > 1:
            for run in runs:
                x, y = thinned(getattr(run.curve, cost), run.curve.accuracy)
                thin.append(Line(f"{name}, seed {run.seed}", colour, x, y, faint=True))
        elif len(one.accuracy) <= _MARKED:
            error = [each or 0.0 for each in one.standard_error]
            thick.append(Line(name, colour, getattr(one, cost), one.accuracy, dash, points=True, error=error))
            continue
        thick.append(Line(name, colour, middle.x_X, middle.middle_X, dash))
        if not np.isnan(middle.low_X).any():
            bands.append(Between(name, colour, middle.x_X, middle.low_X, middle.high_X, named=False))
    if not thick:
        return None
    suffix = "" if cost == "rollouts" else f"-{cost}"
    against = {"rollouts": "what was paid", "tokens": "tokens", "seconds": "seconds"}[cost]
    meant = {
        "rollouts": _how_curves_read(_seeds(methods)),
        "tokens": "The same against the tokens generated: long rollouts cost more than short ones.",
        "seconds": "The same against the seconds of one machine, without evaluations.",
    }[cost]
    level = None if target is None else (target, f"target {target:g}")
    x = _unit(methods) if cost == "rollouts" else _COSTS[cost]
    panel = Panel(x, "held-out accuracy", [*bands, *thin, *thick], level=level)
    return Chart(f"accuracy{suffix}", f"Accuracy against {against}", meant, [panel])


def training(methods: Methods) -> Chart | None:
    """Reward, entropy, gradient norm and loss over the run: a panel for each of them, with a line for each method."""
    marks: dict[str, list[Mark]] = {}
    for label, runs, colour, dash in _styled(methods):
        for over in (series.training_over_time(runs), series.entropy_over_time(runs)):
            if over is None:
                continue
            for name, y in over.values.items():
                marks.setdefault(name, []).append(Line(one_line(label, 24), colour, over.x_X, y, dash))
    names = [name for name in ("reward", "entropy", "grad norm", "loss") if name in marks]
    if not names:
        return None
    return Chart(
        "training",
        "Training",
        f"By batch{_over(methods)}: mean reward of scored rollouts, entropy in nats, gradient norm before clipping, loss.",
        [Panel(_unit(methods), name, marks[name], name) for name in names],
    )


def lengths(methods: Methods) -> Chart | None:
    """For each method, the rollouts' median length, the ranges from 25 to 75% and from 10 to 90%, and the maximum."""
    over_time = {label: series.lengths_over_time(runs) for label, runs in methods.items()}
    known = {label: over for label, over in over_time.items() if over is not None}
    if not known:
        return None
    return Chart(
        "lengths",
        "Length of rollouts",
        _how_lengths_read(any("mean" in over.values for over in known.values()), _over(methods)),
        [
            Panel(_unit(methods), "tokens", _lengths(over), one_line(label, 40), from_zero=True)
            for label, over in known.items()
        ],
    )


def _lengths(over: series.OverTime) -> list[Mark]:
    at, x = over.values, over.x_X
    if "p50" in at:
        return [
            Between("10 to 90%", BLUE, x, at["p10"], at["p90"]),
            Between("25 to 75%", BLUE, x, at["p25"], at["p75"], strong=True),
            Line("median", BLUE, x, at["p50"]),
            Line("longest", MUTED, x, at["max"], "dot"),
        ]
    return [
        Line("shortest", MUTED, x, at["min"], "dot"),
        Line("mean", BLUE, x, at["mean"]),
        Line("longest", MUTED, x, at["max"], "dot"),
    ]


def _styled(methods: Methods) -> Iterator[tuple[str, Sequence[RecordedRun], Colour, str]]:
    """Each method with its colour and its dash."""
    for at, (label, runs) in enumerate(methods.items()):
        yield label, runs, METHODS[at % len(METHODS)], _DASHES[at // len(METHODS) % len(_DASHES)]


def _unit(methods: Methods) -> str:
    """The unit of the x axis."""
    return next((run.unit for runs in methods.values() for run in runs), "rollouts paid")


def _seeds(methods: Methods) -> int:
    return max(len(runs) for runs in methods.values())


def _over(methods: Methods) -> str:
    return "" if _seeds(methods) == 1 else ", mean over seeds until the shortest run ends"


def _how_lengths_read(is_mean: bool, over: str) -> str:
    if is_mean:
        return f"All rollouts between two batches{over}: mean length; the dotted lines are the shortest and longest rollout."
    return f"All rollouts between two batches{over}: median length, 25 to 75%, 10 to 90%; dotted: the longest rollout."


def _how_curves_read(seeds: int) -> str:
    if seeds == 1:
        return "Held-out accuracy after each evaluation, with its standard error as a bar; further left is cheaper."
    band = ", shaded its 95% interval" if seeds >= FEWEST else f"; {seeds} seeds are too few for an interval"
    return (
        f"Thin: each seed. Thick: the interquartile mean over seeds{band}. Further left is cheaper. After its end, a run "
        "that reached the target keeps its last accuracy. The thick line ends where the first run ends below the target."
    )
