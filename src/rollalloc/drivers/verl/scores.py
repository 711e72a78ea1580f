"""Reads the result of verl's reward loop, by the same rules as rollalloc's own commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollalloc.rewards.function import Scored, Unscored, to_outcome

ACC = "acc"  # verl's name for the field of the metric; a reward function may leave this field out


def read_score(score: Any, extra: Mapping[str, Any], metric: str = ACC) -> Scored | Unscored:
    """A rollout's reward and metric, or the reason why the rollout has no score.

    Args:
        score: the reward for training; a number, or a tensor with one number.
        extra: the other values that the reward function returned, including the metric for selection. If `unscored` is True,
            there is no score, and `reason` says why (see `rewards.frameworks.Reward`).
        metric: name of the metric. If this is `acc` and `extra` lacks it, the metric is the score. If another metric is
            missing, the rollout has no score.
    """
    if extra.get("unscored"):
        return Unscored(str(extra.get("reason") or "reward function gave no reason"))
    if metric != ACC and extra.get(metric) is None:
        fields = ", ".join(sorted(extra)) or "a number alone"
        return Unscored(f"trainer.v1.rollalloc.metric={metric}, but the reward function returned {fields}")
    return to_outcome({"score": _plain(score), "acc": _plain(extra.get(metric))})


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
