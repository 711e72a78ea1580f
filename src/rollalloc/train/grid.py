"""The grid of evaluations: held-out accuracy at fixed points of rollouts paid, the same points for every recipe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import asdict
from math import isfinite
from typing import Any

from rollalloc.core.allocator import MetricError
from rollalloc.train.config import Config
from rollalloc.train.evaluation import Evaluation, narrowed
from rollalloc.train.notices import counted
from rollalloc.train.state import Counters

log = logging.getLogger(__name__)

_ROUNDING = 1e-6  # a mean of float32 scores may lie beyond 1 by as much
_POLITE_S = 0.1  # how often an evaluation looks whether it is to be given up, while it waits for scores


class Interrupted(Exception):
    """An evaluation was given up because the run was asked to stop."""


class Grid:
    """Evaluates a policy at the points of the grid.

    Attributes:
        measure: evaluates the policy as it is now.
        prompts: how many are held out; 0: nothing is evaluated.
        config: of the run.
        counters: of the run.
        on_first: is told what the first evaluation of the run found.
    """

    def __init__(self, measure: Callable[[], Evaluation], prompts: int, config: Config, counters: Counters) -> None:
        self.measure, self.prompts, self.config, self.counters = measure, prompts, config, counters
        self.on_first: Callable[[Evaluation], None] | None = None
        # Version of the weights, what was found, and whether the policy has become narrower.
        self._latest: tuple[int, Evaluation, str | None] | None = None

    def until(self, rollouts: int, version: int) -> Iterator[dict[str, Any]]:
        """What is found at each point, up to that many rollouts, that was not evaluated yet; see `at`."""
        while self.is_due(rollouts):
            yield self.at(self.counters.next_at, version)
            self.counters.next_at += self.config.eval_every

    def is_due(self, rollouts: int) -> bool:
        """Whether there is a point, up to that many rollouts, that was not evaluated yet."""
        return self.prompts > 0 and self.counters.next_at <= rollouts

    def last(self, version: int) -> Iterator[dict[str, Any]]:
        """What is found at the end of the run, which is no point of the grid."""
        if self.prompts:
            yield self.at(None, version)

    def at(self, at: int | None, version: int) -> dict[str, Any]:
        """What is found at one point, as fields of a line of the metrics. The same weights are not evaluated twice."""
        started = time.perf_counter()
        if self._latest is None or self._latest[0] != version:
            found = self._checked(self.measure())
            if self.on_first is not None and self._latest is None and not version:
                self.on_first(found)
            self._latest = version, found, self._narrowed(found)
        _, found, narrower = self._latest
        known = self.counters.accuracies
        if at is not None and found.accuracy is not None and [version] != [before for before, _ in known[-1:]]:
            known.append((version, found.accuracy))
        return {
            "at": at,
            "accuracy": found.accuracy,
            "standard_error": found.standard_error,
            "breadth": None if found.breadth is None else asdict(found.breadth),
            "narrower": narrower,
            "eval_unscored": sum(found.unscored.values()),
            "eval_seconds": round(time.perf_counter() - started, 4),
        }

    def confirmed(self) -> float | None:
        """The latest accuracy, where the last two weights evaluated on the grid are at the target; else None."""
        target, latest = self.config.target, [accuracy for _, accuracy in self.counters.accuracies[-2:]]
        return latest[-1] if target is not None and len(latest) == 2 and min(latest) >= target else None

    def _narrowed(self, found: Evaluation) -> str | None:
        is_known = "narrower" in self.counters.watched
        narrower, self.counters.watched = narrowed(self.counters.watched, found, self.prompts)
        if narrower is not None and not is_known:
            self.counters.watched["narrower"] = 1.0
            remedy = (
                "A lower learning rate keeps more of it, as failures at full weight do (neg=1, where the recipe has it)"
            )
            log.warning("the policy is becoming narrower: %s. %s", narrower, remedy)
        return narrower

    def _checked(self, found: Evaluation) -> Evaluation:
        config = self.config
        if found.accuracy is None:
            if self.counters.batches:  # of the first evaluation `on_first` says more
                log.warning("no held-out sample has a score: %s", counted(found.unscored))
        elif not isfinite(found.accuracy):
            what = f"the held-out accuracy is {found.accuracy}, the weights diverged"
            raise FloatingPointError(f"{what}; try a smaller learning rate")
        elif config.target is not None and not -_ROUNDING <= found.accuracy <= 1 + _ROUNDING:
            raise MetricError(
                f"the target {config.target} is an accuracy, but the mean held-out metric is {found.accuracy:g}; "
                'let the reward function return {"score": reward, "acc": 1.0 if right else 0.0}, or set no target'
            )
        return found


def patient(future: Future[Any], give_up: Callable[[], bool]) -> Any:
    """The result of what is waited for, e.g. scores, which may hang; `Interrupted` once it is to be given up."""
    while not future.done():
        if give_up():
            future.cancel()
            raise Interrupted
        wait([future], _POLITE_S)
    return future.result()
