"""Batches: when there is one, which groups are in it, and the rows of each."""

from __future__ import annotations

from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.decisions import choose
from rollalloc.core.errors import RuleError
from rollalloc.core.events import Batch, Row
from rollalloc.core.group import Group
from rollalloc.core.lifecycle import close, discard_waiting, drop
from rollalloc.core.phase import Phase
from rollalloc.core.recipe import Recipe
from rollalloc.core.roster import NOW
from rollalloc.core.run import Run
from rollalloc.core.seeds import rng_when_used


def full_batch(run: Run) -> Batch | None:
    """The next batch, where enough groups are ready."""
    if run.batch is not None or run.finished is not None or run.need() > 0:
        return None
    for group in [group for group in run.flight.ready.values() if run.stale(group)]:
        drop(run, group, "stale", NOW)
    # Without staleness a batch ends its round, so it waits for the round's last rollout: what is in it must not
    # depend on what finished first.
    if run.need() > 0 or (run.recipe.max_staleness == 0 and any(run.flight.running_S)):
        return None
    return make_batch(run, None)


def make_batch(run: Run, short_because: str | None) -> Batch | None:
    """A batch of what the last promote rule chooses; None where that is too little."""
    recipe = run.recipe
    chosen = choose(run, len(recipe.stages) - 1, min(recipe.groups, len(run.flight.ready)))
    if not chosen or (short_because is None and len(chosen) < recipe.groups):
        return None
    rows = [row for group in sorted(chosen, key=_id) for row in _train(run, group)]
    if recipe.max_staleness == 0:
        discard_waiting(run)
    run.purse.next_batch()
    run.barren = 0  # the weights will be others
    run.batch = Batch(tuple(rows), run.version, short_because)
    run.changed()
    return run.batch


def _train(run: Run, group: Group) -> list[Row]:
    """The group's rows; the group ends."""
    recipe, view = run.recipe, group.view
    rows = recipe.rows(view, run.view(), rng_when_used(run.seed, "rows", group.id))
    chosen_M, weights_M = np.asarray(rows[0]), np.asarray(rows[1], np.float64)
    chosen, weights = _checked_rows(recipe, chosen_M, weights_M, len(group.done))
    advantages_M = np.asarray(recipe.advantage(view, chosen_M), np.float64)
    advantages: list[float] = advantages_M.tolist()
    if advantages_M.shape != chosen_M.shape or not all(map(isfinite, advantages)):
        raise RuleError(f"{recipe.advantage!r} must give {len(chosen)} finite advantages, got {advantages_M}")
    done = view.in_order
    kept = set(chosen)
    if len(kept) < len(done):
        run.release.extend(other.rollout for at, other in enumerate(done) if at not in kept)
    fate = "trained" if any(advantages) else "zero_variance"
    run.accounts[fate] += len(chosen)
    run.accounts["unselected"] += len(done) - len(chosen)
    made = [
        Row(done[at].rollout, group.prompt, group.id, advantage, weight, done[at].version)
        for at, advantage, weight in zip(chosen, advantages, weights, strict=True)
    ]
    close(run, group, Phase.TRAINED, fate, group.until)
    return made


def _checked_rows(
    recipe: Recipe, chosen_M: NDArray[np.int64], weights_M: NDArray[np.float64], scored: int
) -> tuple[list[int], list[float]]:
    chosen: list[int] = chosen_M.tolist()
    whole = chosen_M.ndim == 1 and chosen_M.dtype.kind in "iu"
    if not whole or not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) >= scored:
        raise RuleError(
            f"{recipe.rows!r} must choose different rollouts of {scored} by index, at least one, got {chosen_M}"
        )
    weights: list[float] = weights_M.tolist()
    if weights_M.shape != chosen_M.shape or not all(0 <= weight < inf for weight in weights):
        raise RuleError(f"{recipe.rows!r} must give each row a finite weight of 0 or more, got {weights_M}")
    return chosen, weights


def _id(group: Group) -> int:
    return group.id
