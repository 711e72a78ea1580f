"""The share of rollouts that taught nothing, by cause, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.seeds import rng
from rollalloc.waste.groups import Group

CAUSES = ("taught", "all_right", "all_wrong", "all_truncated", "all_alike", "single", "unscored")
LEAST_PROMPTS = 10  # below it, resampling prompts says nothing about other prompts
_SAME = 1e-9
_BLOCK = 1 << 22  # draws held at a time


@dataclass(frozen=True, slots=True)
class Share:
    """A share with its 95% interval; None where there are too few prompts for one."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the rollouts of a log went.

    Attributes:
        rollouts: by cause, all of `CAUSES`; they sum to the rollouts logged.
        shares: the same as shares of all rollouts; they sum to 1.
        wasted: the share that taught nothing.
        prompts: different prompts.
        groups: visits.
    """

    rollouts: dict[str, int]
    shares: dict[str, Share]
    wasted: Share
    prompts: int
    groups: int


def shares_of(groups: Sequence[Group], *, seed: int = 0, resamples: int = 1000) -> Shares:
    """Count the rollouts of groups whose rewards do not differ, by cause.

    The interval is the percentile bootstrap over prompts: visits of one prompt are resampled together, because they are
    alike. Where a share is 0 or 1, whose resamples are all the same, the end that is open is the exact one-sided 97.5%
    limit over prompts, 1 - 0.025^(1/P).

    Args:
        groups: at least one.
        seed: of the resampling.
        resamples: of the bootstrap.

    Raises:
        ValueError: no groups.
    """
    if not groups:
        raise ValueError("expected at least one group of rollouts, got none")
    lowest, highest = _range(groups)
    index = {prompt: row for row, prompt in enumerate(sorted({group.prompt for group in groups}))}
    counts_PC = np.zeros((len(index), len(CAUSES)))
    for group in groups:
        for cause, rollouts in causes_of(group, lowest, highest).items():
            counts_PC[index[group.prompt], CAUSES.index(cause)] += rollouts
    total_C = counts_PC.sum(0)
    share_C = total_C / total_C.sum()
    shares_RC = _resampled(counts_PC, seed, resamples) if len(index) >= LEAST_PROMPTS else None
    by_cause = {
        cause: Share(float(share), None if shares_RC is None else _interval(share, shares_RC[:, column], len(index)))
        for column, (cause, share) in enumerate(zip(CAUSES, share_C, strict=True))
    }
    taught = by_cause["taught"]
    wasted = None if taught.interval is None else (1 - taught.interval[1], 1 - taught.interval[0])
    return Shares(
        rollouts={cause: int(count) for cause, count in zip(CAUSES, total_C, strict=True)},
        shares=by_cause,
        wasted=Share(1 - taught.value, wasted),
        prompts=len(index),
        groups=len(groups),
    )


def causes_of(group: Group, lowest: float, highest: float) -> dict[str, int]:
    """Rollouts of a group by cause.

    Args:
        group: at least one rollout.
        lowest: reward in the log; groups that all have it are wrong.
        highest: reward in the log; groups that all have it are right.
    """
    scored_G = group.rewards_G[~np.isnan(group.rewards_G)]
    found = {"unscored": group.rewards_G.size - scored_G.size}
    if scored_G.size:
        found[_fate(scored_G, group.truncated, lowest, highest)] = scored_G.size
    return found


def mixed(rewards_G: NDArray[np.float64]) -> bool:
    """Whether scored rewards differ."""
    return bool(rewards_G.size and rewards_G.max() - rewards_G.min() > _SAME)


def _fate(scored_G: NDArray[np.float64], truncated: int | None, lowest: float, highest: float) -> str:
    if mixed(scored_G):
        return "taught"
    if scored_G.size == 1:
        return "single"
    if scored_G[0] >= highest - _SAME:
        return "all_right"
    if truncated is not None and truncated >= scored_G.size:
        return "all_truncated"
    return "all_wrong" if scored_G[0] <= lowest + _SAME else "all_alike"


def _range(groups: Sequence[Group]) -> tuple[float, float]:
    """The lowest and highest reward of a log; where there is but one, it is a right answer if it is above 0."""
    values = np.concatenate([group.rewards_G for group in groups])
    values = values[~np.isnan(values)]
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if high - low > _SAME:
        return low, high
    return (low - 1, high) if high > 0 else (low, low + 1)


def _resampled(counts_PC: NDArray[np.float64], seed: int, resamples: int) -> NDArray[np.float64]:
    """Shares of each cause in resamples of the prompts, shape (R, C)."""
    prompts = len(counts_PC)
    random = rng(seed, "waste shares")
    rows: list[NDArray[np.float64]] = []
    block = max(1, _BLOCK // prompts)
    for begin in range(0, resamples, block):
        size = min(block, resamples - begin)
        drawn_RP = random.multinomial(prompts, np.full(prompts, 1 / prompts), size)
        rows.append(drawn_RP @ counts_PC)
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


def drift(groups: Sequence[Group], *, seed: int = 0) -> tuple[Share, Share] | None:
    """The wasted share of the first and of the last third of the steps; None where the log is too short to tell."""
    steps = sorted({group.step for group in groups if group.step is not None})
    if len(steps) < 6:
        return None
    first, last = steps[len(steps) // 3 - 1], steps[-(len(steps) // 3)]
    early = [group for group in groups if group.step is not None and group.step <= first]
    late = [group for group in groups if group.step is not None and group.step >= last]
    return shares_of(early, seed=seed).wasted, shares_of(late, seed=seed).wasted
