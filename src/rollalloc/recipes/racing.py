"""Racing: a prompt gets more rollouts, stage by stage, while its results are mixed."""

from __future__ import annotations

from dataclasses import replace

from rollalloc.core.recipe import Recipe, Stage
from rollalloc.core.rule import Act
from rollalloc.recipes.grpo import batches_ahead, grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, intake, judges, promote, sizes


@sized
def racing(
    groups: int = 16,
    sizes_S: tuple[int, ...] = (4, 8, 16),
    gen_groups: int | None = None,
    max_staleness: int = 0,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Racing: a prompt gets more rollouts, stage by stage, while its results so far are mixed.

    A stage's verdict falls as soon as two results differ, without waiting for the rest. So in an asynchronous run what is
    in a batch depends on what finished first.

    Args:
        groups: prompts in a batch, at least 1.
        sizes_S: rollouts a prompt has after each stage, growing, e.g. (4, 8, 16).
        gen_groups: prompts in the first stage at a time, at least 1; None: three times `groups`.
        max_staleness: updates of the weights after which a rollout is too old to train on.
        deviation: as for `grpo`.
    """
    gen_groups = batches_ahead(groups, gen_groups)
    more = increments(sizes_S)
    last = len(more) - 1
    stages = tuple(
        Stage(
            f"to {sizes_S[index]}",
            sizes.Fixed(size),
            judges.Complete()
            if index == last and last
            else judges.NonzeroVariance(Act.TRAIN if index == last else Act.NEXT, early=index < last),
            None,
            promote.Oldest(),
        )
        for index, size in enumerate(more)
    )
    return replace(
        grpo(groups, sizes_S[-1], deviation),
        stages=stages,
        intake=intake.KeepInFlight(gen_groups),
        max_staleness=max_staleness,
    )


def increments(sizes_S: tuple[int, ...]) -> list[int]:
    """Rollouts that each stage adds to those of the stages before."""
    more = [after - before for before, after in zip((0, *sizes_S), sizes_S, strict=False)]
    if not more or min(more) < 1:
        raise ValueError(f"sizes_S must be growing numbers of rollouts, got {sizes_S}")
    return more
