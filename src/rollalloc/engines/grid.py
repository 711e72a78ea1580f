"""The grid of evaluations: held-out accuracy at fixed points of rollouts paid, the same points for every recipe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from math import isfinite
from typing import Any

from rollalloc.core.allocator import MetricError
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.engines.behaviour import Behaviour
from rollalloc.engines.evaluation import Evaluation, HeldOut, evaluate
from rollalloc.engines.narrowing import narrowed
from rollalloc.engines.sampler import Generation
from rollalloc.engines.settings import Settings
from rollalloc.engines.state import Counters
from rollalloc.rewards.function import Outcome

log = logging.getLogger(__name__)

Submit = Callable[[EncodedPrompts, Sequence[tuple[int, Generation]]], Future[list[Outcome]]]
_ROUNDING = 1e-6  # a mean of float32 scores may lie beyond 1 by as much
_POLITE_S = 0.1  # how often an evaluation looks whether it is to be given up, while it waits for scores


class Interrupted(Exception):
    """An evaluation was given up because the run was asked to stop."""


class Grid:
    """Evaluates a policy at the points of the grid.

    Args:
        behaviour: gives the policy as it is when it is evaluated.
        heldout: prompts to evaluate on; None: nothing is evaluated.
        settings: of the trainer.
        counters: of the run; holds the next point and the accuracies so far.
        submit: begins to score samples.
        give_up: asked while scores are waited for, which may hang by the hundred; True raises `Interrupted`.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        heldout: HeldOut | None,
        settings: Settings,
        counters: Counters,
        submit: Submit,
        give_up: Callable[[], bool],
    ) -> None:
        self.behaviour, self.heldout, self.settings, self.counters = behaviour, heldout, settings, counters
        self._submit, self._give_up = submit, give_up
        # Version of the weights, what was found, and whether the policy has become narrower.
        self._latest: tuple[int, Evaluation, str | None] | None = None

    def until(self, rollouts: int, version: int) -> Iterator[dict[str, Any]]:
        """What is found at each point, up to that many rollouts, that was not evaluated yet; see `at`."""
        while self.heldout is not None and self.counters.next_at <= rollouts:
            yield self.at(self.counters.next_at, version, self.heldout)
            self.counters.next_at += self.settings.eval_every

    def last(self, version: int) -> Iterator[dict[str, Any]]:
        """What is found at the end of the run, which is no point of the grid."""
        if self.heldout is not None:
            yield self.at(None, version, self.heldout)

    def at(self, at: int | None, version: int, heldout: HeldOut) -> dict[str, Any]:
        """What is found at one point, as fields of a line of the metrics. The same weights are not evaluated twice.

        Raises:
            Interrupted: it was given up.
            FloatingPointError: the weights diverged.
            MetricError: there is a target, but what is measured is no accuracy.
        """
        started = time.perf_counter()
        if self._latest is None or self._latest[0] != version:
            found = self.measure(heldout)
            self._latest = version, found, self._narrowed(found, heldout)
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
            "eval_unscored": found.unscored,
            "eval_seconds": round(time.perf_counter() - started, 4),
        }

    def confirmed(self) -> float | None:
        """The latest accuracy, where the last two weights evaluated on the grid are at the target; else None."""
        target, latest = self.settings.target, [accuracy for _, accuracy in self.counters.accuracies[-2:]]
        return latest[-1] if target is not None and len(latest) == 2 and min(latest) >= target else None

    def _narrowed(self, found: Evaluation, heldout: HeldOut) -> str | None:
        is_known = "narrower" in self.counters.watched
        narrower, self.counters.watched = narrowed(self.counters.watched, found, len(heldout.prompts.tokens))
        if narrower is not None and not is_known:
            self.counters.watched["narrower"] = 1.0
            log.warning(
                "the policy is becoming narrower: %s. A lower learning rate keeps more of it, as failures at full weight do "
                "(neg=1, where the recipe weighs them)",
                narrower,
            )
        return narrower

    def measure(self, heldout: HeldOut) -> Evaluation:
        """Evaluate the weights as they are."""
        settings = self.settings
        found = evaluate(
            self.behaviour.policy(),
            heldout,
            self._score,
            sampling=settings.sampling,
            samples=settings.eval_samples,
            seed=settings.seed,
        )
        if found.accuracy is None:
            log.warning("no held-out sample has a score (%d unscored); the accuracy is not known", found.unscored)
        elif not isfinite(found.accuracy):
            raise FloatingPointError(
                f"the held-out accuracy is {found.accuracy} after {self.counters.made['optimizer_steps']} optimizer steps: "
                "the weights diverged; try a smaller learning rate"
            )
        elif settings.target is not None and not -_ROUNDING <= found.accuracy <= 1 + _ROUNDING:
            raise MetricError(
                f"the target {settings.target} is an accuracy, but the mean held-out metric is {found.accuracy:g}; "
                'let the reward function return {"score": reward, "acc": 1.0 if right else 0.0}, or set no target'
            )
        return found

    def _score(self, prompts: EncodedPrompts, made: Sequence[tuple[int, Generation]]) -> list[Outcome]:
        future = self._submit(prompts, made)
        while not future.done():
            if self._give_up():
                future.cancel()
                raise Interrupted
            wait([future], _POLITE_S)
        return future.result()
