"""Shares of rollouts by cause, with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.teaching import SAME
from rollalloc.waste.groups import NO_STEP, Groups

CAUSES = ("taught", "all_right", "all_wrong", "all_truncated", "all_limited", "all_alike", "single", "unscored")
LEAST_PROMPTS = 10  # minimum number of prompts for an interval
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Share:
    """A share with its 95% interval. The interval is None if there are too few prompts."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Shares:
    """Rollouts of a log by cause.

    Attributes:
        rollouts: number of rollouts for each of `CAUSES`. The sum is the number of logged rollouts.
        shares: share of the rollouts for each of `CAUSES`. The sum is 1.
        wasted: the share of rollouts without a learning signal.
        prompts: number of different prompts.
        groups: number of visits.
    """

    rollouts: dict[str, int]
    shares: dict[str, Share]
    wasted: Share
    prompts: int
    groups: int


def share_of(part_V: NDArray[Any], whole_V: NDArray[Any], prompt_V: NDArray[Any]) -> Share | None:
    """Σ part / Σ whole with its 95% interval. The interval is over prompts, because visits of the same prompt are alike.

        r ± 1.96 √(P / (P − 1) Σ_p (part_p − r whole_p)²) / Σ whole

    If the share is 0, the upper end is the exact one-sided 97.5% limit over prompts, 1 − .025^(1/P). If the share is 1, the
    lower end is .025^(1/P).

    Args:
        part_V: the part of each visit, in [0, whole].
        whole_V: the whole of each visit, at least 0.
        prompt_V: the prompt of each visit.

    Returns:
        The share; None if the whole is 0.
    """
    if not whole_V.sum() > 0:
        return None
    part_P, whole_P = np.bincount(prompt_V, part_V), np.bincount(prompt_V, whole_V)
    part_P, whole_P = part_P[whole_P > 0], whole_P[whole_P > 0]
    whole, prompts = float(whole_P.sum()), len(whole_P)
    value = float(part_P.sum()) / whole
    if prompts < LEAST_PROMPTS:
        return Share(value, None)
    # In this form the sums are of whole numbers, so the result does not depend on the order of the prompts.
    spread = float(part_P @ part_P - 2 * value * (part_P @ whole_P) + value**2 * (whole_P @ whole_P))
    half = _Z * (prompts / (prompts - 1) * max(0.0, spread)) ** 0.5 / whole
    open_end = 1 - 0.025 ** (1 / prompts)
    low = 1 - open_end if value >= 1 else max(0.0, value - half)
    high = open_end if value <= 0 else min(1.0, value + half)
    return Share(value, (low, high))


def shares_of(groups: Groups) -> Shares:
    """Count the rollouts of groups by cause. A group with equal rewards gave no learning signal; the cause says why.

    Args:
        groups: at least one, with at least one rollout each.

    Raises:
        ValueError: there are no groups.
    """
    if not len(groups):
        raise ValueError("expected at least one group of rollouts, got none")
    cause_V = _cause(groups)
    count_CV = {cause: np.where(cause_V == at, groups.scored_V, 0) for at, cause in enumerate(CAUSES)}
    count_CV["unscored"] += groups.size_V - groups.scored_V
    shares = {
        cause: share
        for cause, count_V in count_CV.items()
        if (share := share_of(count_V, groups.size_V, groups.prompt_V)) is not None  # there are rollouts
    }
    taught = shares["taught"]
    ends = None if taught.interval is None else (1 - taught.interval[1], 1 - taught.interval[0])
    return Shares(
        rollouts={cause: int(count_V.sum()) for cause, count_V in count_CV.items()},
        shares=shares,
        wasted=Share(1 - taught.value, ends),
        prompts=len(np.unique(groups.prompt_V)),
        groups=len(groups),
    )


def _cause(groups: Groups) -> NDArray[np.int64]:
    """The cause of each visit's scored rollouts, as an index into `CAUSES`: the first cause that applies."""
    lowest, highest = _range(groups)
    all_truncated_V = (groups.truncated_scored_V >= groups.scored_V) & (groups.scored_V > 0)
    holds = {
        "taught": groups.mixed_V,
        "single": groups.scored_V == 1,
        "all_right": groups.low_V >= highest - SAME,
        "all_limited": (groups.limited_scored_V >= groups.scored_V) & (groups.scored_V > 0),
        "all_truncated": all_truncated_V,
        "all_wrong": groups.low_V <= lowest + SAME,
    }
    return np.select(list(holds.values()), [CAUSES.index(cause) for cause in holds], CAUSES.index("all_alike"))


def _range(groups: Groups) -> tuple[float, float]:
    """The lowest and highest reward of a log. If all rewards are equal, those above 0 count as right, others as wrong."""
    if not groups.scored_V.any():
        return 0.0, 1.0
    low, high = float(np.nanmin(groups.low_V)), float(np.nanmax(groups.high_V))
    if high - low > SAME:
        return low, high
    return (low - 1, high) if high > 0 else (low, low + 1)


def drift(groups: Groups) -> tuple[Share, Share] | None:
    """The wasted share of the first and last third of the steps; None if the log is too short."""
    known_V = groups.step_V != NO_STEP
    steps = np.unique(groups.step_V[known_V])
    if len(steps) < 6:
        return None
    third = len(steps) // 3
    early_V, late_V = known_V & (groups.step_V <= steps[third - 1]), known_V & (groups.step_V >= steps[-third])
    return shares_of(groups.take(early_V)).wasted, shares_of(groups.take(late_V)).wasted
