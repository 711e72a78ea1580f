"""What another recipe would have paid on the outcomes of a log: the real allocator, and what the log can answer of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Done, Event, Failed, Order, Updated
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.seeds import rng
from rollalloc.waste.groups import NOT_SAID, SAME, Groups
from rollalloc.waste.shares import LEAST_PROMPTS, Share

MEASURES = ("rollouts_per_batch", "tokens_per_batch", "rollouts_per_row", "tokens_per_row")
_TOLD = 1e-9  # an advantage of no more teaches nothing
_BARREN = 64  # asks without a batch, times the groups of one, after which a replay gives up

Watcher = Callable[[int, int], None]  # resamples done, resamples in all


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a recipe would have paid.

    Attributes:
        measures: by `MEASURES`; a row counts where its advantage is not 0. Those in tokens are None where the log has none.
        support: share of the rollouts ordered that the log answers; the others are drawn from a posterior.
        orders: share of the orders that it answers wholly.
        batches: trained in the replay that `measures` are of.
        prompts: of the log.
        resamples: of prompts, for the intervals.
    """

    measures: dict[str, Share | None]
    support: float
    orders: float
    batches: int
    prompts: int
    resamples: int


def replay(
    groups: Groups, recipe: Recipe, *, batches: int = 30, seed: int = 0, resamples: int = 40,
    watcher: Watcher | None = None,
) -> Replayed:  # fmt: skip
    """Drive the allocator under a recipe with logged outcomes.

    Each rollout that is ordered of a prompt is one of its logged rollouts, without replacement and in random order, whatever
    the weights that it was logged under. Where a prompt has none left, it succeeds with a rate that is drawn at its visit
    from Beta(1 + s, 1 + n - s), its s successes in n logged rollouts, and costs what its rollouts cost on average. The
    interval is the percentile bootstrap over prompts. Prompts without any scored rollout are left out.

    Args:
        groups: of a log; metrics in [0, 1].
        recipe: any that draws prompts itself. Features and priors it has none of.
        batches: to train at most, at least 1.
        seed: of everything random, at least 0.
        resamples: of the bootstrap, at least 2.
        watcher: called after each resample.

    Raises:
        ValueError: a number out of its range, metrics beyond [0, 1], too few prompts, or no batch that could be trained.
    """
    at_least("batches", batches, 1)
    at_least("resamples", resamples, 2)
    at_least("seed", seed, 0)
    decks, least = _decks(groups), max(LEAST_PROMPTS, recipe.groups)
    if len(decks) < least:
        raise ValueError(
            f"expected scored rollouts of at least {least} prompts, for an interval and for a batch of "
            f"{recipe.groups}; the log has {len(decks)}"
        )
    random = rng(seed, "replay")
    point = _Replay(decks, recipe, random).run(batches)
    if not point.batches:
        raise ValueError("no batch could be trained on these outcomes under this recipe; it is too large for the log")
    spread: list[list[float]] = []
    for done in range(resamples):
        drawn = [decks[at] for at in random.integers(len(decks), size=len(decks)).tolist()]
        spread.append(_Replay(drawn, recipe, random).run(batches).measures())
        if watcher is not None:
            watcher(done + 1, resamples)
    low_M, high_M = np.quantile(np.array(spread), (0.025, 0.975), axis=0)
    has_tokens = any(deck.tokens is not None for deck in decks)
    measures = {
        name: Share(value, (float(low), float(high))) if has_tokens or "tokens" not in name else None
        for name, value, low, high in zip(MEASURES, point.measures(), low_M, high_M, strict=True)
    }
    return Replayed(
        measures, point.answered / point.ordered, point.whole / point.orders, point.batches, len(decks), resamples
    )


@dataclass(frozen=True, slots=True)
class _Deck:
    """The logged outcomes of a prompt: metrics and tokens of its scored rollouts, and how often one had no score."""

    metrics: NDArray[np.float64]
    tokens: NDArray[np.int64] | None
    unscored: float


def _decks(groups: Groups) -> list[_Deck]:
    scored_R = ~np.isnan(groups.rewards_R)
    if scored_R.any() and not -SAME <= groups.rewards_R[scored_R].min() <= groups.rewards_R[scored_R].max() <= 1 + SAME:
        raise ValueError("rewards are not all in [0, 1], so that they are no rates: say what is right with --threshold")
    prompt_R = np.repeat(groups.prompt_V, groups.size_V)
    order_R = np.argsort(prompt_R, kind="stable")
    decks: list[_Deck] = []
    for rows in np.split(order_R, np.flatnonzero(np.diff(prompt_R[order_R])) + 1):
        kept = rows[scored_R[rows]]
        if len(kept):
            tokens = groups.tokens_R[kept]
            said = None if (tokens == NOT_SAID).any() else tokens
            decks.append(_Deck(np.clip(groups.rewards_R[kept], 0, 1), said, 1 - len(kept) / len(rows)))
    return decks


class _Replay:
    """One allocator on one set of decks."""

    def __init__(self, decks: list[_Deck], recipe: Recipe, random: np.random.Generator) -> None:
        self._decks, self._recipe, self._random = decks, recipe, random
        self._left = [random.permutation(len(deck.metrics)).tolist() for deck in decks]
        self._rate: dict[int, float] = {}  # by the allocator's group
        self.ordered = self.answered = self.orders = self.whole = self.batches = self.rows = 0
        self.paid = self.tokens = 0.0

    def run(self, batches: int) -> _Replay:
        """Until so many batches are trained, or none comes any more."""
        allocator = Allocator(self._recipe, len(self._decks), int(self._random.integers(1 << 31)))
        barren, limit = 0, _BARREN * self._recipe.groups
        while self.batches < batches and barren < limit:
            actions = allocator.ask()
            barren += 1
            if actions.batch:
                barren = 0
                self.batches += 1
                self.rows += sum(abs(row.advantage) > _TOLD and not row.replays for row in actions.batch.rows)
                allocator.tell([Updated(allocator.version + 1)])
                self.paid, self.tokens = allocator.paid, allocator.tokens_paid
            if actions.finished:
                break
            allocator.tell([event for order in actions.generate for event in self._deal(order, allocator.version)])
        return self

    def measures(self) -> list[float]:
        """By `MEASURES`; infinite where there was no batch, or no row that taught."""
        by = (self.batches, self.batches, self.rows, self.rows)
        paid = (self.paid, self.tokens, self.paid, self.tokens)
        return [total / count if count else np.inf for total, count in zip(paid, by, strict=True)]

    def _deal(self, order: Order, version: int) -> list[Event]:
        deck, left = self._decks[order.prompt], self._left[order.prompt]
        answered = min(len(left), len(order.rollouts))
        self.orders, self.whole = self.orders + 1, self.whole + (answered == len(order.rollouts))
        self.ordered, self.answered = self.ordered + len(order.rollouts), self.answered + answered
        events: list[Event] = []
        for rollout in order.rollouts:
            if deck.unscored and self._random.random() < deck.unscored:
                events.append(Failed(rollout, "unscored in the log"))
                continue
            metric, tokens = self._logged(deck, left.pop()) if left else self._imputed(deck, order.group)
            events.append(Done(rollout, metric, metric, tokens, version))
        return events

    @staticmethod
    def _logged(deck: _Deck, at: int) -> tuple[float, int]:
        return float(deck.metrics[at]), 0 if deck.tokens is None else int(deck.tokens[at])

    def _imputed(self, deck: _Deck, group: int) -> tuple[float, int]:
        hits, count = float(deck.metrics.sum()), len(deck.metrics)
        if group not in self._rate:
            self._rate[group] = float(self._random.beta(1 + hits, 1 + count - hits))
        tokens = 0 if deck.tokens is None else round(float(deck.tokens.mean()))
        return float(self._random.random() < self._rate[group]), tokens
