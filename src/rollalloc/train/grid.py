"""The grid of evaluations: held-out accuracy is measured after the same numbers of rollouts for every recipe."""

from __future__ import annotations

import logging
from dataclasses import asdict
from math import isfinite
from typing import Any

from rollalloc.core.allocator import MetricError
from rollalloc.train.config import Config
from rollalloc.train.evaluation import Evaluation
from rollalloc.train.notices import counted
from rollalloc.train.state import Counters

log = logging.getLogger(__name__)

_ROUNDING = 1e-6  # tolerance: a mean of float32 scores may be slightly above 1


class Grid:
    """Says when an evaluation is due, and stores the newest evaluation.

    Attributes:
        prompts: number of held-out prompts. 0: no evaluation.
        latest: the newest version evaluated in this process, or None.
    """

    def __init__(self, prompts: int, config: Config, counters: Counters) -> None:
        self.prompts = prompts
        self.latest: int | None = None
        self._config, self._counters = config, counters
        self._evaluation = Evaluation(None, None)

    def is_due(self, rollouts: int) -> bool:
        """Whether some grid point up to this number of rollouts was not evaluated yet."""
        return self.prompts > 0 and self._counters.next_at <= rollouts

    def add(self, version: int, evaluation: Evaluation) -> None:
        """Store an evaluation of these weights.

        Raises:
            FloatingPointError: the accuracy is not finite.
            MetricError: there is a target, but the mean metric is not an accuracy.
        """
        accuracy, target = evaluation.accuracy, self._config.target
        if accuracy is None:
            if self._counters.batches:  # `Notices` warns about the first evaluation
                log.warning("no held-out sample has a score: %s", counted(evaluation.unscored))
        elif not isfinite(accuracy):
            raise FloatingPointError(
                f"the held-out accuracy is {accuracy}: the weights diverged; try a smaller learning rate"
            )
        elif target is not None and not -_ROUNDING <= accuracy <= 1 + _ROUNDING:
            raise MetricError(
                f"the target {target} is an accuracy, but the mean held-out metric is {accuracy:g}; "
                'let the reward function return {"score": reward, "acc": 1.0 if right else 0.0}, or set no target'
            )
        self.latest, self._evaluation = version, evaluation

    def record(self, at: int | None) -> dict[str, Any]:
        """Record the newest evaluation for a grid point. Return it as fields for a line of the metrics.

        Args:
            at: the grid point. None: the end of the run. An evaluation at the end does not count for the target.
        """
        version, evaluation, accuracies = self.latest, self._evaluation, self._counters.accuracies
        assert version is not None, "record follows add"
        is_new = not accuracies or accuracies[-1][0] != version
        if at is not None and evaluation.accuracy is not None and is_new:
            accuracies.append((version, evaluation.accuracy))
        return {
            "at": at,
            "accuracy": evaluation.accuracy,
            "standard_error": evaluation.standard_error,
            "breadth": None if evaluation.breadth is None else asdict(evaluation.breadth),
            "eval_unscored": sum(evaluation.unscored.values()),
        }

    def confirmed(self) -> float | None:
        """The newest accuracy, if the last two versions evaluated on the grid reached the target; otherwise None."""
        target, latest = self._config.target, [accuracy for _, accuracy in self._counters.accuracies[-2:]]
        return latest[-1] if target is not None and len(latest) == 2 and min(latest) >= target else None
