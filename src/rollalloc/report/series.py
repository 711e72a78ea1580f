"""Time series of runs, interpolated onto a common axis so that seeds can be averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
from numpy.typing import NDArray

from rollalloc.compare.summary import Interval, interval
from rollalloc.runs.recorded import Line, RecordedRun
from rollalloc.runs.values import QUANTILES, number

Array = NDArray[np.float64]
_POINTS = 60
_WINDOWS = 40  # parts of a run whose shares are shown


@dataclass(frozen=True)
class OverTime:
    """Series by name, against rollouts paid. Each is a mean over seeds, and ends where the shortest run ends."""

    x_X: Array
    values: Mapping[str, Array]


@dataclass(frozen=True)
class Middle:
    """Interquartile mean of accuracy over seeds, against a cost.

    It has a 95% interval, whose ends are NaN for fewer than five seeds.
    """

    x_X: Array
    middle_X: Array
    low_X: Array
    high_X: Array

    def intervals(self) -> list[Interval]:
        """The mean at each cost, with its interval."""
        ends = [(None, None) if isnan(low) else (low, high) for low, high in zip(self.low_X, self.high_X, strict=True)]
        return [Interval(point, *end, ()) for point, end in zip(self.middle_X, ends, strict=True)]


def accuracy_over_seeds(runs: Sequence[RecordedRun], cost: str, at_X: Array | None = None) -> Middle | None:
    """Interquartile mean of held-out accuracy over seeds, with its interval.

    A run that reached its target keeps its last accuracy from then on. If a run ends below its target, its later accuracies
    are unknown. So the line ends where the first such run ends.

    Args:
        runs: one run per seed.
        cost: a field of `Curve`: "rollouts", "tokens" or "seconds".
        at_X: the costs at which the mean is wanted. None: from the first to the last cost that it can be known for.

    Returns:
        The mean; None if no run was evaluated.
    """
    curves = [(getattr(run.curve, cost), run.curve.accuracy, run.reached) for run in runs if run.curve.accuracy]
    if not curves:
        return None
    short = [x[-1] for x, _, reached in curves if not reached]
    end = min(short) if short else max(x[-1] for x, _, _ in curves)
    x_X = np.linspace(max(x[0] for x, _, _ in curves), end, _POINTS) if at_X is None else at_X
    accuracy_RX = np.array([np.interp(x_X, x, y) for x, y, _ in curves])
    middles = [interval(accuracy_R) for accuracy_R in accuracy_RX.T]
    point_X, low_X, high_X = (
        np.array([getattr(middle, name) for middle in middles], np.float64) for name in ("point", "low", "high")
    )
    return Middle(x_X, point_X, low_X, high_X)


def at_equal_cost(methods: Mapping[str, Sequence[RecordedRun]], cost: str) -> tuple[Array, dict[str, Middle]] | None:
    """The accuracy of each method at a quarter, half, three quarters and all of the cost that every method has paid.

    These costs are rounded down to two digits, so that a reader can name them.

    Returns:
        The four costs, and the accuracies by label. None: fewer than two methods were evaluated after paying this cost.
    """
    middles = {label: accuracy_over_seeds(runs, cost) for label, runs in methods.items()}
    ends = [middle.x_X[-1] for middle in middles.values() if middle is not None]
    if len(ends) < 2 or not min(ends) > 0:
        return None
    at_X = _two_digits(min(ends) * np.array([0.25, 0.5, 0.75, 1.0]))
    known = {label: accuracy_over_seeds(methods[label], cost, at_X) for label, middle in middles.items() if middle}
    return at_X, {label: middle for label, middle in known.items() if middle is not None}


def _two_digits(positive_X: Array) -> Array:
    """The numbers, rounded down to two digits."""
    unit_X = 10.0 ** (np.floor(np.log10(positive_X)) - 1)
    return np.floor(positive_X / unit_X + 1e-9) * unit_X


def training_over_time(runs: Sequence[RecordedRun]) -> OverTime | None:
    """Mean "reward", "grad norm" and "loss" of the batches, where they are known."""
    return _over_time(runs, _named({"reward_mean": "reward", "grad_norm": "grad norm", "loss": "loss"}))


def entropy_over_time(runs: Sequence[RecordedRun]) -> OverTime | None:
    """Entropy of the next token in nats, named "entropy", from the batches or, if they lack it, from the evaluations."""
    entropy = _named({"entropy": "entropy"})
    return _over_time(runs, entropy) or _over_time(runs, lambda line: entropy(line.get("breadth") or {}), kind="eval")


def _named(names: Mapping[str, str]) -> Callable[[Line], Mapping[str, float]]:
    """A function that returns the known values of a line under other names. NaN and infinity are left out."""
    return lambda line: {words: value for name, words in names.items() if (value := number(line.get(name))) is not None}


def lengths_over_time(runs: Sequence[RecordedRun]) -> OverTime | None:
    """Quantiles of rollout length in tokens, named "min", "p10" ... "max".

    Each batch has the quantiles of the rollouts that were scored since the previous batch.

    Logs without quantiles, such as TRL's, give "min", "mean" and "max".
    """
    return _over_time(
        runs,
        lambda line: dict(zip(QUANTILES, line["lengths"]["quantiles"], strict=True)) if line.get("lengths") else None,
    ) or _over_time(
        runs,
        lambda line: (
            dict(zip(("min", "mean", "max"), line["mean_lengths"], strict=True)) if "mean_lengths" in line else None
        ),
    )


def causes_over_time(runs: Sequence[RecordedRun]) -> OverTime | None:
    """The share of each cause among the rollouts that were settled in each of `_WINDOWS` parts of the run.

    Open rollouts are left out. Logs without accounts that have the share of groups without variance, such as those of TRL's
    own trainer, give "trained" and "zero_variance". The x of a part is its end.
    """
    counts = _over_time(runs, lambda line: {name: n for name, n in line["accounts"].items() if name != "open"} or None)
    if counts is None:
        shares = _over_time(runs, _named({"alike": "zero_variance"}))
        if shares is None:
            return None
        alike_X = np.clip(shares.values["zero_variance"], 0, 1)
        return OverTime(shares.x_X, {"trained": 1 - alike_X, "zero_variance": alike_X})
    edges_X = np.linspace(counts.x_X[0], counts.x_X[-1], _WINDOWS + 1)
    settled = {name: np.maximum(0, np.diff(np.interp(edges_X, counts.x_X, y))) for name, y in counts.values.items()}
    total_X = np.sum(list(settled.values()), axis=0)
    if not total_X.any():
        return None
    total_X = np.where(total_X > 0, total_X, np.nan)
    return OverTime(edges_X[1:], {name: np.nan_to_num(y / total_X) for name, y in settled.items()})


def prompts_over_time(runs: Sequence[RecordedRun]) -> OverTime | None:
    """Number of prompts by the result of their last visit, mean over seeds. None: not logged."""
    return _over_time(runs, lambda line: line.get("prompts"))


def paid_by_cause(runs: Sequence[RecordedRun]) -> dict[str, float]:
    """Rollouts paid by cause, mean over the runs."""
    causes = dict.fromkeys(cause for run in runs for cause in run.accounts)
    return {cause: sum(run.accounts.get(cause, 0) for run in runs) / len(runs) for cause in causes}


def _over_time(
    runs: Sequence[RecordedRun],
    value: Callable[[Line], Mapping[str, float] | None],
    kind: str | None = None,
) -> OverTime | None:
    """Mean over seeds on a grid of rollouts paid. It ends where the shortest run ends.

    Args:
        runs: one run per seed.
        value: converts a line of the metrics to values by name.
        kind: use only lines of this kind. None: all lines except evaluations.
    """
    known = [
        [
            (line["rollouts_paid"], by_name)
            for line in run.metrics
            if (line["kind"] != "eval" if kind is None else line["kind"] == kind) and (by_name := value(line))
        ]
        for run in runs
    ]
    known = [lines for lines in known if lines]
    if not known:
        return None
    start, end = max(lines[0][0] for lines in known), min(lines[-1][0] for lines in known)
    if end <= start:
        return None
    x_X = np.linspace(start, end, _POINTS)
    names = dict.fromkeys(name for lines in known for _, by_name in lines for name in by_name)
    values = {
        name: np.mean(
            [
                np.interp(x_X, [at for at, _ in lines], [by_name.get(name, 0) for _, by_name in lines])
                for lines in known
            ],
            axis=0,
        )
        for name in names
    }
    return OverTime(x_X, values)
