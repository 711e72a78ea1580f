"""Decide which groups go on, which prompts are drawn, how many rollouts each gets, and which rollouts are ordered now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf, isfinite
from operator import index
from typing import Any

from rollalloc.core import endings
from rollalloc.core.budget_tracker import Halt
from rollalloc.core.errors import RuleError
from rollalloc.core.events import Order
from rollalloc.core.group import Drawn, Group
from rollalloc.core.phase import Phase
from rollalloc.core.run import Run
from rollalloc.core.seeds import rng_when_used


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
    if halt := endings.opening_halt(run):
        return halt
    prompts = _draw(run, at_most_candidates(run, wanted))
    if not prompts:
        return endings.prompts_halt(run)
    groups: list[Group] = []
    for drawn, epoch in prompts:
        groups.append(Group(run.next_group, drawn, epoch, run.statistics))
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
                orders.append(_order((group.id, group.prompt, stage, ids)))
            if not group.owed:  # all its rollouts were ordered already, or it was dropped
                owing.popleft()
    run.budgets.owed -= room - left
    run.budgets.paid += room - left
    return tuple(orders)
