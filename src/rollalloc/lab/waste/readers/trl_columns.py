"""Which columns of TRL's log are rewards.

Rewards stand before what else was logged, and the logged advantages follow their sum.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.lab.waste.groups import Groups
from rollalloc.lab.waste.readers.shared import names

_VARIES, _MOVES = 1e-6, 3e-4  # deviations within a group beyond which rewards differ, and advantages are not 0
_PROPORTIONAL = 0.998  # squared correlation within a group
_DISAGREE = 0.05  # share of the groups that may disagree with their advantages

Floats = NDArray[np.float64]
Visits = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The reward of each rollout, NaN where it has none, and what a reader should know of it."""

    reward_R: Floats
    notes: list[str]


class Columns:
    """Scores and advantages as they are read, and the choice of the columns that are rewards.

    Args:
        named: the columns that the user named as rewards; empty: to be found out.
        weights: of the columns of rewards, 1 each by default.
    """

    def __init__(self, named: tuple[str, ...], weights: tuple[float, ...] | None) -> None:
        self._named, self._weights = named, weights
        self._kinds: dict[tuple[str, ...], int] = {}  # the columns of a file, numbered
        self._scores: list[array[float]] = []  # by kind, row after row
        self._kind_R, self._advantage_R = array("l"), array("d")

    def add(self, columns: tuple[str, ...], scores: Sequence[float], advantage: float | None) -> None:
        """A rollout with the scores of its file's columns."""
        kind = self._kinds.get(columns)
        if kind is None:
            kind = self._kinds[columns] = len(self._kinds)
            self._scores.append(array("d"))
        self._kind_R.append(kind)
        self._scores[kind].extend(scores)
        self._advantage_R.append(np.nan if advantage is None else advantage)

    def chosen(self, groups: Groups) -> Chosen:
        """The reward of each rollout: the sum of the columns that the logged advantages follow.

        Of each kind of file, the first columns are tried, one, two and so on, then each by itself (the others may have
        weight 0). Where no advantages tell, or none follows, all columns are added.

        Args:
            groups: all that was read, in the order of `add`.

        Raises:
            ValueError: not as many columns as weights.
        """
        visit_R = np.repeat(np.arange(len(groups)), groups.size_V)
        kind_R, advantage_R = np.array(self._kind_R), np.array(self._advantage_R)
        reward_R = np.full(len(visit_R), np.nan)
        sums: dict[tuple[str, ...], None] = {}
        doubts: dict[str, None] = {}
        disagree, told = 0, 0
        for columns, kind in self._kinds.items():
            some_R = kind_R == kind
            score_RK = np.array(self._scores[kind]).reshape(-1, len(columns))
            tried = [
                (taken, total_R, *_disagreeing(total_R, advantage_R[some_R], visit_R[some_R]))
                for taken, total_R in self._candidates(columns, score_RK)
            ]
            most = max(of for *_, of in tried)
            follows = [one for one in tried if most and one[2] <= _DISAGREE * most]
            known = [one for one in tried if not most and one[0] in sums]
            everything = max(tried, key=lambda one: len(one[0]))
            taken, reward_R[some_R], wrong, of = [*follows, *known, everything][0]
            disagree, told = disagree + wrong, told + of
            sums[taken] = None
            rest = [name for name in columns if name not in taken]
            if follows and rest:
                doubts[f"not added to the reward, since the advantages do not follow it: {names(rest)}"] = None
            elif len(tried) > 1 and not follows:
                doubts[
                    f"the log does not tell which of {names(columns)} are rewards, and all are added; --reward names them"
                ] = None
        weighted = "" if self._weights is None else f", times {self._weights}"
        said = [f"reward: {' and in other files '.join(names(one, ' + ') for one in sums)}{weighted}", *doubts]
        if disagree:
            said.append(
                f"in {disagree} of {told} groups the logged advantages do not follow the reward: give the trainer's "
                "reward_weights as --weights, its num_generations as --group-size, or name the columns with --reward"
            )
        return Chosen(reward_R, said)

    def _candidates(self, columns: tuple[str, ...], score_RK: Floats) -> Iterator[tuple[tuple[str, ...], Floats]]:
        """The columns that may be the rewards, with their weighted sum."""
        if self._weights is not None or self._named:
            weights = self._weights or (1.0,) * len(columns)
            if len(weights) > len(columns) or (self._named and len(weights) != len(columns)):
                raise ValueError(f"--weights: expected one for each of {names(columns)}, got {len(weights)}")
            yield columns[: len(weights)], _summed(score_RK[:, : len(weights)], np.array(weights))
            return
        for taken in range(1, len(columns) + 1):
            yield columns[:taken], _summed(score_RK[:, :taken], np.ones(taken))
        for at in range(1, len(columns)):
            yield columns[at : at + 1], _summed(score_RK[:, at : at + 1], np.ones(1))


def _summed(score_RK: Floats, weight_K: Floats) -> Floats:
    """The weighted sum of the scores that there are, as TRL has it; NaN where there is none."""
    missing_RK = np.isnan(score_RK)
    return np.where(missing_RK.all(1), np.nan, np.where(missing_RK, 0.0, score_RK) @ weight_K)


def _disagreeing(reward_R: Floats, advantage_R: Floats, visit_R: Visits) -> tuple[int, int]:
    """Groups whose advantages are not proportional to the reward less its mean, and groups in which either differs."""
    known_R = ~np.isnan(reward_R) & ~np.isnan(advantage_R)
    _, group_R = np.unique(visit_R[known_R], return_inverse=True)
    x_R, y_R = reward_R[known_R], advantage_R[known_R]
    count_V = np.maximum(np.bincount(group_R), 1)
    x_R, y_R = (each_R - (np.bincount(group_R, each_R) / count_V)[group_R] for each_R in (x_R, y_R))
    xx_V, yy_V, xy_V = (np.bincount(group_R, each_R) for each_R in (x_R * x_R, y_R * y_R, x_R * y_R))
    varies_V, moves_V = xx_V > count_V * _VARIES**2, yy_V > count_V * _MOVES**2
    follows_V = (xy_V > 0) & (xy_V * xy_V >= _PROPORTIONAL * xx_V * yy_V)
    told_V = (count_V > 1) & (varies_V | moves_V)
    wrong_V = told_V & ((varies_V != moves_V) | ~follows_V)
    return int(wrong_V.sum()), int(told_V.sum())
