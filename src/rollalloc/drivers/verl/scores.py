"""Reads the result of verl's reward loop by the same rules as rollalloc's own commands read a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollalloc.rewards.function import Scored, Unscored, to_outcome


def read_score(score: Any, extra: Mapping[str, Any]) -> Scored | Unscored:
    """A rollout's reward and metric, or why it has none.

    Args:
        score: the reward for training; a number, or a tensor with one number.
        extra: the other values that the reward function returned: `acc`, the metric for selection, and, if there is no
            score, `unscored` and its `reason`, as `rewards.frameworks.Reward` returns them to verl.
    """
    if extra.get("unscored"):
        return Unscored(str(extra.get("reason") or "reward function gave no reason"))
    return to_outcome({"score": _plain(score), "acc": _plain(extra.get("acc"))})


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
