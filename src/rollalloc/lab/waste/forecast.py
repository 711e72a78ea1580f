"""Prices of recipes on a log: what each pays for a row that teaches, over what GRPO pays, with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc import recipes
from rollalloc.core.recipe import Recipe
from rollalloc.core.seeds import rng
from rollalloc.lab.waste.groups import NOT_SAID, SAME, Groups, Log
from rollalloc.lab.waste.replay import Paid, Visits, replay
from rollalloc.lab.waste.shares import LEAST_PROMPTS, Share

BASELINE = "grpo"
LEAST_VISITS = 64
_ENOUGH = 0.95  # share of the groups that must have as many rollouts as the forecast draws
_ROLLOUTS = 4096  # of logged groups, about, that one resample goes through at most
_POINT_VISITS = 2048  # logged groups, about, that the estimate itself is made from at most
_VISITS = 256  # of a log that has more: groups that one resample goes through
_PASSES = 3  # runs that the estimate is the mean of
_SPARE = 8  # prompts for each group of a batch, at least, so that three batches of candidates are some of them

Watcher = Callable[[int, int], None]  # resamples done, resamples in all


class Refused(ValueError):
    """This log cannot carry a forecast; the message says what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes:
        n: rollouts of a group, the same for all but recipes of the user's own.
        n_pilot: of them Pilot-Commit's pilots; None where it is not compared.
        groups: in a batch.
    """

    n: int
    n_pilot: int | None
    groups: int

    def recipes(self) -> dict[str, Recipe]:
        """By name, GRPO first. A window of pilots over (0.125, 0.75), three batches of candidates at a time, as published.

        No prompt is evicted for being solved: what it would do later is not in the log.
        """
        three, grpo = 3 * self.groups, {BASELINE: recipes.grpo(self.groups, self.n)}
        if self.n_pilot is None:
            return grpo
        commit = self.n - self.n_pilot
        return grpo | {
            "dapo": recipes.dapo(self.groups, self.n, three),
            "dapo (carried)": recipes.dapo(self.groups, self.n, three, surplus="carry"),
            "pilot_commit": recipes.pilot_commit(self.groups, self.n_pilot, commit, three, p_solve=2.0),
        }


@dataclass(frozen=True, slots=True)
class Price:
    """What a recipe pays. A row teaches where it is trained on with an advantage that is not 0.

    Attributes:
        rollouts: paid for a row that teaches.
        tokens: likewise; None where the log does not say them.
        times_rollouts: `rollouts` over GRPO's, above 1 is dearer.
        times_tokens: `tokens` over GRPO's, likewise.
        again: share of the rollouts ordered whose outcomes had been dealt before, since every group of the prompt was.
        guessed: share of the rollouts ordered that no logged group was large enough for: they succeed with a rate that is
            drawn at the visit from the prompt's Beta(1 + s, 1 + n - s), its s successes in n logged rollouts.
    """

    rollouts: float
    tokens: float | None
    times_rollouts: Share
    times_tokens: Share | None
    again: float
    guessed: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Prices by recipe, and from how much they were estimated.

    Attributes:
        plan: what was compared.
        prices: by recipe, GRPO's first.
        prompts: with groups that are large enough.
        visits: such groups.
        simulated: of them the estimate was made from, of prompts drawn at random.
        resamples: for the intervals.
    """

    plan: Plan
    prices: dict[str, Price]
    prompts: int
    visits: int
    simulated: int
    resamples: int


def plan_for(log: Log, groups: Groups, *, n: int | None = None, n_pilot: int | None = None, own: bool = False) -> Plan:
    """The comparison that a log can carry.

    Args:
        log: where the groups are from.
        groups: of at least 2 rollouts each, with the outcomes that count.
        n: rollouts of a trained group; by default as many as 95% of the logged groups have.
        n_pilot: pilots; by default a quarter of them, at least 2.
        own: with recipes of the user's own, and not with DAPO and Pilot-Commit.

    Raises:
        Refused: the log is too small, its groups are, or it does not hold what was dropped.
    """
    _refuse_unfit(log, groups)
    largest = int(np.quantile(groups.first_V, 1 - _ENOUGH, method="lower"))
    n = largest if n is None else n
    if n > largest:
        raise Refused(
            f"needs groups of {n} rollouts, {np.mean(groups.first_V >= n):.0%} of the logged ones have as many; this log "
            f"carries at most n = {largest}, more would be guessed"
        )
    n_pilot = None if own else max(2, n // 4) if n_pilot is None else n_pilot
    if n < 2:
        raise Refused("needs groups of at least 2 rollouts, since those of one teach GRPO nothing")
    if n_pilot is not None and not 2 <= n_pilot <= n - 2:
        raise Refused(
            f"needs groups of at least 4 rollouts, 2 pilots and 2 commits, got n = {n} with {n_pilot} pilots; the mean of "
            "one pilot is 0 or 1, never inside the window"
        )
    enough_V = groups.first_V >= n
    if not groups.mixed_V[enough_V].any():
        raise Refused("no logged group has rewards that differ: GRPO has no row that teaches to compare with")
    _, visits_of_step = np.unique(groups.step_V[enough_V], return_counts=True)
    prompts = len(np.unique(groups.prompt_V[enough_V]))
    most = min(int(np.median(visits_of_step)), _visits(int(enough_V.sum()), n) // 16, prompts // _SPARE)
    return Plan(n=n, n_pilot=n_pilot, groups=max(1, most))


def _refuse_unfit(log: Log, groups: Groups) -> None:
    prompts = len(groups.visited)
    if len(groups) < LEAST_VISITS or prompts < LEAST_PROMPTS:
        raise Refused(
            f"too few groups with 2 rollouts or more: needs {LEAST_VISITS} of {LEAST_PROMPTS} prompts, the log has "
            f"{len(groups)} of {prompts} prompts"
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
            f"rewards lie in [{low:g}, {high:g}], a share of right answers is needed, in [0, 1]: say what is "
            "right with --threshold, or name the field that holds the metric with --reward"
        )


def forecast(
    groups: Groups,
    plan: Plan,
    own: Mapping[str, Recipe] | None = None,
    *,
    seed: int = 0,
    resamples: int = 60,
    watcher: Watcher | None = None,
) -> Forecast:
    """Prices of the plan's recipes, or of GRPO and the user's own.

    The estimate is the mean over three simulations in which every recipe makes as many visits as were logged; of a log with
    more than 2,048 groups, of random prompts that have about as many. The interval is 1.96 standard errors of the logarithm
    of the ratio, by the bootstrap over prompts: a resample draws m of the P prompts estimated from, with all their groups;
    its spread counts times √(m/P) (m-out-of-n: all P would take too long).

    Args:
        groups: as given to `plan_for`.
        plan: what it returned.
        own: recipes that draw their prompts themselves, by name; they have no features. None: those of the plan.
        seed: of everything random.
        resamples: of the bootstrap, at least 2.
        watcher: called after each resample.

    Raises:
        Refused: fewer prompts than a batch of one of these recipes has groups.
    """
    compared = plan.recipes() | dict(own or {})
    prompts = visits_of(groups, plan.n)
    most = max(recipe.groups for recipe in compared.values())
    if most > len(prompts):
        raise Refused(
            f"a batch of {most} groups needs as many prompts, the log has {len(prompts)}; give fewer with --set groups=…"
        )
    visits = sum(map(len, prompts))
    a_resample = _visits(visits, plan.n)
    drawn = max(2, round(len(prompts) * min(1.0, a_resample / visits)), min(len(prompts), _SPARE * most))
    random = rng(seed, "waste forecast")
    estimated = _some(prompts, _SPARE * most, random)
    simulated = min(2 * _POINT_VISITS, sum(map(len, estimated)))
    point = _paid(groups, estimated, compared, simulated, _PASSES, random)
    spread: list[Mapping[str, Paid]] = []
    for done in range(resamples):
        chosen = [prompts[row] for row in random.integers(len(prompts), size=drawn)]
        openings = min(2 * a_resample, sum(map(len, chosen)))
        spread.append(_paid(groups, chosen, compared, openings, 1, random))
        if watcher is not None:
            watcher(done + 1, resamples)
    scale = 1.96 * float(np.sqrt(drawn / len(estimated)))
    has_tokens = not (groups.tokens_R == NOT_SAID).any()
    prices = {name: _price(name, point, spread, scale, has_tokens) for name in compared}
    return Forecast(plan, prices, len(prompts), visits, simulated, resamples)


def _price(
    name: str, point: Mapping[str, Paid], spread: Sequence[Mapping[str, Paid]], scale: float, has_tokens: bool
) -> Price:
    books = point[name]
    times = [_times(name, currency, point, spread, scale) for currency in ("rollouts", "tokens")]
    return Price(
        books.price("rollouts"), books.price("tokens") if has_tokens else None, times[0], times[1] if has_tokens else None,
        books.again / max(1, books.ordered), books.guessed / max(1, books.ordered),
    )  # fmt: skip


def _times(
    name: str, currency: str, point: Mapping[str, Paid], spread: Sequence[Mapping[str, Paid]], scale: float
) -> Share:
    """How many times what GRPO pays a recipe pays, paired by resample."""
    pairs = np.array([[books[each].price(currency) for each in (BASELINE, name)] for books in [point, *spread]])
    ratio = float(pairs[0, 1] / pairs[0, 0]) if np.isfinite(pairs[0, 0]) and pairs[0, 0] else np.inf
    # A resample without a row that teaches has no price, and the spread is not known.
    if not (np.isfinite(pairs).all() and (pairs > 0).all()):
        return Share(ratio, (0.0, np.inf))
    half = scale * float(np.std(np.diff(np.log(pairs[1:])), ddof=1))
    return Share(ratio, (ratio * float(np.exp(-half)), ratio * float(np.exp(half))))


def _paid(
    groups: Groups, prompts: Visits, compared: Mapping[str, Recipe], openings: int, passes: int,
    random: np.random.Generator,
) -> dict[str, Paid]:  # fmt: skip
    books = {name: Paid() for name in compared}
    for name, recipe in compared.items():
        for _ in range(passes):
            replay(recipe, groups, prompts, openings, random, books[name])
    return books


def visits_of(groups: Groups, n: int) -> list[NDArray[np.int64]]:
    """The visits of each prompt that have n rollouts or more; prompts in the order of their first."""
    visit_V = np.flatnonzero(groups.first_V >= n)
    visit_V = visit_V[np.argsort(groups.prompt_V[visit_V], kind="stable")]
    others = np.flatnonzero(np.diff(groups.prompt_V[visit_V])) + 1
    return sorted(np.split(visit_V, others), key=lambda of_prompt: int(of_prompt[0]))


def _some(prompts: Visits, least: int, random: np.random.Generator) -> list[NDArray[np.int64]]:
    """All prompts in random order, or as many of them as the estimate has time for and its batches need."""
    chosen: list[NDArray[np.int64]] = []
    visits = 0
    for row in random.permutation(len(prompts)):
        if visits >= _POINT_VISITS and len(chosen) >= least:
            break
        chosen.append(prompts[row])
        visits += len(prompts[row])
    return chosen


def _visits(logged: int, n: int) -> int:
    """Visits of one resample."""
    most = _ROLLOUTS // n if logged <= _POINT_VISITS else min(_VISITS, _ROLLOUTS // n)
    return min(logged, max(LEAST_VISITS, most))
