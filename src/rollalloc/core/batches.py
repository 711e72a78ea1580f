"""Make batches: decide when a batch is made, and which groups and rows it contains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, repeat
from math import isfinite
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.decisions import choose
from rollalloc.core.errors import RuleError
from rollalloc.core.events import Batch, Row
from rollalloc.core.group import Group, parts
from rollalloc.core.lifecycle import close, discard_waiting, drop
from rollalloc.core.phase import Phase
from rollalloc.core.prompt_pool import NOW
from rollalloc.core.recipe import Recipe
from rollalloc.core.run import Run
from rollalloc.core.seeds import rng, rng_when_used


def full_batch(run: Run) -> Batch | None:
    """The next batch, or None if too few groups are ready."""
    if run.batch is not None or run.finished is not None or run.need() > 0:
        return None
    # `Updated` drops what gets too old. This finds groups only after a load under a recipe with less staleness: they
    # count as ready, `choose` leaves them out, and without this the batch would never be complete.
    for group in [group for group in run.flight.ready.values() if run.stale(group)]:
        drop(run, group, "stale", NOW)
    # Without staleness, wait until no group is running. The batch then does not depend on which rollouts end first.
    if run.need() > 0 or (run.recipe.max_staleness == 0 and any(run.flight.running_S)):
        return None
    return make_batch(run, None)


def make_batch(run: Run, short_because: str | None) -> Batch | None:
    """A batch of the groups that the last promote rule chooses, or None if it chooses too few."""
    recipe = run.recipe
    chosen = choose(run, len(recipe.stages) - 1, min(recipe.groups, len(run.flight.ready)))
    if not chosen or (short_because is None and len(chosen) < recipe.groups):
        return None
    # The promote rule's order says who goes on, not where a row stands in the batch.
    groups = sorted(chosen, key=_id)
    # All rules answer before any group is closed: a rule over the batch needs all groups, and closing a group changes
    # what the rules see.
    choices = [_choose_rows(run, group) for group in groups]
    if recipe.over_batch is not None:
        choices = _credit_over_batch(run, groups, choices)
    rows: list[Row] = []
    for group, choice in zip(groups, choices, strict=True):
        rows += _train(run, group, choice)
    replays = _replays(run)
    run.replayed += len(replays)
    rows += replays
    # After the update, these groups are too old to train on.
    if recipe.max_staleness == 0:
        discard_waiting(run)
    run.budgets.batch_opened = 0
    run.barren = 0  # with the new weights, the same prompts may give groups to train on
    run.teaching.after_batch()
    run.pool.after_batch()
    run.batch = Batch(tuple(rows), run.version, short_because)
    run.changed()
    return run.batch


class _Choice(NamedTuple):
    """The chosen rows of a group: their indices, loss weights and advantages."""

    chosen: list[int]
    weights: list[float]
    advantages: list[float]


def _choose_rows(run: Run, group: Group) -> _Choice:
    """The group's rows, with the advantages within the group."""
    recipe, view = run.recipe, group.view
    rows = recipe.rows(view, run.view(), rng_when_used(run.seed, "rows", group.id))
    chosen_M, weights_M = np.asarray(rows[0]), np.asarray(rows[1], np.float64)
    chosen, weights = _checked_rows(recipe, chosen_M, weights_M, len(group.done))
    return _Choice(
        chosen, weights, _checked_advantages(recipe.advantage, recipe.advantage(view, chosen_M), len(chosen))
    )


def _credit_over_batch(run: Run, groups: list[Group], choices: list[_Choice]) -> list[_Choice]:
    """Return the same rows with the advantages that the batch rule computes over the whole batch."""
    rule: Any = run.recipe.over_batch
    sizes = [len(choice.chosen) for choice in choices]
    chosen = parts(list(chain.from_iterable(choice.chosen for choice in choices)), sizes, np.int64)
    before = parts(list(chain.from_iterable(choice.advantages for choice in choices)), sizes, np.float64)
    answer = rule(before, [group.view for group in groups], chosen, run.view())
    if not hasattr(answer, "__len__") or len(answer) != len(choices):
        raise RuleError(f"{rule!r} must give the advantages of {len(choices)} groups, got {answer!r}")
    return [
        _Choice(choice.chosen, choice.weights, _checked_advantages(rule, advantages, size))
        for choice, advantages, size in zip(choices, answer, sizes, strict=True)
    ]


def _checked_advantages(rule: Any, answer: ArrayLike, count: int) -> list[float]:
    try:
        advantages_M = np.asarray(answer, np.float64)
    except (TypeError, ValueError):
        advantages_M = np.empty((0, 0))
    advantages: list[Any] = advantages_M.tolist()
    if advantages_M.shape != (count,) or not all(map(isfinite, advantages)):
        raise RuleError(f"{rule!r} must give {count} finite advantages, got {answer!r}")
    return advantages


def _replays(run: Run) -> list[Row]:
    """Draw the rows to replay, at random from the kept rows of earlier batches."""
    replay = run.recipe.replay
    if replay is None or not run.kept:
        return []
    kept = sorted(run.kept)
    if len(kept) > replay.rows:
        drawn = rng(run.seed, "replay", run.version).permutation(np.array(kept))[: replay.rows]
        kept: list[int] = np.sort(drawn).tolist()
    return [(row := run.kept[rollout])._replace(replays=row.replays + 1) for rollout in kept]


def _train(run: Run, group: Group, choice: _Choice) -> list[Row]:
    """Close the group as trained and return its rows."""
    chosen, done = choice.chosen, group.view.in_order
    trained = [done[at] for at in chosen]
    if len(chosen) < len(done):
        kept = set(chosen)
        # No update needs these, so they are free now. The rows of the batch are free after `Updated`.
        run.release.extend(other.rollout for at, other in enumerate(done) if at not in kept)
    # Rows without an advantage change no weight (unless the loss has other terms), so they count as what they are.
    fate = "trained" if any(choice.advantages) else "zero_variance"
    run.accounts[fate] += len(chosen)
    run.accounts["unselected"] += len(done) - len(chosen)
    run.selection.train(group, [each.tokens for each in trained])
    close(run, group, Phase.TRAINED, fate, group.until)
    rollouts, versions = map(_rollout, trained), map(_version, trained)
    fields = rollouts, repeat(group.prompt), repeat(group.id), choice.advantages, choice.weights, versions, repeat(0)
    # There may be thousands of rows. A Python loop over them would take longer than the rest of `make_batch`.
    return list(map(_row, zip(*fields, strict=False)))


def _checked_rows(
    recipe: Recipe, chosen_M: NDArray[np.int64], weights_M: NDArray[np.float64], scored: int
) -> tuple[list[int], list[float]]:
    chosen: list[int] = chosen_M.tolist()
    # Booleans are no indices: a mask would be read as the indices 0 and 1.
    whole = chosen_M.ndim == 1 and chosen_M.dtype.kind in "iu"
    if not whole or not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) >= scored:
        raise RuleError(
            f"{recipe.rows!r} must choose at least one index below {scored}, and no index twice, got {chosen_M}"
        )
    weights: list[float] = weights_M.tolist()
    if weights_M.shape != chosen_M.shape or not all(map(isfinite, weights)) or min(weights) < 0:
        raise RuleError(f"{recipe.rows!r} must give each row a finite weight of 0 or more, got {weights_M}")
    return chosen, weights


# Makes a row from an iterable of its fields, in half the time of `Row(...)`.
_row: Callable[[Iterable[Any]], Row] = partial(tuple.__new__, Row)  # pyright: ignore
_id, _rollout, _version = map(attrgetter, ("id", "rollout", "version"))
