"""From a prompt set's profile to what each method will pay: a small hierarchical model of the evidence.

For run i of method m on task t, y = log rollouts to target and x the task's signals, standardized over the evidence's tasks:

    y_i = a_t + b_m + β_m · x_t + u_tm + e_i,   b ~ N(0, 1),  β ~ N(0, ω²),  u ~ N(0, τ²),  e ~ N(0, σ²)

a_t is a task's own difficulty, u what a method does on this task for reasons no signal tells, e the seed. A run that did not
reach its target has cost more than it paid: its y is drawn above that bound (Tobit), up to twice as much, so that savings
over it are rather too small. ω², τ² and σ² have weak inverse-gamma priors. All is drawn from the posterior by Gibbs sampling
(Chib, J. Econometrics 51, 1992); differences between methods need no a_t, so they can be told for a task that nobody ran,
with a u and an e of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erfc, nextafter, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.seeds import rng
from rollalloc.lab.advise.evidence import Evidence

_VAGUE, _PLAIN = 100.0, 1.0  # prior variances of a and b, in squared logs
# Shape and scale of the inverse gammas; their means are scale / (shape - 1): sd of .3 for slopes and tasks, .2 for seeds.
_SLOPES, _TASKS, _SEEDS = (2.0, 0.09), (2.0, 0.09), (2.0, 0.04)
_OPEN = np.log(2)  # what a bound leaves open: slopes would carry costs that nobody has seen to any height
_FAR = 30.0  # standard deviations beyond which all of a tail is at its beginning
_LEAST, _MOST = 1e-300, nextafter(1.0, 0.0)  # of a chance that has a quantile
_NORMAL = NormalDist()
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The fitted model, as draws D of its posterior.

    Attributes:
        methods: in the order of axis M.
        signals: names, in the order of axis K.
        centre_K: mean of a signal over the tasks.
        scale_K: its standard deviation, 1 where all tasks have the same.
        low_K: least value of a signal that a task had.
        high_K: the greatest.
    """

    methods: tuple[str, ...]
    signals: tuple[str, ...]
    centre_K: Floats
    scale_K: Floats
    low_K: Floats
    high_K: Floats
    level_DM: Floats
    slope_DMK: Floats
    tau_D: Floats
    sigma_D: Floats

    def beyond(self, signals: Mapping[str, float]) -> Floats:
        """How far each signal is outside of what any task had, in standard deviations, 0 within."""
        found_K = _read(signals, self.signals)
        return np.maximum(np.maximum(self.low_K - found_K, found_K - self.high_K), 0) / self.scale_K

    def drawn(
        self, signals: Mapping[str, float], mixes: Mapping[str, Mapping[str, float]], *, runs: int = 1, seed: int = 0
    ) -> dict[str, Floats]:
        """Draws of log rollouts to target on a task with these signals, up to the task's own constant.

        Args:
            signals: of its profile.
            mixes: what is asked for → weights, of sum 1, of the model's methods whose means it lies between.
            runs: of each that are averaged, at least 1.
            seed: of the draws.
        """
        found_K = _read(signals, self.signals)
        mean_DM = self.level_DM + self.slope_DMK @ ((found_K - self.centre_K) / self.scale_K)
        # What no task had is not known from slopes: there a method may do anything that it did between tasks, and more.
        wide = 1 + float((self.beyond(signals) ** 2).sum())
        noise_D = np.sqrt(wide * self.tau_D**2 + self.sigma_D**2 / runs)
        random = rng(seed, "evidence draw")
        drawn: dict[str, Floats] = {}
        for name, mix in mixes.items():
            own_D = noise_D * random.standard_normal(len(noise_D))
            of_method_D = mean_DM @ np.array([mix.get(method, 0.0) for method in self.methods])
            drawn[name] = of_method_D + own_D - own_D.mean()  # so that means are not shuffled by what is drawn here
        return drawn


def fit(
    evidence: Evidence,
    methods: Sequence[str],
    signals: Sequence[str],
    *,
    draws: int = 800,
    burn_in: int = 200,
    seed: int = 0,
) -> Outcomes:
    """Fit the model to some evidence.

    Args:
        evidence: at least one task.
        methods: of which the model is; other runs are left out.
        signals: names of those that it has slopes for; none: a method's mean alone.
        draws: kept of the posterior.
        burn_in: draws before them.
        seed: of the sampler.

    Raises:
        ValueError: no run of these methods.
    """
    rows = [
        (t, methods.index(method), np.log(one.rollouts), one.censored, one.runs)
        for t, task in enumerate(evidence.tasks)
        for method, found in task.paid.items()
        if method in methods
        for one in found
    ]
    if not rows:
        raise ValueError(f"expected runs of {', '.join(methods)}, the evidence has none")
    task_R, method_R, bound_R, censored_R, runs_R = (np.array(column) for column in zip(*rows, strict=True))
    found_TK = np.array([_read(task.signals, signals) for task in evidence.tasks])
    centre_K, spread_K = found_TK.mean(0), found_TK.std(0)
    scale_K = np.where(spread_K > 0, spread_K, 1.0)
    layout = _Layout(len(evidence.tasks), len(methods), len(signals))
    design_RP = layout.design(task_R, method_R, (found_TK - centre_K) / scale_K)
    seen = _Seen(design_RP, bound_R, censored_R.astype(bool), runs_R.astype(np.float64))
    theta_DP, tau_D, sigma_D = _gibbs(layout, seen, draws, burn_in, rng(seed, "evidence fit"))
    return Outcomes(
        tuple(methods),
        tuple(signals),
        centre_K,
        scale_K,
        found_TK.min(0),
        found_TK.max(0),
        theta_DP[:, layout.levels],
        theta_DP[:, layout.slopes].reshape(draws, layout.methods, layout.signals),
        tau_D,
        sigma_D,
    )


def _read(signals: Mapping[str, float], names: Sequence[str]) -> Floats:
    """Signals in order; among graded answers that differ some are worth more, so they do not count as many right ones."""
    known = {**signals, "many_answers": signals["many_answers"] * (1 - signals["graded"])}
    return np.array([known[name] for name in names], np.float64)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a vector of P parameters has a, b, β and u."""

    tasks: int
    methods: int
    signals: int

    @property
    def levels(self) -> slice:
        return slice(self.tasks, self.tasks + self.methods)

    @property
    def slopes(self) -> slice:
        return slice(self.levels.stop, self.levels.stop + self.methods * self.signals)

    @property
    def own(self) -> slice:
        return slice(self.slopes.stop, self.slopes.stop + self.tasks * self.methods)

    def design(self, task_R: NDArray[np.int64], method_R: NDArray[np.int64], x_TK: Floats) -> Floats:
        """Row i holds what run i's y is the sum of."""
        rows_R = np.arange(len(task_R))
        design_RP = np.zeros((len(task_R), self.own.stop))
        design_RP[rows_R, task_R] = 1
        design_RP[rows_R, self.tasks + method_R] = 1
        for k in range(self.signals):
            design_RP[rows_R, self.slopes.start + method_R * self.signals + k] = x_TK[task_R, k]
        design_RP[rows_R, self.own.start + task_R * self.methods + method_R] = 1
        return design_RP


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was seen: `bound_R` is log rollouts, a lower bound of them where `censored_R`; the mean of `runs_R` runs."""

    design_RP: Floats
    bound_R: Floats
    censored_R: NDArray[np.bool_]
    runs_R: Floats


def _gibbs(
    layout: _Layout, seen: _Seen, draws: int, burn_in: int, random: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """Draws of all parameters, of τ and of σ."""
    weighted_RP, censored_R = seen.design_RP * seen.runs_R[:, None], seen.censored_R
    gram_PP = seen.design_RP.T @ weighted_RP
    y_R, variance_P = seen.bound_R.copy(), np.full(layout.own.stop, _VAGUE)
    variance_P[layout.levels] = _PLAIN
    omega2, tau2, sigma2 = (scale / (shape - 1) for shape, scale in (_SLOPES, _TASKS, _SEEDS))
    kept: list[tuple[Floats, float, float]] = []
    for at in range(burn_in + draws):
        variance_P[layout.slopes], variance_P[layout.own] = omega2, tau2
        # A draw of N(A⁻¹b, A⁻¹) is A⁻¹(b + η) with η ~ N(0, A) (Papandreou & Yuille 2010): one system to solve.
        noise_R, noise_P = random.standard_normal(len(y_R)), random.standard_normal(len(variance_P))
        seen_P = weighted_RP.T @ (y_R / sigma2 + noise_R / np.sqrt(seen.runs_R * sigma2))
        precision_PP = gram_PP / sigma2 + np.diag(1 / variance_P)
        theta_P = np.linalg.solve(precision_PP, seen_P + noise_P / np.sqrt(variance_P))
        mean_R = seen.design_RP @ theta_P
        omega2 = _variance(theta_P[layout.slopes], _SLOPES, random)
        tau2 = _variance(theta_P[layout.own], _TASKS, random)
        sigma2 = _variance((y_R - mean_R) * np.sqrt(seen.runs_R), _SEEDS, random)
        sd_C = np.sqrt(sigma2 / seen.runs_R[censored_R])
        y_R[censored_R] = _above(seen.bound_R[censored_R], mean_R[censored_R], sd_C, random)
        if at >= burn_in:
            kept.append((theta_P, tau2**0.5, sigma2**0.5))
    theta, tau, sigma = zip(*kept, strict=True)
    return np.array(theta), np.array(tau), np.array(sigma)


def _variance(values: Floats, prior: tuple[float, float], random: np.random.Generator) -> float:
    """A draw of the variance of values around 0, under an inverse gamma prior of this shape and scale."""
    shape, scale = prior
    return float((scale + (values**2).sum() / 2) / random.gamma(shape + len(values) / 2))


def _above(bound_C: Floats, mean_C: Floats, sd_C: Floats, random: np.random.Generator) -> Floats:
    """Draws of N(mean, sd²) between a bound each and `_OPEN` above it, by the inverse of the smaller tail."""
    low_C = (bound_C - mean_C) / sd_C
    high_C = low_C + _OPEN / sd_C
    drawn: list[float] = []
    for low, high, u in zip(low_C, high_C, random.random(len(low_C)), strict=True):
        within = (low, high, 1 - u) if low + high > 0 else (-high, -low, u)
        drawn.append(_between(*within) * (1 if low + high > 0 else -1))
    return mean_C + sd_C * np.array(drawn)


def _between(near: float, far: float, u: float) -> float:
    """The u-quantile, of the larger first, of N(0, 1) between two numbers whose sum is not negative."""
    if near > _FAR:
        return near
    most, least = erfc(near / sqrt(2)) / 2, erfc(far / sqrt(2)) / 2
    return -_NORMAL.inv_cdf(min(max(least + u * (most - least), _LEAST), _MOST))
