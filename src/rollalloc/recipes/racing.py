"""Racing: give a prompt more rollouts, stage by stage, only if its results so far differ.

For runs in which many groups are all right or all wrong. Such groups cost only the rollouts of the first stage.
This method is ours.
"""

from __future__ import annotations

from dataclasses import replace

from rollalloc.core.recipe import Recipe, Stage
from rollalloc.core.rule import Act
from rollalloc.recipes.grpo import batches_ahead, grpo
from rollalloc.recipes.shapes import Sizes, groups_of, sized
from rollalloc.rules import advantages, intake, judges, promote, sizes


def shape(rows: int = 64, group_rows: int = 4) -> Sizes:
    """A quarter of a group, half of it, and all of it; at least two rollouts, because a single result never differs.

    Args:
        rows: rows of a batch, at least 1.
        group_rows: rollouts of a prompt after the last stage, at least 2.
    """
    sizes_S = tuple(dict.fromkeys(min(group_rows, max(2, group_rows // share)) for share in (4, 2, 1)))
    return {"groups": groups_of(rows, group_rows), "sizes_S": sizes_S}


@sized(shape)
def racing(
    groups: int = 16,
    sizes_S: tuple[int, ...] = (2, 4),
    gen_groups: int | None = None,
    max_staleness: int = 0,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Racing: a prompt gets more rollouts, stage by stage, if its results so far are mixed.

    1. Generate `sizes_S[0]` rollouts of each prompt.
    2. If two results differ, the prompt goes on to the next stage at once, without waiting for its other rollouts.
       If all results of the stage are alike, the prompt is dropped until the next epoch.
    3. After the last stage, train on all rollouts of the prompt, as GRPO does.

    In an asynchronous run, the content of a batch depends on which rollouts ended first.

    Args:
        groups: prompts in a batch, at least 1.
        sizes_S: total rollouts of a prompt after each stage, increasing, such as (4, 8, 16).
        gen_groups: prompts in the first stage at a time, at least 1. None: three times `groups`.
        max_staleness: maximum age of a rollout that is trained on, in updates of the weights; 0 or more.
        deviation: the kind of standard deviation, see `grpo`.
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
    """Return the number of rollouts that each stage adds."""
    more = [after - before for before, after in zip((0, *sizes_S), sizes_S, strict=False)]
    if not more or min(more) < 1:
        raise ValueError(f"sizes_S must be increasing numbers of rollouts, got {sizes_S}")
    return more
