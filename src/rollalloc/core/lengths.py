"""Lengths of a prompt's rollouts, of which those that were stopped are known to be at least so long, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import erfc, exp, log, pi, sqrt
from operator import mul
from typing import NamedTuple

STEP = 0.3  # weight of the newest visit in what is remembered of a prompt's lengths (DARTS, arXiv 2605.30859)
# Deviations of log-lengths that are believed. Where most rollouts are cut off, the few that are seen may look like the
# start of a tail that no model writes: at 1 the longest of a hundred is already ten times the median.
_LEAST, _MOST = 0.01, 1.0
_ROUNDS, _CLOSE = 50, 1e-3  # of EM, at most; and the change, in deviations, from which on it has converged
_FAR = 25.0  # deviations above the mean from which on the normal tail is its own asymptote


class LogLengths(NamedTuple):
    """A log-normal law of lengths: mean and variance of their logarithms, in nats."""

    mean: float
    var: float


def deviation(lengths: Sequence[int]) -> float:
    """Population standard deviation, in whole numbers as far as they go: numpy's costs more than all else of a visit."""
    count, total = len(lengths), sum(lengths)
    return sqrt(count * sum(map(mul, lengths, lengths)) - total * total) / count


def see(lengths: Sequence[int], bounds: Sequence[int], before: LogLengths | None) -> tuple[float, LogLengths]:
    """What a visit says of the deviation of its prompt's lengths, and what is believed of their law after it.

        law:        log x ~ N(μ, s²), the μ and s² that are the expectations of log x and (log x - μ)² over the visit, given
                    what is known of each rollout and the law itself, STEP of them, and of the law before, 1 - STEP
        deviation:  √(mean of E[x²] - (mean of E[x])²), with x = the length where it is known, and x | x > bound where not

    So of a visit of which nothing was stopped the deviation is the population's, whatever the law. The law's equations are
    those of maximum likelihood under right-censoring, solved by EM, with the past for data as fixed in size as the state:
    Dempster, Laird and Rubin, Journal of the Royal Statistical Society B 39, 1977; Cappé and Moulines, B 71, 2009. Kaplan
    and Meier's estimate needs no law, but says nothing beyond the last rollout that was let end: where all late ones are
    stopped, nothing at all of the tail. s is held in [0.01, 1].

    Args:
        lengths: in tokens, of those that ended; at least one.
        bounds: tokens of those that were stopped, above 0.
        before: the law believed before; None: none.

    Returns:
        The deviation in tokens, and the law.
    """
    logs = [log(max(length, 1)) for length in lengths]
    cut = [(log(bound), bound, many) for bound, many in Counter(filter(None, bounds)).items()]
    law = _fit(logs, cut, before)
    if not bounds:
        return deviation(lengths), law
    first, second = float(sum(lengths)), float(sum(length * length for length in lengths))
    for at, bound, many in cut:
        mean, square = _beyond(law, at, bound)
        first, second = first + many * mean, second + many * square
    count = len(lengths) + len(bounds)
    return sqrt(max(0.0, second / count - (first / count) ** 2)), law


def _fit(logs: list[float], cut: list[tuple[float, int, int]], before: LogLengths | None) -> LogLengths:
    """The law's fixed point."""
    sum_1, sum_2 = sum(logs), sum(each * each for each in logs)
    count = len(logs) + sum(many for *_, many in cut)
    law = before
    if law is None or not cut:  # to begin with, the bounds pass for lengths
        law = _believed(
            (sum_1 + sum(many * at for at, _, many in cut)) / count,
            (sum_2 + sum(many * at * at for at, _, many in cut)) / count,
            before,
        )
    for _ in range(_ROUNDS if cut else 0):
        mean, std = law.mean, sqrt(law.var)
        more_1 = more_2 = 0.0
        for at, _, many in cut:
            above = std * _hazard((at - mean) / std)
            more_1 += many * (mean + above)
            more_2 += many * (mean * mean + law.var + above * (at + mean))
        law = _believed((sum_1 + more_1) / count, (sum_2 + more_2) / count, before)
        if abs(law.mean - mean) + abs(sqrt(law.var) - std) < _CLOSE * std:
            break
    return law


def _believed(first: float, second: float, before: LogLengths | None) -> LogLengths:
    """The law of these moments of the logarithms and of those before."""
    if before is not None:
        first = before.mean + STEP * (first - before.mean)
        kept = before.var + before.mean * before.mean
        second = kept + STEP * (second - kept)
    return LogLengths(first, min(max(second - first * first, _LEAST**2), _MOST**2))


def _hazard(at: float) -> float:
    """The standard normal's density over its tail."""
    return at + 1 / at if at > _FAR else sqrt(2 / pi) * exp(-at * at / 2) / erfc(at / sqrt(2))


def _beyond(law: LogLengths, at: float, bound: int) -> tuple[float, float]:
    """E[x | x > bound] and E[x² | x > bound]; `at` is the bound's logarithm."""
    std = sqrt(law.var)
    far = (at - law.mean) / std
    if far > _FAR:
        return float(bound), float(bound) ** 2
    tail = erfc(far / sqrt(2))
    mean = exp(law.mean + law.var / 2) * erfc((far - std) / sqrt(2)) / tail
    return mean, exp(2 * law.mean + 2 * law.var) * erfc((far - 2 * std) / sqrt(2)) / tail
