"""Decide which groups go on, which prompts are drawn, and how many rollouts each gets; make batches; say why a run ends.

In this order: why no more groups may be opened; who goes on and who is drawn; which rollouts are ordered now; batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, repeat
from math import inf, isfinite
from operator import attrgetter, index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.events import Batch, Order, Row, RuleError
from rollalloc.core.group import Drawn, Group, Phase, parts
from rollalloc.core.lifecycle import close, discard_waiting, drop
from rollalloc.core.prompts import NOW, QUARANTINED
from rollalloc.core.recipe import Recipe, doubts
from rollalloc.core.rule import called
from rollalloc.core.run import Ends, Halt, Run
from rollalloc.core.seeds import rng, rng_when_used

# End the run after max(_PATIENCE, number of prompts) candidates in a row gave no group to train on.
_PATIENCE = 256
_OUTAGE = 64  # end the run after this many candidates in a row whose rollouts all failed


def opening_halt(run: Run) -> Halt | None:
    """The reason why no group may be opened now; None if a group may be opened."""
    limit = run.recipe.max_candidates
    if limit is not None and run.budgets.batch_opened >= limit:
        ready = f"{len(run.flight.ready)} of {run.recipe.groups} groups ready"
        return Halt(f"max_candidates: {limit} prompts tried, {ready}", Ends.BATCH)
    # Before `barren`, which counts failed groups too: this says what is to be mended.
    if run.failing >= _OUTAGE:
        return Halt(
            f"failed: the last {run.failing} prompts tried gave no score, because their rollouts failed; prompts by "
            f"the fate of their last visit: {_fates(run)}",
            Ends.RUN,
        )
    # At least a whole pass, and many of a small data set: each of 20 prompts may give equal rewards once by chance.
    if run.barren >= max(_PATIENCE, len(run.table)):
        return Halt(
            f"barren: none of the last {run.barren} prompts tried gave a group to train on; prompts by the fate of "
            f"their last visit: {_fates(run)}. Unless rollouts failed or went stale, the prompts are solved or "
            "impossible for this model, or the reward function gives all rollouts of a prompt the same reward: test the "
            f"reward function with a right answer and a wrong answer{''.join(f'. {doubt}' for doubt in doubts(run.recipe))}",
            Ends.RUN,
        )
    return run.budgets.halt() if run.budgets.room() == 0 else None


def prompts_halt(run: Run) -> Halt:
    """The reason why no prompt can be drawn."""
    loader = run.loader
    # If the pool is dry, or no prompt may ever be drawn again, further offers would not help.
    if loader is not None and not run.pool.dry and run.pool.barred < len(run.table):
        if loader.ended(run.memory):
            return Halt("prompts: the loader has ended and all prompts that it offered were used", Ends.RUN)
        why = "all prompts offered are used up; tell Offered with more of them (Allocator.wanted() says how many)"
        return Halt(f"{why}, or with an empty tuple if the loader has ended", Ends.NOTHING)
    return Halt(
        f"prompts: none of {len(run.table)} may be drawn, {run.pool.evicted()} are evicted and "
        f"{len(run.statistics.with_fate(QUARANTINED))} quarantined; prompts by the fate of their last visit: "
        f"{_fates(run)}{''.join(f'. {remedy}' for remedy in _remedies(run))}",
        Ends.RUN,
    )


_SHUT = 8  # warn if the gate left out the replayed rows of this many batches in a row, and again each time it doubles


def shut_gate(run: Run) -> str | None:
    """Return a warning if the gate left out the replayed rows of the outstanding batch and of many before it, or None."""
    gate, times = run.recipe.gate, run.shut // _SHUT
    if gate is None or run.replay_from != run.version + 1 + gate.pause or run.shut % _SHUT or times & (times - 1):
        return None
    return (
        f"replay gives nothing: in each of the last {run.shut} batches that had replayed rows, more than {gate.most:.0%} of "
        "their tokens had moved, so that they were left out. Replay younger rows (replay_staleness), lower the learning "
        "rate, raise the bound (replay_moved), or turn replay off (replay=0), which saves measuring them"
    )


def few_prompts(run: Run) -> str:
    """Return a warning: the number of prompts left to draw, the reasons, and a remedy. Every driver logs this warning."""
    left, prompts, why = run.pool.left, len(run.table), ". ".join(_remedies(run))
    return f"only {left:,} of {prompts:,} prompts can still be drawn in this epoch or the next{why and f'. {why}'}"


def _remedies(run: Run) -> list[str]:
    """List the reasons why prompts cannot be drawn, each with the number of prompts and what to change."""
    evicted, quarantined = run.pool.evicted(), len(run.statistics.with_fate(QUARANTINED))
    remedies: list[str] = []
    retire = run.recipe.retire
    if evicted and retire is not None:
        remedies.append(
            f"{evicted:,} are retired or evicted, because their success rate has reached {retire.level:g}: train on harder "
            "prompts, raise the level (retire_at), or try such prompts again sooner (retire_for, in epochs)"
        )
    elif evicted:
        remedies.append(
            f"{evicted:,} are evicted as solved: if they are solved, train on harder prompts; otherwise require more "
            "evidence before a prompt is evicted (pilot_commit's p_solve=0.9, confidence=0.95), pilot evicted prompts "
            "again sooner (reprobe_every=1), or evict none (p_solve=2)"
        )
    if quarantined:
        remedies.append(
            f"{quarantined:,} are quarantined, because their rollouts failed in {run.recipe.quarantine_after} visits in a "
            "row: find out why they fail; check the reward function first"
        )
    return remedies


def no_progress(run: Run) -> str:
    """Explain why nothing could be ordered although nothing is running."""
    if any(run.flight.waiting_S):
        promote = [stage.promote for stage in run.recipe.stages]
        return f"groups wait and nothing is running, but none of the promote rules {promote} lets a group go on"
    return f"no group exists and nothing is running, but {called(run.recipe.intake)} opens no group"


def _fates(run: Run) -> str:
    return ", ".join(f"{count} {fate}" for fate, count in run.statistics.counts().items() if count)


def decide(run: Run) -> Halt | None:
    """Decide rollouts for waiting groups and for new groups. Return why no more groups could be opened, or None."""
    if run.blocked():
        return None
    # Before the moves below: `_enter` takes it back, so it stays True only if the decision moves no group.
    run.settled = True
    halt = None
    for stage in reversed(range(len(run.recipe.stages) - 1)):  # groups in later stages come first
        halt = _promote(run, stage) or halt
    # If the budget had no room for a group that waits, no new group may take what is left of it.
    return halt or _intake(run)


def _promote(run: Run, stage: int) -> Halt | None:
    """Move groups that passed this stage into the next stage, as many as the batch needs."""
    flight = run.flight
    # Without the groups that are ready, which `need` has already subtracted.
    ahead = sum(flight.running_S[stage + 1 :]) + sum(map(len, flight.waiting_S[stage + 1 : -1]))
    k = run.need() - ahead
    if k <= 0:
        return None
    chosen = choose(run, stage, k)
    entered = _enter(run, chosen, stage + 1)
    return None if entered == len(chosen) else run.budgets.halt()


def choose(run: Run, stage: int, k: int) -> list[Group]:
    """Let a stage's promote rule choose at most k of the groups that wait after the stage."""
    awaited = int(run.batch is not None)  # an update is due: leave out groups that will be too old after it
    waiting = run.fresh(run.flight.waiting_S[stage].values(), awaited)
    if not waiting:
        return []
    k = min(k, len(waiting))
    views = [group.view for group in waiting]
    promote = run.recipe.stages[stage].promote
    # `next_rollout` grows with every group that enters a stage. So each decision draws anew, and a decision that is
    # repeated after a load draws the same.
    chosen = promote(views, k, run.view(), rng_when_used(run.seed, "promote", stage, run.next_rollout))
    if not chosen:
        return []
    ids, by_id = [view.group for view in chosen], {group.id: group for group in waiting}
    if len(ids) > k or len(set(ids)) < len(ids) or not by_id.keys() >= set(ids):
        raise RuleError(f"{promote!r} must choose at most {k} different groups of {list(by_id)}, got {ids}")
    return [by_id[group] for group in ids]


def _intake(run: Run) -> Halt | None:
    """Draw prompts and open groups, as many as the recipe wants and its limits allow."""
    wanted = run.recipe.intake(run.view(), run.memory)
    if wanted <= 0:
        return None
    # Before the draw, because a prompt that is drawn cannot be put back: the rule's memory has moved on.
    if halt := opening_halt(run):
        return halt
    prompts = _draw(run, at_most_candidates(run, wanted))
    if not prompts:
        return prompts_halt(run)
    groups: list[Group] = []
    for drawn, epoch in prompts:
        group = Group(run.next_group, drawn, epoch, run.statistics)
        group.limit = run.limit_of(group.id)
        groups.append(group)
        run.next_group += 1
    entered = _enter(run, groups, 0)
    run.budgets.batch_opened += entered
    # The rule has drawn these and will not draw them again, so they are kept for when there is room.
    run.drawn = prompts[entered:] + run.drawn
    return None if entered == len(groups) else run.budgets.halt()


def at_most_candidates(run: Run, groups: int) -> int:
    """Limit a number of groups to the number of prompts and to the rest of `max_candidates` for this batch."""
    limit = run.recipe.max_candidates
    return min(groups, len(run.table), *([] if limit is None else [limit - run.budgets.batch_opened]))


def _enter(run: Run, groups: list[Group], stage: int) -> int:
    """Decide the rollouts of groups that enter a stage together. Return how many groups the budgets had room for."""
    if not groups:
        return 0
    sizes = _sizes(run, groups, stage)
    room = run.budgets.room()
    entered = 0
    for group, size in zip(groups, sizes, strict=True):
        if room is not None:
            if size > room:
                # A smaller group behind it may not overtake: the rules have put the groups in this order.
                break
            room -= size
        run.flight.move(group, Phase.RUNNING, stage)
        group.extend(run.next_rollout, size)
        run.next_rollout += size
        run.budgets.owed += size
        run.flight.owing_S[stage].append(group)
        entered += 1
    run.changed()
    return entered


def _sizes(run: Run, groups: list[Group], stage: int) -> list[int]:
    """Ask the stage's size rule for the number of rollouts of each group."""
    rule = run.recipe.stages[stage].size
    sizes = [int(size) for size in rule([group.view for group in groups], run.view(), run.size_memory[str(stage)])]
    if len(sizes) != len(groups) or min(sizes) < 1:
        raise RuleError(f"{rule!r} must give each of {len(groups)} groups at least 1 rollout, got {sizes}")
    return sizes


def _draw(run: Run, k: int) -> list[tuple[Drawn, int]]:
    """Draw at most k prompts, each with its epoch. Begin the next epoch if this epoch has no more prompts."""
    drawn, run.drawn = run.drawn[:k], run.drawn[k:]
    pool = run.pool

    def pick() -> bool:
        picked = _pick(run, k - len(drawn), len(drawn)) if len(drawn) < k else []
        drawn.extend((each, pool.epoch) for each in picked)
        return len(drawn) == k

    if pool.dry or pick():
        return drawn
    if run.loader is not None:  # the loader decides when its next epoch begins
        pool.dry = not pool.any_due()
    elif pool.roll():
        run.changed(settled=run.settled)
        # A rule may notice only while it picks that its own pass over the prompts has ended. It then picks too few prompts,
        # and is asked again.
        pool.dry = not pick() and not pick()
    return drawn


def _pick(run: Run, k: int, already: int) -> list[Drawn]:
    rule, free_N = run.recipe.prompts, run.pool.free_N.view()
    # A rule that wrote into this array would give prompts away without the pool's knowledge.
    free_N.flags.writeable = False
    # If a rule is asked twice in one decision, it must not draw the same numbers twice: `already` differs if the
    # first answer had prompts, and the epoch differs if it had none.
    draw = rng_when_used(run.seed, "pick", run.next_group + already, run.pool.epoch)
    answer = rule.pick(run.memory, k, free_N, run.view(), draw)
    try:
        picked = [_drawn(each) for each in answer]
    except (TypeError, ValueError) as error:
        raise RuleError(
            f"{rule!r} must pick indices of prompts or `Drawn`s of plain numbers, got {answer!r}"
        ) from error
    prompts = [each.prompt for each in picked]
    known = all(0 <= prompt < free_N.size for prompt in prompts)
    if len(prompts) > k or len(set(prompts)) < len(prompts) or not known or not all(free_N[prompts]):
        raise RuleError(f"{rule!r} must pick at most {k} different free prompts, got {prompts[:20]}")
    for each in picked:
        if not _is_possible(each):
            raise RuleError(
                f"{rule!r} must draw with a predicted rate in [0, 1], a finite baseline and a finite sampling ratio above "
                f"0; each may be None; got {each}"
            )
        run.pool.take(each.prompt)
    return picked


def _drawn(picked: Any) -> Drawn:
    """Convert the prompt that a rule picked to plain Python numbers, because a state with NumPy numbers cannot be saved."""
    if not isinstance(picked, Drawn):
        return Drawn(index(picked))
    prompt, *thought = picked
    return Drawn(index(prompt), *(None if value is None else float(value) for value in thought))


def _is_possible(drawn: Drawn) -> bool:
    _, predicted, baseline, sampling_ratio = drawn
    return (
        (predicted is None or 0 <= predicted <= 1)
        and (baseline is None or isfinite(baseline))
        and (sampling_ratio is None or 0 < sampling_ratio < inf)
    )


# Makes an order from its fields, in half the time of `Order(...)`.
_order: Callable[[Iterable[Any]], Order] = partial(tuple.__new__, Order)  # pyright: ignore


def hand_out(run: Run, capacity: int | None) -> tuple[Order, ...]:
    """Turn decided rollouts into orders, later stages first. If the capacity does not suffice, the last order is split."""
    owed = run.budgets.owed
    room = owed if capacity is None or capacity > owed else capacity
    if not room:
        return ()
    orders: list[Order] = []
    left, owner = room, run.flight.owner
    # Groups are removed from a queue only when they reach its front, because searching the queue for a group that was
    # dropped would take longer.
    for owing in reversed(run.flight.owing_S):
        while owing and left:
            group = owing[0]
            for stage, ids in group.hand_out(left):
                left -= len(ids)
                for rollout in ids:
                    owner[rollout] = group
                orders.append(_order((group.id, group.prompt, stage, ids, group.limit)))
            if not group.owed:  # all its rollouts were ordered already, or it was dropped
                owing.popleft()
    run.budgets.owed -= room - left
    run.budgets.paid += room - left
    return tuple(orders)


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
    run.unmeasured = bool(replays) and recipe.gate is not None
    rows += replays
    # After the update, these groups are too old to train on.
    if recipe.max_staleness == 0:
        discard_waiting(run)
    run.budgets.batch_opened = 0
    run.barren = 0  # with the new weights, the same prompts may give groups to train on
    run.teaching.after_batch()
    run.pool.after_batch()
    run.batch = Batch(tuple(rows), run.version, short_because)
    run.unprepared = run.prepares
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
    if replay is None or not run.kept or run.version < run.replay_from:
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
