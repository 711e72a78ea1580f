"""DAPO's soft overlong penalty. It changes the reward that training uses, but not the metric."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollalloc.core.recipe import Recipe
from rollalloc.rewards.function import Outcome, Sample, Scored
from rollalloc.rewards.scorers import Scorer


def overlong_penalty(tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's penalty for long completions, to be added to the reward (Yu et al. 2025, arXiv 2503.14476, equation 13).

        penalty = −min(1, max(0, tokens − (max_tokens − buffer)) / buffer)

    Args:
        tokens: length of the completion, at least 0.
        max_tokens: length from which on the penalty is −1; above 0.
        buffer: number of tokens over which the penalty grows from 0 to −1, in [1, max_tokens].

    Raises:
        ValueError: an argument is out of range.
    """
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, got {tokens}")
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer must be in [1, max_tokens], got buffer {buffer} and max_tokens {max_tokens}")
    return -min(1.0, max(0, tokens - (max_tokens - buffer)) / buffer)


def doubts_of_penalty(recipe: Recipe) -> list[str]:
    """What a trainer should warn of before a run whose rewards have an overlong penalty; empty if there is nothing."""
    if recipe.limit is None:
        return []
    why = (
        "the overlong penalty grows before the engine's own maximum length, and the recipe stops rollouts where few right "
        "ones are longer (limit_at): under a lower limit, the penalty does nothing. It does not follow the limit, because "
        "it would punish right answers just below it, whose lengths set the limit, and both would fall. Leave one of "
        "the two out"
    )
    return [why]


@dataclass(frozen=True)
class OverlongScorer(Scorer):
    """Adds `overlong_penalty` to the rewards of another scorer. Metrics and unscored samples do not change.

    Args:
        scorer: scores the samples, which must have `tokens`. `close` closes this scorer too.
        max_tokens: length from which on the penalty is −1; above 0.
        buffer: number of tokens over which the penalty grows from 0 to −1, in [1, max_tokens].

    Raises:
        ValueError: an argument is out of range; on a call, a sample has no `tokens`.
    """

    scorer: Scorer
    max_tokens: int
    buffer: int

    def __post_init__(self) -> None:
        overlong_penalty(0, self.max_tokens, self.buffer)

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        shaped: Future[list[Outcome]] = Future()

        def finish(scored: Future[list[Outcome]]) -> None:
            if scored.cancelled():
                shaped.cancel()
            if not shaped.set_running_or_notify_cancel():
                return
            try:
                pairs = zip(samples, scored.result(), strict=True)
                shaped.set_result([self._shape(sample, outcome) for sample, outcome in pairs])
            except Exception as error:
                shaped.set_exception(error)

        given = self.scorer.submit(samples)
        given.add_done_callback(finish)
        shaped.add_done_callback(lambda _: given.cancel())  # does nothing unless `shaped` was cancelled
        return shaped

    def report(self) -> dict[str, Any]:
        return self.scorer.report()

    def close(self) -> None:
        self.scorer.close()

    def _shape(self, sample: Sample, outcome: Outcome) -> Outcome:
        if sample.tokens is None:
            raise ValueError("the overlong penalty needs the length of each completion; set Sample.tokens")
        if not isinstance(outcome, Scored):
            return outcome
        penalty = overlong_penalty(sample.tokens, self.max_tokens, self.buffer)
        return Scored(outcome.reward + penalty, outcome.metric)
