"""Take a group from its draw to its end: handle events, ask judges and stop rules, and close the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter, index
from typing import Any

from rollalloc.core.events import (
    FARTHEST,
    LARGEST,
    LARGEST_WHOLE,
    Cancelled,
    Done,
    EventError,
    Failed,
    MetricError,
    Moved,
    Offered,
    Row,
    RuleError,
    Updated,
)
from rollalloc.core.group import OVER, Group, Phase
from rollalloc.core.prompts import GONE, NOW, QUARANTINED, Until
from rollalloc.core.recipe import RIGHT
from rollalloc.core.rule import Act, SampledStops, StopRule, called
from rollalloc.core.run import Run
from rollalloc.core.seeds import rng_when_used
from rollalloc.core.teaching import outcomes

_LEAST_RATE, _MOST_RATE = -1e-6, 1 + 1e-6  # rounding in float32 may put a mean of scores slightly outside [0, 1]
_NO_NUMBER = (TypeError, ValueError, ArithmeticError, RuntimeError)  # raised when None or an array is used as a number
_RUNNING, _READY, _WAITING = Phase.RUNNING, Phase.READY, Phase.WAITING  # attribute lookup on an Enum is slow
_rollout, _metric = map(attrgetter, ("rollout", "metric"))


# ------------------------------------------------------------------------------------------------------------- events


def on_done(run: Run, done: Done) -> None:
    """Handle a rollout that was generated and scored."""
    # All checks come before the first change, so that a refused event changes nothing.
    metric, first, last, uncertainty = done.metric, done.version, done.last_version, done.uncertainty
    try:
        possible = (
            # Every comparison with NaN is false, so these also refuse NaN.
            -LARGEST <= done.reward <= LARGEST
            and -LARGEST <= metric <= LARGEST
            and 0 <= first <= run.version
            and (last is None or first <= last <= run.version)
            and (uncertainty is None or 0 <= uncertainty <= LARGEST)
        )
    except _NO_NUMBER:
        possible = False
    if not possible:
        _refuse(run, done)
    if run.reads_rate and not _LEAST_RATE <= metric <= _MOST_RATE:
        raise MetricError(
            f"rollout {done.rollout}: {', '.join(run.recipe.rate_readers)} reads the metric as a success rate in "
            f"[0, 1], got {done.metric!r}; report a metric for selection, such as 1 for right and 0 for wrong, "
            "separately from the reward that training uses"
        )
    group = _end(run, done.rollout, done.tokens)
    if group is None:  # the rollout was cancelled, but ended before the driver could stop it
        run.accounts["cancelled"] += 1
        run.release.append(done.rollout)
        _end_stopped(run, done)
        return
    group.add(done)
    if metric >= RIGHT:
        run.learn_limit(group, done.rollout, index(done.tokens))
    # One score is enough: it shows that the reward function works and that the engine lives.
    run.failing = 0
    # A judge that waits for whole groups would answer None. A group that has passed already goes to `judge` all the
    # same, because this result may make it too old.
    if (group.running or group.owed) and run.patient_S[group.stage] and group.phase is _RUNNING:
        if len(group.done) >= run.stops_from_S[group.stage]:
            run.flight.touched[group.id] = group
    else:
        judge(run, group)


def on_lost(run: Run, event: Failed | Cancelled) -> None:
    """Handle a rollout that ended without a score."""
    group = _end(run, event.rollout, event.tokens)
    failed = isinstance(event, Failed)
    run.accounts["failed" if failed else "cancelled"] += 1
    run.release.append(event.rollout)
    if group is None:
        _end_stopped(run, event)
        return
    if failed:
        group.failed += 1
    # The length of a stopped rollout is a lower bound, from which rules learn. The length of a failed one says
    # nothing.
    elif event.tokens:
        group.stopped.append(index(event.tokens))
    judge(run, group)


def on_updated(run: Run, event: Updated) -> None:
    """Handle an update of the weights: release or keep the rows of the batch, and drop groups that are now too old."""
    version, batch = whole(event.version, "Updated: version"), run.batch
    if batch is None:
        raise EventError(
            f"Updated({version}): no batch is out; tell one Updated for each batch that `ask` returns, after training on it"
        )
    if version != run.version + 1:
        raise EventError(
            f"Updated({version}): the version must be {run.version + 1}, because versions count the batches that were "
            "trained on, not optimizer steps; tell Updated(allocator.version + 1)"
        )
    if run.unmeasured:
        raise EventError(
            f"Updated({version}): the batch has replayed rows and the recipe's replay has a gate, so tell Moved before the "
            "batch is trained; a trainer that cannot measure this needs a recipe without a gate (no replay_moved)"
        )
    masked = set(event.masked)
    if masked and (others := masked.difference(map(_rollout, batch.rows))):
        raise EventError(
            f"Updated({version}): masked names rollouts {sorted(others)[:5]}, which are not in the batch; name only "
            "rollouts of its rows"
        )
    run.kl_sum += _moved(event)
    run.version = version
    run.selection.begin()
    run.changed()
    # Only now: until the update, the trainer needs the payloads of the batch (law 5).
    if run.recipe.replay is None and not run.kept:  # fast path: no rows are kept for replay
        run.release.extend(map(_rollout, batch.rows))
    else:
        run.kept.update((row.rollout, row) for row in batch.rows)
    run.batch = None
    # What the loss has left out taught nothing, and would be left out again in the place of rows that teach.
    forget(run, [row for row in run.kept.values() if row.rollout in masked or not may_replay(run, row)])
    run.pool.on_version(version)
    # Groups that still run too, because what is still generated for them would be thrown away.
    for group in [group for group in run.flight.groups.values() if run.stale(group)]:
        drop(run, group, "stale", NOW)


def on_moved(run: Run, event: Moved) -> None:
    """Ask the gate about the outstanding batch. If it is shut, take the replayed rows out of the batch and pause replay."""
    batch, gate = run.batch, run.recipe.gate
    fresh = () if batch is None else tuple(row for row in batch.rows if not row.replays)
    if gate is None or batch is None or len(fresh) == len(batch.rows):
        why = "the recipe's replay has no gate" if gate is None else "no batch with replayed rows is out"
        raise EventError(
            f"Moved({event.share!r}): {why}; tell one Moved for each batch with replayed rows, before Updated"
        )
    if not _holds(lambda: 0 <= event.share <= 1):
        raise EventError(f"Moved: share must be a share of tokens in [0, 1], got {event.share!r}")
    run.unmeasured = False
    if gate.opens(float(event.share)):
        run.shut = 0
        return
    left_out = len(batch.rows) - len(fresh)
    run.shut += 1
    run.left_out += left_out
    run.replayed -= left_out
    run.replay_from = run.version + 1 + gate.pause
    run.batch = replace(batch, rows=fresh)


def _moved(event: Updated) -> float:
    """The KL divergence of the update as a Python float; 0 if it was not measured."""
    moved = 0.0 if event.approx_kl is None else event.approx_kl
    if not _holds(lambda: float(moved) >= 0):
        raise EventError(
            f"Updated({event.version}): approx_kl must be a number of 0 or more, or None, got {event.approx_kl!r}"
        )
    return min(float(moved), FARTHEST)


def may_replay(run: Run, row: Row) -> bool:
    """Whether the run may train again on this row (law 12 of docs/protocol.md)."""
    replay = run.recipe.replay
    return replay is not None and row.prompt != GONE and run.finished is None and replay.takes(row, run.version)


def adapt_after_load(run: Run, *, same_recipe: bool, same_prompts: bool) -> None:
    """After a load, adapt the state to a changed recipe or data set."""
    if not (same_recipe and same_prompts):
        run.finished = None  # the reason may no longer hold
    if not same_prompts:
        run.barren = run.failing = 0  # they counted prompts of the old data set
        run.unprepared = run.prepares
    training = {row.rollout for row in run.batch.rows} if run.batch else set[int]()  # needed until the next `Updated`
    forget(run, [row for row in run.kept.values() if row.rollout not in training and not may_replay(run, row)])
    # Nobody could generate further rollouts of these, because their prompts are not in the data set.
    for group in [group for group in run.flight.groups.values() if group.prompt == GONE]:
        drop(run, group, "surplus", NOW)


def prepare(run: Run) -> None:
    """Let the prompt rule prepare the next draws, if a batch was handed out since it last did.

    Everything that changes or shows the rule's memory calls this first. So the memory does not tell when it was prepared.
    """
    if run.unprepared:
        run.unprepared = False
        run.recipe.prompts.prepare(run.memory, run.view())


def forget(run: Run, rows: Sequence[Row]) -> None:
    """Release rows that were kept for replay and may no longer be replayed."""
    for row in rows:
        del run.kept[row.rollout]
        run.release.append(row.rollout)


def on_offered(run: Run, event: Offered) -> None:
    """Handle the prompts that a framework's own data loader offers."""
    rule, pool = run.loader, run.pool
    if rule is None:
        raise EventError(
            f"Offered: the recipe draws its own prompts ({called(run.recipe.prompts)}); use the prompt rule as_offered()"
        )
    wrong = [prompt for prompt in event.prompts if not 0 <= prompt < len(run.table)]
    if wrong or event.epoch < pool.epoch:
        raise EventError(
            f"Offered: expected prompts below {len(run.table)} and an epoch of at least {pool.epoch}, got "
            f"epoch {event.epoch} and prompts {wrong[:5]}"
        )
    if event.epoch > pool.epoch:
        pool.begin(event.epoch)
    run.changed()
    # Leave out prompts that may never be drawn. Otherwise `wanted` would count them and ask the loader for too few.
    useful = [prompt for prompt in event.prompts if not pool.is_barred(prompt)]
    if useful or not event.prompts:
        rule.offer(run.memory, useful)
    elif rule.ended(run.memory):
        # The loader offers prompts again after its end. Offer them, because an empty offer would report the end again.
        rule.offer(run.memory, event.prompts)


def _refuse(run: Run, done: Done) -> None:
    """Raise an EventError that names the impossible value: a reward, a metric, an uncertainty or a version."""
    first, last = done.version, done.version if done.last_version is None else done.last_version
    if not _holds(lambda: abs(done.reward) <= LARGEST and abs(done.metric) <= LARGEST):
        raise EventError(
            f"rollout {done.rollout}: reward {done.reward!r} and metric {done.metric!r} must be finite numbers within "
            f"±{LARGEST:g}; scale them, and tell Failed for a rollout without a score"
        )
    if not _holds(lambda: done.uncertainty is None or 0 <= done.uncertainty <= LARGEST):
        raise EventError(
            f"rollout {done.rollout}: uncertainty {done.uncertainty!r} must be the sum of (1 - probability)² over its "
            "tokens, 0 or more, or None if it is unknown"
        )
    raise EventError(
        f"rollout {done.rollout}: versions {first} to {last} must lie between 0 and {run.version}, the version of "
        "the weights; tell Updated before you tell results of newer weights"
    )


def _holds(condition: Callable[[], Any]) -> bool:
    """Whether a condition holds. False if a value from the driver is not a number and the condition raises an error."""
    try:
        return bool(condition())
    except _NO_NUMBER:
        return False


def _end(run: Run, rollout: int, tokens: int) -> Group | None:
    """Account for a rollout's terminal event and return its group, or None if the rollout had been cancelled."""
    if type(tokens) is not int or not 0 <= tokens <= LARGEST_WHOLE:
        tokens = whole(tokens, f"rollout {rollout}: tokens")
    flight = run.flight
    group = flight.owner.get(rollout)
    if group is not None:
        if group.limit is not None and tokens > group.limit:
            raise EventError(
                f"rollout {rollout}: it has {tokens} tokens, but its order has a limit of {group.limit}; give `Order.limit` "
                "to the engine as the maximum number of tokens, or take a recipe without a limit (no limit_at)"
            )
        del flight.owner[rollout], group.running[rollout]
        group.tokens += tokens
    elif rollout not in flight.stopped:
        known = 0 <= rollout < run.next_rollout
        why = "already had its terminal event, or was not handed out" if known else "was never ordered"
        raise EventError(
            f"rollout {rollout!r}: {why}; tell exactly one of Done, Failed and Cancelled for each rollout of an Order"
        )
    run.budgets.tokens += tokens
    return group


def _end_stopped(run: Run, event: Done | Failed | Cancelled) -> None:
    """Account for the terminal event of a cancelled rollout."""
    group = run.flight.stopped.pop(event.rollout)
    group.awaited -= 1
    tokens = index(event.tokens)
    if tokens and not isinstance(event, Failed):
        group.stopped.append(tokens)
    # Not through `group.tokens`: if the group is over, `close` has already added these to the statistics.
    if group.prompt != GONE:
        run.statistics.tokens_N[group.prompt] += tokens
        _inform_sizes(run, group)
        if group.phase in OVER:
            run.selection.end_late(group, tokens)


def _inform_sizes(run: Run, group: Group) -> None:
    """Let the size rules learn from a visit, once the group is over and all its cancelled rollouts have ended."""
    # Not earlier: the lengths of a visit are complete only when the last stopped rollout has ended.
    if run.learning_S and group.phase in OVER and not group.awaited:
        for at, rule in run.learning_S.items():
            rule.observe(run.size_memory[at], group.view)


def whole(number: int, name: str) -> int:
    """Return the number as a Python int, for the saved state; raise an EventError if it is not in [0, `LARGEST_WHOLE`]."""
    try:
        plain = index(number)
    except TypeError:
        plain = -1
    if not 0 <= plain <= LARGEST_WHOLE:
        raise EventError(f"{name} must be a whole number of 0 or more, at most {LARGEST_WHOLE}, got {number!r}")
    return plain


# ----------------------------------------------------------------------------------------------------------- verdicts


def judge(run: Run, group: Group) -> None:
    """After a rollout of the group ended or was stopped, ask the judge of the group's stage for a verdict."""
    if group.phase is not _RUNNING:  # there is a verdict already
        run.changed()
        if run.stale(group):  # this late rollout is so old that the group cannot be trained on
            drop(run, group, "stale", NOW)
        return
    stage = run.recipe.stages[group.stage]
    if not group.done and not group.unfinished:
        drop(run, group, "failed", stage.judge.traits.after_failure)
        return
    verdict = stage.judge(group.view, run.view())
    if verdict is None:
        if not group.unfinished:
            raise RuleError(f"judge {stage.judge!r} returned no verdict although all rollouts of the group have ended")
        if len(group.done) >= run.stops_from_S[group.stage]:
            run.flight.touched[group.id] = group
    elif verdict.act is Act.DROP:
        drop(run, group, verdict.reason, verdict.until)
    # A judge may let a group pass before any rollout has a score, or after rollouts of very old weights. It could not
    # be trained on.
    elif not group.done or run.stale(group):
        drop(run, group, "stale" if group.done else "failed", NOW)
    else:
        _pass(run, group, verdict.act, verdict.until)


def _pass(run: Run, group: Group, act: Act, until: Until) -> None:
    """Let a group that passed wait for its next stage, or for a batch."""
    if act is Act.NEXT and group.stage == len(run.recipe.stages) - 1:
        raise RuleError(f"judge {run.recipe.stages[-1].judge!r} returned NEXT in the last stage; expected TRAIN")
    group.until = until
    run.flight.move(group, _WAITING if act is Act.NEXT else _READY)
    if act is Act.TRAIN:
        if group.running or group.owed:
            stop(run, group, [*group.running, *group.owed])
        run.barren = 0
    run.changed()


def drop(run: Run, group: Group, reason: str, until: Until) -> None:
    """End the group without training on it."""
    stop(run, group, [*group.running, *group.owed])
    run.accounts[reason.partition("/")[0]] += len(group.done)
    run.release.extend(map(_rollout, group.done))
    # A group that had passed was worth its rollouts. That it is now too old or surplus says nothing against the
    # prompts.
    run.barren += group.phase is _RUNNING
    close(run, group, Phase.DROPPED, reason, until)


def close(run: Run, group: Group, phase: Phase, fate: str, until: Until) -> None:
    """Record that the group is over, and when its prompt may be drawn again."""
    run.flight.move(group, phase)
    run.changed()
    if run.on_close is not None:
        run.on_close(group.id, fate)
    if group.prompt == GONE:
        return
    run.selection.end(group)
    is_pilot = phase is Phase.DROPPED and group.stage < len(run.recipe.stages) - 1
    run.teaching.add(outcomes(group, fate, pilots=is_pilot))
    # Before `close_visit`, because a rule compares this visit with the record of the visits before it.
    if run.learns:  # else the view need not be built
        run.recipe.prompts.observe(run.memory, group.view, run.view())
    quarantined = False
    # Cancelled rollouts alone are no failure of the prompt: the driver or a stop rule wanted them to end.
    if group.failed and not group.done:
        run.failing += 1
        failures, limit = run.statistics.fail(group.prompt), run.recipe.quarantine_after
        quarantined = limit is not None and failures >= limit
    if quarantined:
        fate = QUARANTINED
    run.statistics.close_visit(group.prompt, fate, run.version, list(map(_metric, group.done)))
    _inform_sizes(run, group)
    run.statistics.tokens_N[group.prompt] += group.tokens
    if quarantined:
        run.pool.bar(group.prompt)
    else:
        if run.recipe.retire is not None and group.done:
            until = run.recipe.retire.until(run.statistics.record(group.prompt), until)
        run.pool.give_back(group.prompt, until, group.epoch, run.version)


def discard_waiting(run: Run) -> None:
    """Drop every group that waits, in any stage."""
    for group in run.flight.waiting():
        # When its verdict says, usually in the next epoch. If the prompt were free now, it would be drawn again
        # before prompts that had no visit yet.
        drop(run, group, "surplus", group.until)


# -------------------------------------------------------------------------------------------------------------- stops


def stop(run: Run, group: Group, rollouts: Sequence[int]) -> None:
    """Cancel rollouts of a group. Rollouts that were not ordered yet are removed without an event."""
    owed = set(rollouts).intersection(group.owed) if group.owed else set[int]()
    if owed:
        group.owed = [rollout for rollout in group.owed if rollout not in owed]
        run.budgets.owed -= len(owed)
        run.changed()
    for rollout in rollouts:
        if rollout in group.running:
            del group.running[rollout], run.flight.owner[rollout]
            run.flight.stopped[rollout] = group
            run.cancel.append(rollout)
            group.cancelled += 1
            group.awaited += 1
        elif rollout not in owed:
            raise RuleError(f"a stop rule named rollout {rollout}, which is not running in group {group.id}")


def stop_early(run: Run) -> None:
    """Ask the stop rules about the groups that changed."""
    # Emptied first, because `judge` below may touch a group again.
    touched, run.flight.touched = list(run.flight.touched.values()), {}
    for group in touched:
        rule = run.recipe.stages[group.stage].stop
        if rule is None or group.phase is not _RUNNING:
            continue
        # The key has only the group: a rule that is asked again about a group draws the same numbers, so a driver
        # that asks more often gives no rollout a second chance.
        named = rule(group.view, run.view(), rng_when_used(run.seed, "stop", group.id))
        if isinstance(named, SampledStops):
            _keep(group, rule, named)
            named = named.cancel
        rollouts = [int(rollout) for rollout in named]
        if rollouts:
            owed = len(group.owed)
            stop(run, group, rollouts)
            group.cancelled += owed - len(group.owed)  # the rule also stopped rollouts that were not ordered yet
            judge(run, group)


def _keep(group: Group, rule: StopRule, sample: SampledStops) -> None:
    """Record the rollouts that a stop rule kept, with their probabilities."""
    try:
        kept = {index(rollout): float(share) for rollout, share in sample.kept.items()}
        alive = {*group.running, *group.owed}.difference(sample.cancel)
        possible = alive >= kept.keys() and all(0 < share <= 1 for share in kept.values())
    except (AttributeError, TypeError, ValueError):  # `kept` does not map rollouts to numbers
        kept, possible = {}, False
    if not possible:
        raise RuleError(
            f"{rule!r}: `kept` must map rollouts that are unfinished and not cancelled to probabilities in (0, 1], got "
            f"{sample}"
        )
    group.kept.update(kept)


def withhold(run: Run) -> None:
    """After the budget is spent, remove the rollouts that were decided but not ordered."""
    # By id, because a group may owe rollouts of two stages.
    for group in {group.id: group for owing in run.flight.owing_S for group in owing if group.owed}.values():
        stop(run, group, list(group.owed))
        if not group.unfinished and not group.done:
            # Nothing failed here, but `judge` would call a group without a result failed.
            drop(run, group, "surplus", NOW)
        else:
            judge(run, group)
