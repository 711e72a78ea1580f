"""How rollouts ended: the events for the core, metrics and counts, and the lines of the rollout log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rollalloc.core.allocator import Allocator, MetricError
from rollalloc.core.events import Cancelled, Done, Failed, NoScores, Order
from rollalloc.core.packing import exact_keys
from rollalloc.files.regular import append_text
from rollalloc.rewards.function import Outcome, Scored, Unscored

SCORE_AND_ACC = (
    'Let the reward function return {"score": reward, "acc": 1.0 if right else 0.0}, then resume. `acc` is the metric, and '
    "`score` may be any finite number. Without `acc`, the metric is `score`"
)
_ROUNDING = 1e-3  # tolerance for log-probabilities above 0 and for metrics outside [0, 1]
_REASONS = 20  # number of reasons counted separately; a reason may quote the completion, so there may be very many
_OTHER_REASONS = "other reasons"
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Outcomes:
    """Counts and metrics of rollouts that ended.

    Attributes:
        unscored: rollouts without a score since the run began, by reason.
        ended: number of rollouts in this process that ended without being cancelled.
        truncated: number of rollouts in `ended` that the length limit cut off.
        no_rate: the first metric outside [0, 1] in this process; None if all metrics were inside.
    """

    def __init__(self) -> None:
        self.unscored: dict[str, int] = {}
        self.ended, self.truncated = 0, 0
        self.no_rate: float | None = None
        # (reward, metric, truncated, tokens) of each rollout scored since the last call of `figures`:
        self._waves: list[tuple[float, float, bool, int]] = []

    def add(self, outcome: Outcome, *, truncated: bool, tokens: int) -> None:
        """Count a rollout that ended without being cancelled."""
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
        """Metrics of all rollouts scored since the last call. Rollouts that are not trained on are included, because means
        over a selection would be biased.
        """
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
        """The most frequent reason for a missing score; None if no rollout lacks a score."""
        told_apart = {reason: count for reason, count in self.unscored.items() if reason != _OTHER_REASONS}
        return max(told_apart, key=told_apart.__getitem__, default=None)

    def state(self) -> dict[str, Any]:
        """The complete state, as plain data."""
        return {"waves": self._waves, "unscored": dict(self.unscored)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        exact_keys(state, ("waves", "unscored"), "rollouts")
        self._waves, self.unscored = list(state["waves"]), dict(state["unscored"])


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """The result of a rollout that was scored, failed or was stopped. All engines and drivers use it.

    Args:
        rollout: its id.
        outcome: its score, or the reason why it has none. Ignored if the rollout was cancelled.
        tokens: number of tokens that the model generated.
        version: version of the weights at its first token.
        last_version: version of the weights at its last token; None: the same as `version`.
        truncated: whether it reached the length limit.
        cancelled: whether it was stopped.
        uncertainty: Σ (1 - π)² over its tokens, see `uncertainty_of`; None if the engine returns no log-probabilities.
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
        """Whether the rollout may be trained on: it has a score and was not cancelled."""
        return not self.cancelled and isinstance(self.outcome, Scored)


def stopped(rollout: int, version: int, tokens: int = 0) -> RolloutResult:
    """Return the result of a rollout that was stopped after some tokens."""
    return RolloutResult(rollout=rollout, outcome=Unscored("stopped"), tokens=tokens, version=version, cancelled=True)


def event_of(result: RolloutResult) -> Cancelled | Done | Failed:
    """Return the event that reports this result to the core."""
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
    """Return Σ (1 - π)² over a rollout's tokens, where π is the probability of the sampled token (see `Done`).

    Args:
        logprobs_T: log-probabilities of the sampled tokens, without the tokens of tool answers.

    Returns:
        The sum; None if a log-probability is unknown (not finite, or above 0 by more than rounding).
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
        allocator: receives one event per result.
        results: the results, in the order of the events.
        outcomes: counts the results of rollouts that were not cancelled. None: nothing is counted here.
        remedy: advice to the user, for the error about a metric outside [0, 1].

    Raises:
        MetricError: a metric is outside [0, 1], and the recipe reads metrics as success rates. The message ends with
            `remedy`.
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
    """Append the most frequent reason for a missing score to the reason why a run ended."""
    return f"{why}. Most rollouts have no score, mostly because: {reason}"


def no_scores(why: str) -> NoScores:
    """Return the error for a run that ended because scores were missing."""
    return NoScores(
        f"{why}. Nothing after the newest checkpoint is saved; repair the reward, then resume (from the start, if there is "
        "no checkpoint)"
    )


class RolloutLog:
    """The file `rollouts.jsonl`, with one line of JSON per rollout.

    Args:
        path: the file. None: nothing is written.
        keep: number of rollouts to keep for `taken`, the first ones after each call.
        most: maximum number of tokens of every rollout, whatever its order's limit. None: not known.
    """

    def __init__(self, path: Path | None, keep: int = 0, most: int | None = None) -> None:
        self._path, self._keep, self._most = path, keep, most
        self._lines: list[str] = []
        self._kept: list[dict[str, Any]] = []

    @property
    def wanted(self) -> bool:
        """Whether the next rollout is used. If not, callers need not decode its text."""
        return self._path is not None or len(self._kept) < self._keep

    def taken(self) -> list[dict[str, Any]]:
        """The first rollouts, as many as are kept, since the last call."""
        taken, self._kept = self._kept, []
        return taken

    def add(
        self,
        result: RolloutResult,
        order: Order,
        key: str,
        text: str,
        versions: Sequence[tuple[int, int]] = (),
        *,
        prompt: str | None = None,
        tokens_known: bool = True,
    ) -> None:
        """Add a rollout of the prompt with this key. Call `flush` to write it.

        `prompt` is the prompt's text, if it is known; the first rollout of each order is logged with it.

        `versions` has the (version, tokens) spans of a rollout during which the weights changed. If `tokens_known` is False,
        the number of tokens is logged as null.
        """
        outcome = result.outcome
        scored, reason = (outcome, None) if isinstance(outcome, Scored) else (None, outcome.reason)
        line = {
            "rollout": result.rollout,
            "prompt": order.prompt,
            "key": key,
            "group": order.group,
            "stage": order.stage,
            "version": result.version,
            **({"versions": versions} if len(versions) > 1 else {}),
            "reward": scored and scored.reward,
            "metric": scored and scored.metric,
            "tokens": result.tokens if tokens_known else None,
            "truncated": result.truncated,
            # Only a limit that can stop a rollout, so that one that is truncated below it was stopped by the recipe.
            **({} if order.limit is None or order.limit >= (self._most or inf) else {"limit": order.limit}),
            "unscored": reason,
            "text": text,
        }
        if prompt is not None and result.rollout == order.rollouts[0]:
            line["prompt_text"] = prompt
        if len(self._kept) < self._keep:
            self._kept.append(line | {"prompt_text": prompt})
        if self._path is not None:
            self._lines.append(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Write the lines that were added."""
        if self._path is not None and self._lines:
            append_text(self._path, "".join(self._lines))
        self._lines = []
