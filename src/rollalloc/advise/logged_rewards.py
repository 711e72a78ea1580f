"""Describes a log's rewards, and says which recipes they rule out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollalloc.core.teaching import SAME
from rollalloc.waste.groups import Groups
from rollalloc.waste.shares import Share, share_of

_RIGHT = 0.5  # if all rewards of a log are equal, those of at least this number are right
_CONSTANT = 0.98  # rewards are nearly constant if at least this share has the same value
_MANY = 0.05  # warn if at least this share of rollouts has no score


@dataclass(frozen=True, slots=True)
class RewardReading:
    """A description of the rewards of a log.

    Attributes:
        low: the lowest reward.
        high: the highest reward.
        values: number of distinct rewards.
        threshold: rewards of at least this number are right.
        told: whether the user set the threshold.
        unscored: share of rollouts without a score.
        usual: share of scored rollouts with the most frequent value.
        rules_out: sentences that say which recipes these rewards rule out.
    """

    low: float
    high: float
    values: int
    threshold: float
    told: bool
    unscored: Share
    usual: Share
    rules_out: tuple[str, ...] = ()

    @property
    def graded(self) -> bool:
        """Whether there are more than two values and the user set no threshold."""
        return self.values > 2 and not self.told

    @property
    def outside(self) -> bool:
        """Whether some reward is outside [0, 1] and the user set no threshold."""
        return (self.low < -SAME or self.high > 1 + SAME) and not self.told


def read_rewards(groups: Groups, threshold: float | None) -> RewardReading:
    """Describe the rewards of a log.

    Args:
        groups: the logged groups.
        threshold: rewards of at least this number are right. None: a reward is right if it is nearer to the highest reward
            than to the lowest.

    Raises:
        ValueError: no rollout has a score.
    """
    known_R = ~np.isnan(groups.rewards_R)
    if not known_R.any():
        raise ValueError("expected rewards, but no rollout of the log has one; name another field with --reward")
    value_U, times_U = np.unique(groups.rewards_R[known_R], return_counts=True)
    low, high, usual = float(value_U[0]), float(value_U[-1]), float(value_U[times_U.argmax()])
    usual_V = np.add.reduceat(np.abs(groups.rewards_R - usual) <= SAME, groups.begin_V, dtype=np.float64)
    unscored = share_of(groups.size_V - groups.scored_V, groups.size_V, groups.prompt_V)
    constant = share_of(usual_V, groups.scored_V, groups.prompt_V)
    assert unscored is not None  # there are rollouts
    assert constant is not None  # some rollouts have a score
    right = threshold if threshold is not None else (low + high) / 2 if high - low > SAME else _RIGHT
    reading = RewardReading(low, high, len(value_U), right, threshold is not None, unscored, constant)
    return replace(reading, rules_out=tuple(_rules_out(reading)))


def _rules_out(reading: RewardReading) -> list[str]:
    reasons: list[str] = []
    if reading.outside:
        reasons.append(
            f"rewards from {reading.low:g} to {reading.high:g} are outside [0, 1]: methods that predict a success rate "
            "(foresight, SPO, MoPPS, VCRL) also need a metric in [0, 1]"
        )
    if reading.graded:
        reasons.append(
            f"rewards take {reading.values:,} values, and {reading.threshold:g} or more counts as right here: RAFT and "
            "foresight need to know what is right; set --threshold, or name a field of 0 and 1 with --reward"
        )
    if reading.usual.value >= _CONSTANT:
        reasons.append(
            f"{reading.usual.value:.1%} of the rewards are the same: no recipe learns much from them; other prompts, a "
            "stronger model or a reward with more distinct values would help"
        )
    if reading.unscored.value > _MANY:
        reasons.append(
            f"{reading.unscored.value:.1%} of the rollouts have no score: if the reward fails or times out, the rollout is "
            "paid for, and its group becomes smaller"
        )
    return reasons
