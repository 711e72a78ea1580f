"""DAPO's dynamic sampling: generate until enough groups have rewards that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rollalloc.core.recipe import Recipe, at_least, one_of
from rollalloc.recipes.grpo import batches_ahead, grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, intake, judges


@sized
def dapo(
    groups: int = 16,
    n: int = 4,
    gen_groups: int | None = None,
    surplus: Literal["discard", "carry"] = "discard",
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """DAPO's dynamic sampling: keep generating until `groups` groups have rewards that differ. arXiv 2503.14476.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        gen_groups: prompts generated at a time, at least 1; None: three times `groups`.
        surplus: what becomes of more such groups than needed: "discard" as published, or "carry" into the next batch.
        max_candidates: prompts tried for one batch at most; then it is short. None: no limit.
        deviation: as for `grpo`.
    """
    at_least("n", n, 2, "the rewards of one rollout cannot differ")
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
