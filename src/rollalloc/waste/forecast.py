"""What another recipe would have paid for the same learning signal: the real allocator, driven with logged outcomes.

A visit of a prompt draws its rollouts from one logged group, without replacement, in random order. So pilots are a random
part of the group that really was, and no model of the success rates stands between the log and the forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc import recipes
from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Batch, Done, Event, Failed, Order, Updated
from rollalloc.core.recipe import Recipe
from rollalloc.core.seeds import rng
from rollalloc.waste.groups import SAME, Group, Groups, Log
from rollalloc.waste.shares import LEAST_PROMPTS, Share, mixed

BASELINE = "grpo"
LEAST_VISITS = 64
_ENOUGH = 0.95  # share of the groups that must have as many rollouts as the forecast draws
_ROLLOUTS = 4096  # of logged groups, about, that one resample goes through at most
_POINT_VISITS = 2048  # logged groups, about, that the estimate itself is made from at most
_VISITS = 256  # of a log that has more: groups that one resample goes through
_BATCHES = 6  # a simulation makes at least, if it can
_PASSES = 3  # of the estimate's simulation over its visits

Watcher = Callable[[int, int], None]  # resamples done, resamples in all


class Refused(ValueError):
    """This log cannot carry a forecast; the message says what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The recipes that are compared.

    Attributes:
        n: rollouts of a trained group, the same for all.
        n_pilot: of them Pilot-Commit's pilots.
        groups: in a batch.
    """

    n: int
    n_pilot: int
    groups: int

    def recipes(self) -> dict[str, Recipe]:
        """By name, GRPO first. A window of pilots over (0.125, 0.75), three batches of candidates at a time, as published.

        No prompt is evicted for being solved: what it would do later is not in the log.
        """
        three = 3 * self.groups
        return {
            BASELINE: recipes.grpo(self.groups, self.n),
            "dapo": recipes.dapo(self.groups, self.n, three),
            "dapo (carried)": recipes.dapo(self.groups, self.n, three, surplus="carry"),
            "pilot_commit": recipes.pilot_commit(self.groups, self.n_pilot, self.n - self.n_pilot, three, p_solve=2.0),
        }


@dataclass(frozen=True, slots=True)
class Price:
    """What a recipe pays.

    Attributes:
        per_mixed: rollouts paid for a trained group whose rewards differ.
        per_signal: rollouts paid for a unit of signal, the sum of squared advantages r - mean of all rollouts trained on.
        ratio_mixed: GRPO's `per_mixed` over this one's, above 1 is cheaper.
        ratio_signal: GRPO's `per_signal` over this one's, likewise.
    """

    per_mixed: float
    per_signal: float
    ratio_mixed: Share
    ratio_signal: Share


@dataclass(frozen=True, slots=True)
class Forecast:
    """Prices by recipe, and from how much they were estimated.

    Attributes:
        plan: what was compared.
        prices: by recipe.
        prompts: with groups that are large enough.
        visits: such groups.
        simulated: of them the estimate was made from, drawn at random.
        resamples: for the intervals.
    """

    plan: Plan
    prices: dict[str, Price]
    prompts: int
    visits: int
    simulated: int
    resamples: int


def plan_for(log: Log, groups: Sequence[Group], *, n: int | None = None, n_pilot: int | None = None) -> Plan:
    """The comparison that a log can carry.

    Args:
        log: where the groups are from.
        groups: with the outcomes that count.
        n: rollouts of a trained group; by default as many as 95% of the logged groups have.
        n_pilot: pilots; by default a quarter of them, at least 2.

    Raises:
        Refused: the log is too small, its groups are, or it does not hold what was dropped.
    """
    columns = Groups.of(groups)
    _refuse_unfit(log, columns)
    largest = int(np.quantile(columns.first_V, 1 - _ENOUGH, method="lower"))
    n = largest if n is None else n
    if n > largest:
        raise Refused(
            f"needs groups of {n} rollouts, {np.mean(columns.first_V >= n):.0%} of the logged ones have as many; this log "
            f"carries at most n = {largest}, more would be guessed"
        )
    n_pilot = max(2, n // 4) if n_pilot is None else n_pilot
    if not 2 <= n_pilot <= n - 2:
        raise Refused(
            f"needs groups of at least 4 rollouts, 2 pilots and 2 commits, got n = {n} with {n_pilot} pilots; the mean of "
            "one pilot is 0 or 1, never inside the window"
        )
    enough_V = columns.first_V >= n
    if not columns.mixed_V[enough_V].any():
        raise Refused("no logged group has rewards that differ: there is no signal to compare at")
    _, visits_of_step = np.unique(columns.step_V[enough_V], return_counts=True)
    a_step = int(np.median(visits_of_step))
    return Plan(n=n, n_pilot=n_pilot, groups=max(1, min(a_step, _visits(int(enough_V.sum()), n) // 16)))


def _refuse_unfit(log: Log, groups: Groups) -> None:
    if not groups:
        raise Refused("there are no rollouts in this log, only sums")
    prompts = len(groups.visited)
    if len(groups) < LEAST_VISITS or prompts < LEAST_PROMPTS:
        raise Refused(
            f"needs at least {LEAST_VISITS} groups and {LEAST_PROMPTS} prompts, the log has {len(groups)} groups of "
            f"{prompts} prompts"
        )
    if not log.complete and groups.mixed_V.all():
        raise Refused(
            "every logged group has rewards that differ, so those without were filtered out before logging, and how many "
            "they were is not known; log a stretch of training without the filter"
        )
    if not groups.scored_V.any():
        raise Refused("no rollout in this log has a score")
    low, high = float(np.nanmin(groups.low_V)), float(np.nanmax(groups.high_V))
    if low < -SAME or high > 1 + SAME:
        raise Refused(
            f"rewards lie in [{low:g}, {high:g}], the window of pilots needs [0, 1], a share of right answers: say what is "
            "right with --threshold, or name the field that holds the metric with --reward"
        )


def forecast(
    groups: Sequence[Group], plan: Plan, *, seed: int = 0, resamples: int = 60, watcher: Watcher | None = None
) -> Forecast:
    """Prices of the plan's recipes.

    Each is the mean over a simulation in which every recipe goes through the logged visits, three times or as often as its
    length allows; of a log with more than 2,048 visits, through about as many of random prompts. The interval is 1.96
    standard errors of the logarithm of the ratio, by the bootstrap over prompts: a resample draws m of the P prompts
    estimated from, with all their visits, and goes through them once; its spread counts times √(m/P) (m-out-of-n: all P
    would take too long).

    Args:
        groups: as given to `plan_for`.
        plan: what it returned.
        seed: of everything random.
        resamples: of the bootstrap, at least 2.
        watcher: called after each resample.
    """
    columns = Groups.of(groups)
    prompts = _by_prompt(columns, plan.n)
    visits = sum(map(len, prompts))
    a_resample = _visits(visits, plan.n)
    drawn = max(2, round(len(prompts) * min(1.0, a_resample / visits)))
    random = rng(seed, "waste forecast")
    estimated = _some(prompts, random)
    simulated = _at_most(2 * _POINT_VISITS, estimated, random)
    point = _prices(columns, simulated, plan, passes=_PASSES, random=random)
    spread: list[Mapping[str, tuple[float, float]]] = []
    for done in range(resamples):
        chosen = [prompts[row] for row in random.integers(len(prompts), size=drawn)]
        spread.append(_prices(columns, _at_most(2 * a_resample, chosen, random), plan, passes=1, random=random))
        if watcher is not None:
            watcher(done + 1, resamples)
    scale = 1.96 * float(np.sqrt(drawn / len(estimated)))
    prices = {name: _price(name, point, spread, scale) for name in point}
    return Forecast(plan, prices, len(prompts), visits, len(simulated), resamples)


def _price(
    name: str,
    point: Mapping[str, tuple[float, float]],
    spread: Sequence[Mapping[str, tuple[float, float]]],
    scale: float,
) -> Price:
    ratios: list[Share] = []
    for currency in (0, 1):
        ratio = point[BASELINE][currency] / point[name][currency]
        pairs = np.array([(prices[BASELINE][currency], prices[name][currency]) for prices in spread])
        # A resample without any signal has no price, and the spread is not known.
        if not np.isfinite(pairs).all():
            ratios.append(Share(ratio, (0.0, np.inf)))
            continue
        half = scale * float(np.std(np.diff(np.log(pairs)), ddof=1))
        ratios.append(Share(ratio, (ratio * float(np.exp(-half)), ratio * float(np.exp(half)))))
    return Price(*point[name], *ratios)


def _prices(
    groups: Groups, which_V: NDArray[np.int64], plan: Plan, *, passes: int, random: np.random.Generator
) -> dict[str, tuple[float, float]]:
    visits = [groups[at] for at in which_V.tolist()]
    return {name: price(recipe, visits, passes * len(visits), random) for name, recipe in plan.recipes().items()}


def price(recipe: Recipe, visits: Sequence[Group], openings: int, random: np.random.Generator) -> tuple[float, float]:
    """Rollouts that a recipe pays for a mixed group trained, and for a unit of signal.

    Counted from the first batch to the last one, so that what is held for later is held at both ends.

    Args:
        recipe: any.
        visits: what the prompts are; each has as many rollouts as a group of the recipe.
        openings: visits to make, up to eight times as many where they give too few batches; every one is made before any
            is made again.
        random: shuffles.

    Returns:
        Infinite prices where nothing was trained, or the visits are too few for a batch.
    """
    if len(visits) < recipe.groups:
        return np.inf, np.inf
    allocator = Allocator(recipe, len(visits), int(random.integers(1 << 31)))
    deck = _Deck(visits, random)
    first = now = np.zeros(3)  # rollouts paid and no longer open, mixed groups, signal
    batches = 0
    while deck.opened < openings or (batches < _BATCHES and deck.opened < 8 * openings):
        actions = allocator.ask()
        if actions.batch:
            accounts = allocator.accounts()
            settled = sum(accounts.values()) - accounts["open"]
            now = np.array([settled, *(now[1:] + deck.trained(actions.batch))])
            first = now if batches == 0 else first
            batches += 1
            allocator.tell([Updated(allocator.version + 1)])
        if actions.finished:
            break
        allocator.tell([event for order in actions.generate for event in deck.deal(order, allocator.version)])
    paid, groups, signal = (now - first).tolist()
    return (paid / groups if groups else np.inf), (paid / signal if signal else np.inf)


class _Deck:
    """Deals the outcomes of logged visits, and keeps what was dealt until it is trained on."""

    def __init__(self, visits: Sequence[Group], random: np.random.Generator) -> None:
        self._visits, self._random = visits, random
        self._left: dict[int, list[float]] = {}  # by the allocator's group
        self._reward: dict[int, float] = {}
        self.opened = 0

    def deal(self, order: Order, version: int) -> list[Event]:
        """An event for each rollout ordered."""
        if order.group not in self._left:
            group = self._visits[order.prompt]
            self._left[order.group] = self._random.permutation(group.rewards_G[: group.first]).tolist()
            self.opened += 1
        events: list[Event] = []
        for rollout in order.rollouts:
            outcome = self._reward[rollout] = self._left[order.group].pop()
            if np.isnan(outcome):
                events.append(Failed(rollout, "unscored in the log"))
            else:
                events.append(Done(rollout, outcome, outcome, 0, version))
        return events

    def trained(self, batch: Batch) -> tuple[int, float]:
        """Mixed groups of a batch, and its signal."""
        by_group: dict[int, list[float]] = {}
        for row in batch.rows:
            by_group.setdefault(row.group, []).append(self._reward[row.rollout])
        arrays = [np.array(rewards) for rewards in by_group.values()]
        return sum(mixed(rewards) for rewards in arrays), float(sum(((r - r.mean()) ** 2).sum() for r in arrays))


def _by_prompt(groups: Groups, n: int) -> list[NDArray[np.int64]]:
    """The visits of each prompt that have n rollouts or more; prompts in the order of their first."""
    visit_V = np.flatnonzero(groups.first_V >= n)
    visit_V = visit_V[np.argsort(groups.prompt_V[visit_V], kind="stable")]
    others = np.flatnonzero(np.diff(groups.prompt_V[visit_V])) + 1
    return sorted(np.split(visit_V, others), key=lambda of_prompt: int(of_prompt[0]))


def _some(prompts: Sequence[NDArray[np.int64]], random: np.random.Generator) -> list[NDArray[np.int64]]:
    """All prompts in random order, or as many of them as the estimate has time for."""
    chosen: list[NDArray[np.int64]] = []
    visits = 0
    for row in random.permutation(len(prompts)):
        if visits >= _POINT_VISITS:
            break
        chosen.append(prompts[row])
        visits += len(prompts[row])
    return chosen


def _at_most(most: int, prompts: Sequence[NDArray[np.int64]], random: np.random.Generator) -> NDArray[np.int64]:
    """The visits of these prompts, or some of them where they are far too many: a prompt may have most visits of a log."""
    visit_V = np.concatenate(prompts)
    return visit_V if len(visit_V) <= most else random.choice(visit_V, most, replace=False)


def _visits(logged: int, n: int) -> int:
    """Visits of one resample."""
    most = _ROLLOUTS // n if logged <= _POINT_VISITS else min(_VISITS, _ROLLOUTS // n)
    return min(logged, max(LEAST_VISITS, most))
