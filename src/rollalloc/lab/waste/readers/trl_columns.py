"""Find out which columns of TRL's log are rewards.

Rewards come before other logged columns, and the logged advantages are proportional to their centred sum.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.lab.waste.groups import Groups
from rollalloc.lab.waste.readers.shared import names

_VARIES, _MOVES = 1e-6, 3e-4  # standard deviations within a group above which rewards differ, and advantages are not 0
_PROPORTIONAL = 0.998  # squared correlation within a group that counts as proportional
_DISAGREE = 0.05  # share of groups whose advantages may disagree

Floats = NDArray[np.float64]
Visits = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The reward of each rollout, NaN if it has none, with notes for the reader."""

    reward_R: Floats
    notes: list[str]


class Columns:
    """Collects scores and advantages, and chooses the columns that are rewards.

    Args:
        named: columns that the user named as rewards; empty: find out.
        weights: weights of the reward columns, by default 1 each.
    """

    def __init__(self, named: tuple[str, ...], weights: tuple[float, ...] | None) -> None:
        self._named, self._weights = named, weights
        self._kinds: dict[tuple[str, ...], int] = {}  # distinct column lists → number
        self._scores: list[array[float]] = []  # scores by kind, row after row
        self._kind_R, self._advantage_R = array("l"), array("d")

    def add(self, columns: tuple[str, ...], scores: Sequence[float], advantage: float | None) -> None:
        """Add a rollout's scores and advantage."""
        kind = self._kinds.get(columns)
        if kind is None:
            kind = self._kinds[columns] = len(self._kinds)
            self._scores.append(array("d"))
        self._kind_R.append(kind)
        self._scores[kind].extend(scores)
        self._advantage_R.append(np.nan if advantage is None else advantage)

    def chosen(self, groups: Groups) -> Chosen:
        """The reward of each rollout: for each kind of file, the sum of columns that explains the logged advantages.

        If there are no usable advantages, or no sum explains them, all columns are added, with a note.

        Args:
            groups: all that was read, in the order of `add`.

        Raises:
            ValueError: the number of columns and weights differ.
        """
        visit_R = np.repeat(np.arange(len(groups)), groups.size_V)
        kind_R, advantage_R = np.array(self._kind_R), np.array(self._advantage_R)
        reward_R = np.full(len(visit_R), np.nan)
        sums: dict[str, None] = {}
        doubts: dict[str, None] = {}
        disagree = compared = 0
        for columns, kind in self._kinds.items():
            some_R = kind_R == kind
            score_RK = np.array(self._scores[kind]).reshape(-1, len(columns))
            best, wrong, of = self._followed(columns, score_RK, advantage_R[some_R], visit_R[some_R], sums)
            reward_R[some_R] = _summed(score_RK, best.weight_K)
            disagree, compared = disagree + wrong, compared + of
            sums[best.words(columns)] = None
            rest = [name for name, weight in zip(columns, best.weight_K, strict=True) if not weight]
            if rest and of and self._weights is None:
                doubts[f"not added to the reward, since the advantages do not follow it: {names(rest)}"] = None
            if not best.sure:
                doubts[
                    f"the log does not tell which of {names(columns)} are rewards, and all are added; --reward names them"
                ] = None
        notes = [f"reward: {' and in other files '.join(sums)}", *doubts]
        if disagree:
            notes.append(
                f"in {disagree} of {compared} groups the logged advantages do not follow the reward: give the trainer's "
                "reward_weights as --weights, its num_generations as --group-size, or name the columns with --reward"
            )
        return Chosen(reward_R, notes)

    def _followed(
        self, columns: tuple[str, ...], score_RK: Floats, advantage_R: Floats, visit_R: Visits, before: Container[str]
    ) -> tuple[_Sum, int, int]:
        """The sum that explains the advantages, the number of groups that contradict it, and the number that can tell.

        Candidates, in order: the first column, the first two, and so on; each column alone; the same with columns
        normalized within groups, as `multi_objective_aggregation="normalize_then_sum"` does; then the best fitting weights.
        """
        default = _Sum(np.ones(len(columns)), sure=len(columns) == 1 or bool(self._named))
        if self._weights is not None:
            default = _Sum(self._given(columns), sure=True)
        wrong, compared = _disagreeing(_summed(score_RK, default.weight_K), advantage_R, visit_R)
        if default.sure:
            return default, wrong, compared
        alone_KK, first_KK = np.eye(len(columns)), np.tri(len(columns))
        tried_NK = np.concatenate([first_KK, alone_KK[1:]])
        for scaled_RK in (score_RK, _normalized(score_RK, visit_R)):
            results = [_disagreeing(_summed(scaled_RK, weight_K), advantage_R, visit_R) for weight_K in tried_NK]
            most = max(of for _, of in results)
            for weight_K, (disagree, _) in zip(tried_NK, results, strict=True):
                if most and disagree <= _DISAGREE * most:
                    return _Sum(weight_K, sure=True), disagree, most
            if not most:  # no group can tell
                known = (candidate for candidate in map(_Sum, tried_NK) if candidate.words(columns) in before)
                return next(known, default), 0, 0
        weight_K = _fitted(score_RK, advantage_R, visit_R)
        disagree, of = _disagreeing(_summed(score_RK, weight_K), advantage_R, visit_R)
        return (_Sum(weight_K, sure=True), disagree, of) if disagree <= _DISAGREE * of else (default, wrong, compared)

    def _given(self, columns: tuple[str, ...]) -> Floats:
        """The user's weights for the first columns; 0 for the others."""
        weights = self._weights or ()
        if len(weights) > len(columns) or (self._named and len(weights) != len(columns)):
            raise ValueError(f"--weights: expected one for each of {names(columns)}, got {len(weights)}")
        return np.array([*weights, *[0.0] * (len(columns) - len(weights))])


@dataclass(frozen=True, slots=True)
class _Sum:
    """A weighted sum of columns, and whether it is known to be the reward."""

    weight_K: Floats
    sure: bool = True

    def words(self, columns: Sequence[str]) -> str:
        """The sum in words, e.g. right + 0.2 × short."""
        terms = [
            names([name]) if weight == 1 else f"{weight:.3g} × {names([name])}"
            for name, weight in zip(columns, self.weight_K.tolist(), strict=True)
            if weight
        ]
        return " + ".join(terms)


def _summed(score_RK: Floats, weight_K: Floats) -> Floats:
    """The weighted sum of the scores present, as TRL computes it; NaN if no weighted score is present."""
    score_RK, weight_K = score_RK[:, weight_K != 0], weight_K[weight_K != 0]
    missing_RK = np.isnan(score_RK)
    return np.where(missing_RK.all(1), np.nan, np.where(missing_RK, 0.0, score_RK) @ weight_K)


def _centred(value_R: Floats, visit_R: Visits) -> Floats:
    """A column minus its group mean over known values; 0 if nothing is known."""
    known_R = ~np.isnan(value_R)
    count_V = np.maximum(np.bincount(visit_R, known_R), 1)
    mean_V = np.bincount(visit_R, np.where(known_R, value_R, 0.0)) / count_V
    return np.where(known_R, value_R - mean_V[visit_R], 0.0)


def _normalized(score_RK: Floats, visit_R: Visits) -> Floats:
    """Each column, centred and divided by its standard deviation within the group."""
    columns: list[Floats] = []
    for score_R in score_RK.T:
        value_R = _centred(score_R, visit_R)
        count_V = np.maximum(np.bincount(visit_R, ~np.isnan(score_R)) - 1, 1)
        deviation_V = np.sqrt(np.bincount(visit_R, value_R * value_R) / count_V)
        columns.append(value_R / (deviation_V[visit_R] + 1e-4))
    return np.stack(columns, 1)


def _fitted(score_RK: Floats, advantage_R: Floats, visit_R: Visits) -> Floats:
    """The weights that explain the advantages best, scaled so that the largest is 1; weights below 1e-3 become 0.

    Only the direction of each group's advantages counts, since TRL may divide by a standard deviation. The fit minimizes
    the part of the centred sums X w that is orthogonal to them, Σ_g |X_g w − a_g (a_g · X_g w) / |a_g|²|² / Σ_g |X_g w|².
    """
    x_RK = np.stack([_centred(score_R, visit_R) for score_R in score_RK.T], 1)
    scale_K = np.sqrt(np.square(x_RK).sum(0))
    scale_K = np.where(scale_K > 0, scale_K, np.inf)
    x_RK = x_RK / scale_K
    a_R = _centred(advantage_R, visit_R)
    norm_V = np.bincount(visit_R, a_R * a_R)
    along_VK = np.stack([np.bincount(visit_R, a_R * x_R) for x_R in x_RK.T], 1)
    along_VK = along_VK / np.sqrt(np.where(norm_V > _MOVES**2, norm_V, np.inf))[:, None]
    whole_KK = x_RK.T @ x_RK
    root_L, axis_KL = np.linalg.eigh(whole_KK)
    kept_L = root_L > 1e-9
    half_KL = axis_KL[:, kept_L] / np.sqrt(root_L[kept_L])
    if not kept_L.any():
        return np.ones(score_RK.shape[1])
    left_KK = whole_KK - along_VK.T @ along_VK
    weight_K = half_KL @ np.linalg.eigh(half_KL.T @ left_KK @ half_KL)[1][:, 0] / scale_K
    weight_K = weight_K / weight_K[np.abs(weight_K).argmax()]
    weight_K = np.where(np.abs(weight_K) < 1e-3, 0.0, weight_K)
    return weight_K if along_VK.sum(0) @ (weight_K * np.where(np.isfinite(scale_K), scale_K, 0.0)) > 0 else -weight_K


def _disagreeing(reward_R: Floats, advantage_R: Floats, visit_R: Visits) -> tuple[int, int]:
    """Number of groups whose advantages are not proportional to the centred reward, and of groups where either varies.

    TRL gives a rollout without a reward the advantage 0.
    """
    known_R = ~np.isnan(advantage_R)
    _, group_R = np.unique(visit_R[known_R], return_inverse=True)
    reward_R, advantage_R = reward_R[known_R], advantage_R[known_R]
    scored_R = ~np.isnan(reward_R)
    count_V, scored_V = np.bincount(group_R), np.bincount(group_R, scored_R)
    x_R, y_R = _centred(reward_R, group_R), _centred(np.where(scored_R, advantage_R, np.nan), group_R)
    xx_V, yy_V, xy_V = (np.bincount(group_R, each_R) for each_R in (x_R * x_R, y_R * y_R, x_R * y_R))
    astray_V = np.bincount(group_R, ~scored_R & (np.abs(advantage_R) > _MOVES)) > 0
    varies_V, moves_V = xx_V > scored_V * _VARIES**2, yy_V > scored_V * _MOVES**2
    follows_V = (xy_V > 0) & (xy_V * xy_V >= _PROPORTIONAL * xx_V * yy_V)
    told_V = (count_V > 1) & (varies_V | moves_V | astray_V)
    wrong_V = told_V & ((varies_V != moves_V) | ~follows_V | astray_V)
    return int(wrong_V.sum()), int(told_V.sum())
