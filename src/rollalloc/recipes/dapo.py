"""DAPO's dynamic sampling, arXiv 2503.14476: generate until enough groups have rewards that differ.

For runs in which many groups are all right or all wrong. Every trained group gives a learning signal, but the rollouts of
dropped groups are wasted.

Only the choice of groups is here. The paper's asymmetric clipping and its average over tokens are settings of the
trainer. Two options are not in the paper: surplus groups may be carried into the next batch, and a batch may have fewer
groups if `max_candidates` prompts were tried.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rollalloc.core.recipe import Recipe, at_least, one_of
from rollalloc.recipes.grpo import batches_ahead, grpo, shape
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, intake, judges


@sized(shape)
def dapo(
    groups: int = 16,
    n: int = 4,
    gen_groups: int | None = None,
    surplus: Literal["discard", "carry"] = "discard",
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """DAPO's dynamic sampling: generate until `groups` groups have rewards that differ. arXiv 2503.14476.

    1. Keep `gen_groups` prompts in generation, with n rollouts each.
    2. When all rollouts of a group have ended, keep the group if its metrics differ, and drop it otherwise.
    3. When `groups` groups are kept, train on them with GRPO's advantages.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        gen_groups: number of prompts in generation at a time, at least 1. None: three times `groups`.
        surplus: what happens if more groups are kept than the batch needs: "discard" them, as published, or "carry" them
            into the next batch.
        max_candidates: maximum number of prompts tried for one batch. At this limit, the groups that were kept are
            trained on. None: no limit.
        deviation: the kind of standard deviation, see `grpo`.
    """
    at_least("n", n, 2, "so that rewards can differ")
    gen_groups = batches_ahead(groups, gen_groups)
    one_of("surplus", surplus, ("discard", "carry"))
    base = grpo(groups, n, deviation)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.NonzeroVariance()),),
        intake=intake.KeepInFlight(gen_groups),
        max_staleness=1 if surplus == "carry" else 0,
        max_candidates=max_candidates,
    )
