"""A profile of a run of rollalloc: from its own records where its log lacks rollouts, and its recipe as the present setting.

A framework's log has only the rollouts that a recipe trained on. It selects them by their rewards, so success rates in the
log are not those of the policy. The run's state counts all scored rollouts of each prompt.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.teaching import SAME
from rollalloc.files.text import visible
from rollalloc.waste.groups import NO_STEP, NOT_SAID, Groups, Log
from rollalloc.waste.texts import WIDTH

_SELECTED = ("out_of_band", "stale", "surplus", "unselected", "cancelled")  # causes of not training on a scored rollout


def with_all_rollouts(log: Log, *, from_step: int | None = None, threshold: float | None = None) -> Log:
    """The log, or one with all rollouts that the run scored, if the recipe selected the logged ones by their rewards.

    The other log is made from the run's records: a group has all rollouts of a prompt, over all versions of the weights.
    If the run has no usable records, the log is returned with the reason in `selected`, and what to do in `remedy`.

    Args:
        log: the log to profile.
        from_step: the first step to profile; None: all. The records have no steps.
        threshold: the lowest reward of a right rollout, if the user set it. The records have sums of rewards.
    """
    why = _selects(log)
    if not why or log.groups is None:
        return log
    [run, *others] = log.runs or [None]
    if others:
        return _unknown(log, why, "give the folder of one run")
    if run is None or run.attempts_N is None or run.successes_N is None:
        return _unknown(log, why, "give the run's folder with a checkpoint, which counts all rollouts")
    if len(values := _values(log.groups)) > 2:  # of graded rewards, a sum does not tell how many were right
        return _unknown(log, f"{why}. Its checkpoint has only the sums of these graded rewards")
    options = {"--from-step": from_step, "--threshold": threshold}
    if given := [name for name, value in options.items() if value is not None]:
        return _unknown(
            log, why, f"leave out {' and '.join(given)}, because the run's checkpoint counts all steps together"
        )
    known = _right(run.attempts_N, run.successes_N, values)
    if known is None:
        return _unknown(log, f"{why}. Its checkpoint has other rewards than the log")
    right_P, count_P = known
    failed = run.accounts.get("failed", 0)
    counted = f"{count_P.sum():,} scored rollouts of {len(count_P):,} prompts over all versions of the weights"
    notes = [
        f"{why}; so all figures are from the records of {visible(run.source)}, of {counted}; they have no texts and lengths"
    ]
    if failed:
        notes.append(f"{failed:,} rollouts have no score; the records do not tell of which prompts")
    return replace(log, groups=_groups(right_P, count_P, failed), complete=True, notes=notes)


def _unknown(log: Log, why: str, remedy: str = "") -> Log:
    """The log, with the reason why it gives no verdict. `remedy` is what may be done instead of sampling the model."""
    sample = "sample the model (rollalloc advise --model MODEL --prompts FILE)"
    return replace(log, selected=why, remedy=f"{remedy}; or {sample}" if remedy else sample)


def _selects(log: Log) -> str:
    """Why the logged rollouts are not a fair sample of those that were paid; empty if they are."""
    if log.complete or log.groups is None:
        return ""
    left_out = _count(log, _SELECTED)
    # Groups without variance that were trained on are in the log. If it has none, they were dropped, or their rewards
    # differ in the log alone, because the log has another reward than the run: then it has as many rollouts as were scored.
    if log.groups.mixed_V.all():
        alike = _count(log, ("zero_variance",))
        lacking = left_out + alike + _count(log, ("trained",)) - len(log.groups.rewards_R)
        left_out += max(0, min(alike, lacking))
    left_out = left_out or (0 if log.runs else log.skipped)
    if not left_out:
        return ""
    return f"the log lacks {left_out:,} rollouts that the recipe did not train on, and it chose the others by their rewards"


def _count(log: Log, causes: tuple[str, ...]) -> int:
    """The number of rollouts with these causes, by the accounts of the log's runs."""
    return sum(run.accounts.get(cause, 0) for run in log.runs for cause in causes)


def _values(groups: Groups) -> NDArray[np.float64]:
    """The distinct rewards of a log, ascending."""
    return np.unique(groups.rewards_R[~np.isnan(groups.rewards_R)])


def _right(
    attempts_N: NDArray[np.int64], successes_N: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Right and scored rollouts of each prompt that was visited; None if the sums are not of these rewards."""
    visited_N = attempts_N > 0
    count_P, sum_P = attempts_N[visited_N], successes_N[visited_N]
    low, high = (0.0, 1.0) if len(values) < 2 or set(values) == {0.0, 1.0} else (float(values[0]), float(values[1]))
    right_P = (sum_P - low * count_P) / (high - low)
    whole_P = np.rint(right_P)
    possible = np.abs(right_P - whole_P).max(initial=0.0) < SAME * max(1, count_P.max(initial=1))
    possible = possible and bool(((whole_P >= 0) & (whole_P <= count_P)).all())
    return (whole_P.astype(np.int64), count_P) if possible and len(count_P) else None


def _groups(right_P: NDArray[np.int64], count_P: NDArray[np.int64], failed: int) -> Groups:
    """A group for each prompt, with all its rollouts: right ones, wrong ones, and an even part of the failed ones."""
    prompts = len(count_P)
    size_P = count_P + failed // prompts + (np.arange(prompts) < failed % prompts)
    begin_P = np.cumsum(size_P) - size_P
    place_R = np.arange(int(size_P.sum())) - np.repeat(begin_P, size_P)
    rewards_R = (place_R < np.repeat(right_P, size_P)).astype(np.float64)
    nothing_R = np.full(len(place_R), NOT_SAID)
    return Groups(
        keys=tuple(map(str, range(prompts))),
        prompt_V=np.arange(prompts),
        step_V=np.full(prompts, NO_STEP),
        begin_V=begin_P,
        first_V=size_P,
        rewards_R=np.where(place_R < np.repeat(count_P, size_P), rewards_R, np.nan),
        truncated_R=nothing_R,
        limited_R=np.zeros(len(place_R), np.int64),
        tokens_R=nothing_R,
        characters_R=nothing_R,
        answer_R=np.zeros(len(place_R), np.int64),
        features_PD=np.full((prompts, WIDTH), np.nan, np.float32),
    )
