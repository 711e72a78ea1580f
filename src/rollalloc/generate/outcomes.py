"""What came of rollouts: figures of those that were scored, counts of those that were not, and the line of each in a log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.core.allocator import Allocator, MetricError
from rollalloc.core.events import Event, Order
from rollalloc.core.packing import exact_keys
from rollalloc.rewards.function import Outcome, Scored

_HOW_TO_SET_THE_METRIC = (
    'The reward function sets it beside the reward: return {"score": reward, "acc": 1.0 if right else 0.0}. Once it does, '
    "the run can be resumed (--resume)"
)
_REASONS = 20  # told apart in the metrics: an exception may quote the completion, so that each is another
_OTHER_REASONS = "other reasons"
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Outcomes:
    """What came of rollouts.

    Attributes:
        unscored: rollouts without a score by reason, since the run began.
    """

    def __init__(self) -> None:
        self.unscored: dict[str, int] = {}
        # Reward, metric, truncated and tokens of each rollout scored since the last batch:
        self._waves: list[tuple[float, float, bool, int]] = []

    def add(self, outcome: Outcome, *, truncated: bool, tokens: int) -> None:
        """Count a rollout that ended by itself."""
        if isinstance(outcome, Scored):
            self._waves.append((outcome.reward, outcome.metric, truncated, tokens))
            return
        reason = outcome.reason
        if reason not in self.unscored and len(self.unscored) >= _REASONS:
            reason = _OTHER_REASONS
        self.unscored[reason] = self.unscored.get(reason, 0) + 1

    def figures(self) -> dict[str, Any]:
        """What was scored since the last call, trained on or not: a filtered mean would mislead."""
        waves, self._waves = self._waves, []
        if not waves:
            return {"reward_mean": None, "metric_mean": None, "truncated": None, "lengths": None}
        reward_R, metric_R, truncated_R, tokens_R = np.array(waves, np.float64).T
        return {
            "reward_mean": float(reward_R.mean()),
            "metric_mean": float(metric_R.mean()),
            "truncated": float(truncated_R.mean()),
            "lengths": {
                "count": len(waves),
                "truncated": int(truncated_R.sum()),
                "quantiles": np.quantile(tokens_R, _QUANTILES).tolist(),
            },
        }

    def commonest_failure(self) -> str | None:
        """Why most of the rollouts without a score have none; None where all have one."""
        told_apart = {reason: count for reason, count in self.unscored.items() if reason != _OTHER_REASONS}
        return max(told_apart, key=told_apart.__getitem__, default=None)

    def state(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {"waves": self._waves, "unscored": dict(self.unscored)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: keys missing or unknown.
        """
        exact_keys(state, ("waves", "unscored"), "rollouts")
        self._waves, self.unscored = list(state["waves"]), dict(state["unscored"])


def tell(allocator: Allocator, events: Sequence[Event]) -> None:
    """Tell what came of rollouts.

    Raises:
        MetricError: a metric outside [0, 1] where the recipe takes it for a success rate; says how to set it.
    """
    try:
        allocator.tell(events)
    except MetricError as error:
        raise MetricError(f"{error}. {_HOW_TO_SET_THE_METRIC}") from None


class RolloutLog:
    """`rollouts.jsonl`: a line of JSON a rollout.

    Args:
        path: of the file, which grows; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[str] = []

    @property
    def wanted(self) -> bool:
        """Whether anything is written; spares making texts that nobody reads."""
        return self._path is not None

    def add(
        self,
        rollout: int,
        order: Order,
        key: str,
        version: int,
        outcome: Outcome,
        *,
        tokens: int,
        truncated: bool,
        text: str,
        versions: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Take down a rollout; `flush` writes it. `versions`: (version, tokens) of one that an update found running."""
        scored, reason = (outcome, None) if isinstance(outcome, Scored) else (None, outcome.reason)
        line = {
            "rollout": rollout,
            "prompt": order.prompt,
            "key": key,
            "group": order.group,
            "stage": order.stage,
            "version": version,
            **({"versions": versions} if len(versions) > 1 else {}),
            "reward": scored and scored.reward,
            "metric": scored and scored.metric,
            "tokens": tokens,
            "truncated": truncated,
            "unscored": reason,
            "text": text,
        }
        self._lines.append(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Write what was taken down."""
        if self._path is not None and self._lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(self._lines)
        self._lines = []
