"""Explain why no more groups may be opened, and how a run ends when nothing is running."""

from __future__ import annotations

from rollalloc.core.budget_tracker import Ends, Halt
from rollalloc.core.rule import called
from rollalloc.core.run import Run
from rollalloc.core.sanity import doubts
from rollalloc.core.statistics import QUARANTINED

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
