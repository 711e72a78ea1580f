"""How rollouts ended: the event that the core is told, metrics and counts, and the lines of the rollout log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rollalloc.core.allocator import Allocator, MetricError
from rollalloc.core.errors import NoScores
from rollalloc.core.events import Cancelled, Done, Failed, Order
from rollalloc.core.packing import exact_keys
from rollalloc.files.atomic import append_text
from rollalloc.rewards.function import Outcome, Scored, Unscored

SCORE_AND_ACC = (
    'Let the reward function return {"score": reward, "acc": 1.0 if right else 0.0}: the metric is `acc`, or `score` where '
    "there is no `acc`, and the score may be any finite number. Then resume"
)
_ROUNDING = 1e-3  # that a log-probability may lie above 0, and a metric outside [0, 1]
_REASONS = 20  # told apart in the metrics: an exception may quote the completion, so that each is another
_OTHER_REASONS = "other reasons"
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Outcomes:
    """What came of rollouts.

    Attributes:
        unscored: rollouts without a score since the run began, by reason.
        ended: rollouts that ended by themselves in this process.
        truncated: of them, those that the length limit cut off.
        no_rate: the first metric outside [0, 1] in this process, which is no success rate; None: there was none.
    """

    def __init__(self) -> None:
        self.unscored: dict[str, int] = {}
        self.ended, self.truncated = 0, 0
        self.no_rate: float | None = None
        # Reward, metric, truncated and tokens of each rollout scored since the last batch:
        self._waves: list[tuple[float, float, bool, int]] = []

    def add(self, outcome: Outcome, *, truncated: bool, tokens: int) -> None:
        """Count a rollout that ended by itself."""
        self.ended += 1
        self.truncated += truncated
        if isinstance(outcome, Scored):
            self._waves.append((outcome.reward, outcome.metric, truncated, tokens))
            if self.no_rate is None and not -_ROUNDING <= outcome.metric <= 1 + _ROUNDING:
                self.no_rate = outcome.metric
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
        """Go on from what `state` gave."""
        exact_keys(state, ("waves", "unscored"), "rollouts")
        self._waves, self.unscored = list(state["waves"]), dict(state["unscored"])


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """A rollout that was scored, failed or was stopped, as every engine and driver tells it.

    Args:
        rollout: its id.
        outcome: its score, or why it has none. Ignored if the rollout was cancelled.
        tokens: how many the model generated.
        version: of the weights at its first token.
        last_version: of the weights at its last token; None: the same version.
        truncated: it hit the length limit.
        cancelled: it was stopped because the core said so.
        uncertainty: see `uncertainty_of`; None if the engine returned no log-probabilities.
    """

    rollout: int
    outcome: Outcome
    tokens: int
    version: int
    last_version: int | None = None
    truncated: bool = False
    cancelled: bool = False
    uncertainty: float | None = None

    @property
    def is_scored(self) -> bool:
        """It ended by itself and has a score, so that it may be trained on."""
        return not self.cancelled and isinstance(self.outcome, Scored)


def stopped(rollout: int, version: int) -> RolloutResult:
    """The result of a rollout that was stopped before it had any token."""
    return RolloutResult(rollout=rollout, outcome=Unscored("stopped"), tokens=0, version=version, cancelled=True)


def event_of(result: RolloutResult) -> Cancelled | Done | Failed:
    """The event that tells the core of this rollout."""
    if result.cancelled:
        return Cancelled(result.rollout, result.tokens)
    if isinstance(result.outcome, Scored):
        return Done(
            result.rollout,
            result.outcome.reward,
            result.outcome.metric,
            result.tokens,
            result.version,
            result.last_version,
            result.truncated,
            result.uncertainty,
        )
    return Failed(result.rollout, result.outcome.reason, result.tokens)


def uncertainty_of(logprobs_T: ArrayLike) -> float | None:
    """Σ (1 - π)² over a rollout's tokens, π the probability with which each was sampled (see `Done`).

    Args:
        logprobs_T: of the sampled tokens; those of tools' answers left out.

    Returns:
        None where one is unknown (not finite, or above 0 by more than rounding).
    """
    logprob_T = np.asarray(logprobs_T, np.float64)
    if not np.isfinite(logprob_T).all() or (logprob_T > _ROUNDING).any():
        return None
    return float(np.square(np.expm1(np.minimum(logprob_T, 0.0))).sum())


def tell(
    allocator: Allocator,
    results: Sequence[RolloutResult],
    *,
    outcomes: Outcomes | None = None,
    remedy: str = SCORE_AND_ACC,
) -> None:
    """Tell the allocator how rollouts ended.

    Args:
        allocator: is told one event per result.
        results: in the order in which they are told.
        outcomes: counts the results of rollouts that were not cancelled; None: they are counted elsewhere.
        remedy: what to do if the metric is no success rate.

    Raises:
        MetricError: a metric outside [0, 1] where the recipe takes it for a success rate; with the remedy.
    """
    if outcomes is not None:
        for result in results:
            if not result.cancelled:
                outcomes.add(result.outcome, truncated=result.truncated, tokens=result.tokens)
    try:
        allocator.tell([event_of(result) for result in results])
    except MetricError as error:
        raise MetricError(f"{error}. {remedy}") from None


def mostly_unscored(why: str, reason: str | None) -> str:
    """Why a run is over in which most rollouts have no score, with their commonest reason."""
    return f"{why}. Most rollouts have no score, mostly because: {reason}"


def no_scores(why: str) -> NoScores:
    """The error of a run that is over for want of scores."""
    return NoScores(f"{why}. Nothing after the newest checkpoint is saved; repair the reward, then resume")


class RolloutLog:
    """`rollouts.jsonl`: a line of JSON a rollout; without a path nothing is written."""

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
            append_text(self._path, "".join(self._lines))
        self._lines = []
