"""What verl's reward loop answers, read as rollalloc's own commands read a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollalloc.rewards.function import Scored, Unscored, to_outcome


def read_score(score: Any, extra: Mapping[str, Any]) -> Scored | Unscored:
    """A rollout's reward and metric, or why it has none.

    Args:
        score: what is trained on; a number, or a tensor of one.
        extra: what else the reward function returned: `acc`, which selection looks at, and, where it gave no score,
            `unscored` and its `reason`, as `frameworks.Reward` answers verl.
    """
    if extra.get("unscored"):
        return Unscored(str(extra.get("reason") or "reward function gave no reason"))
    return to_outcome({"score": _plain(score), "acc": _plain(extra.get("acc"))})


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
