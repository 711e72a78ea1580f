"""Shares of rollouts by cause, with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.seeds import rng
from rollalloc.lab.waste.groups import NO_STEP, SAME, Groups

CAUSES = ("taught", "all_right", "all_wrong", "all_truncated", "all_alike", "single", "unscored")
LEAST_PROMPTS = 10  # with fewer prompts, a bootstrap over prompts is unreliable
_BLOCK = 1 << 22  # random draws held in memory at once
_ONE_BY_ONE = 4096  # up to this many prompts are drawn one by one


@dataclass(frozen=True, slots=True)
class Share:
    """A share with its 95% interval; the interval is None if there are too few prompts."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Shares:
    """Rollouts of a log by cause.

    Attributes:
        rollouts: for each of `CAUSES`; they sum to the rollouts logged.
        shares: the same as shares; they sum to 1.
        wasted: the share that taught nothing.
        prompts: number of distinct prompts.
        groups: number of visits.
    """

    rollouts: dict[str, int]
    shares: dict[str, Share]
    wasted: Share
    prompts: int
    groups: int


def shares_of(groups: Groups, *, seed: int = 0, resamples: int = 1000) -> Shares:
    """Count the rollouts of groups by what they taught: those with equal rewards taught nothing, for one of several causes.

    The interval is a percentile bootstrap over prompts, since visits of one prompt are alike. For a share of 0 or 1, all
    resamples are equal; then the open end is the exact one-sided 97.5% limit over prompts, 1 - 0.025^(1/P).

    Args:
        groups: at least one, with at least one rollout each.
        seed: of the bootstrap.
        resamples: of the bootstrap.

    Raises:
        ValueError: no groups.
    """
    if not len(groups):
        raise ValueError("expected at least one group of rollouts, got none")
    counts_PC = _counts(groups)
    prompts = len(counts_PC)
    total_C = counts_PC.sum(0)
    share_C = total_C / total_C.sum()
    shares_RC = _resampled(counts_PC, seed, resamples) if prompts >= LEAST_PROMPTS else None
    by_cause = {
        cause: Share(float(share), None if shares_RC is None else _interval(share, shares_RC[:, column], prompts))
        for column, (cause, share) in enumerate(zip(CAUSES, share_C, strict=True))
    }
    taught = by_cause["taught"]
    wasted = None if taught.interval is None else (1 - taught.interval[1], 1 - taught.interval[0])
    return Shares(
        rollouts={cause: int(count) for cause, count in zip(CAUSES, total_C, strict=True)},
        shares=by_cause,
        wasted=Share(1 - taught.value, wasted),
        prompts=prompts,
        groups=len(groups),
    )


def _counts(groups: Groups) -> NDArray[np.float64]:
    """Rollouts of each prompt by cause, shape (P, C), sorted by prompt key so that the log's order does not matter."""
    row_of = np.zeros(len(groups.keys), np.int64)
    row_of[groups.visited] = np.arange(len(groups.visited))
    begin_V, cells = row_of[groups.prompt_V] * len(CAUSES), len(groups.visited) * len(CAUSES)
    scored_X = np.bincount(begin_V + _cause(groups), groups.scored_V, cells)
    unscored_X = np.bincount(begin_V + CAUSES.index("unscored"), groups.size_V - groups.scored_V, cells)
    return (scored_X + unscored_X).astype(np.float64).reshape(-1, len(CAUSES))


def _cause(groups: Groups) -> NDArray[np.int64]:
    """The cause of each visit's scored rollouts, as an index into `CAUSES`; the first that applies."""
    lowest, highest = _range(groups)
    all_truncated_V = (groups.truncated_V >= groups.scored_V) & (groups.scored_V > 0)
    holds = {
        "taught": groups.mixed_V,
        "single": groups.scored_V == 1,
        "all_right": groups.low_V >= highest - SAME,
        "all_truncated": all_truncated_V,
        "all_wrong": groups.low_V <= lowest + SAME,
    }
    return np.select(list(holds.values()), [CAUSES.index(cause) for cause in holds], CAUSES.index("all_alike"))


def _range(groups: Groups) -> tuple[float, float]:
    """The lowest and highest reward of a log; a single value counts as right if it is above 0."""
    if not groups.scored_V.any():
        return 0.0, 1.0
    low, high = float(np.nanmin(groups.low_V)), float(np.nanmax(groups.high_V))
    if high - low > SAME:
        return low, high
    return (low - 1, high) if high > 0 else (low, low + 1)


def _resampled(counts_PC: NDArray[np.float64], seed: int, resamples: int) -> NDArray[np.float64]:
    """Shares of each cause in resamples of the prompts, shape (R, C).

    Prompts with equal counts are drawn together as one kind, which gives the same distribution; a large log has few kinds.
    Small logs are drawn prompt by prompt, so that their printed digits stay the same as in earlier versions.
    """
    prompts = len(counts_PC)
    kinds_KC, times_K = counts_PC, np.ones(prompts)
    if prompts > _ONE_BY_ONE:
        kinds_KC, times_K = np.unique(counts_PC, axis=0, return_counts=True)
    random = rng(seed, "waste shares")
    rows: list[NDArray[np.float64]] = []
    block = max(1, _BLOCK // len(kinds_KC))
    for begin in range(0, resamples, block):
        drawn_RK = random.multinomial(prompts, times_K / prompts, min(block, resamples - begin))
        rows.append(drawn_RK @ kinds_KC)
    totals_RC = np.concatenate(rows)
    return totals_RC / totals_RC.sum(1, keepdims=True)


def _interval(share: float, resampled_R: NDArray[np.float64], prompts: int) -> tuple[float, float]:
    low, high = np.quantile(resampled_R, (0.025, 0.975)).tolist()
    open_end = 1 - 0.025 ** (1 / prompts)
    if share <= 0:
        high = open_end
    if share >= 1:
        low = 1 - open_end
    return low, high


def drift(groups: Groups, *, seed: int = 0) -> tuple[Share, Share] | None:
    """The wasted share of the first and last third of the steps; None if the log is too short."""
    known_V = groups.step_V != NO_STEP
    steps = np.unique(groups.step_V[known_V])
    if len(steps) < 6:
        return None
    third = len(steps) // 3
    early_V, late_V = known_V & (groups.step_V <= steps[third - 1]), known_V & (groups.step_V >= steps[-third])
    return shares_of(groups.take(early_V), seed=seed).wasted, shares_of(groups.take(late_V), seed=seed).wasted
