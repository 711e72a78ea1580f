"""Filters: which prompts are rolled out at all, and which groups are trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rollalloc.core.prompt_pool import NOW
from rollalloc.core.recipe import Recipe, at_least, one_of
from rollalloc.recipes.groups import batches_ahead, grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, intake, judges, prompts


@sized
def mopps(groups: int = 16, n: int = 4, target: float = 0.5, decay: float = 0.5, pool: int = 8) -> Recipe:
    """MoPPS: prompts whose success rate, drawn from what is known of each, lies nearest to a target. arXiv 2507.04632.

        rate ~ Beta(α, β);  after s successes in n rollouts  α ← λα + (1 - λ)α₀ + s,  β ← λβ + (1 - λ)β₀ + n - s

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        target: the success rate looked for, in (0, 1).
        decay: λ in [0, 1]; the past fades by it at every visit.
        pool: candidates for each prompt drawn, at random, at least 1.
    """
    base = grpo(groups, n)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NOW)),),
        prompts=prompts.Posterior(target=target, decay=decay, pool=pool),
    )


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


@sized
def greso(
    groups: int = 16,
    n: int = 4,
    gen_groups: int | None = None,
    zero_share: float = 0.25,
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """GRESO: DAPO that passes over prompts which taught nothing when last visited, before any rollout. arXiv 2506.02177.

        drawn at its turn with probability max(p^z, 0.01);  z: its last visits in a row that were all solved, or all failed

    and, once it is known how many prompts teach, as many are generated at a time as should fill the batch, with a quarter to
    spare.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        gen_groups: prompts generated at a time at most, at least 1; None: three times `groups`.
        zero_share: share of prompts without variance that is aimed at, by adapting p, in (0, 1).
        max_candidates: as for `dapo`.
        deviation: as for `grpo`.
    """
    gen_groups = batches_ahead(groups, gen_groups)
    return replace(
        dapo(groups, n, gen_groups, max_candidates=max_candidates, deviation=deviation),
        prompts=prompts.Selective(zero_share),
        intake=intake.Estimated(gen_groups),
    )


@sized
def vcrl(
    groups: int = 16,
    n: int = 4,
    kappa: float = 0.8,
    kappa_first: float = 0.3,
    first: int = 20,
    replays: int = 2,
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """VCRL: groups whose metrics vary enough are trained on, prompts that did so replace the others. arXiv 2509.19803.

        trained on where  G Σ (m_i - mean)² / (⌊G/2⌋ ⌈G/2⌉) ≥ kappa

    The prompts that replace them are rolled out anew.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        kappa: in (0, 1].
        kappa_first: instead, in the first `first` updates of the weights, in (0, 1].
        first: 0 or more.
        replays: times that a prompt replaces another one after it was trained on, at least 1.
        max_candidates: as for `dapo`.
        deviation: as for `grpo`.
    """
    at_least("n", n, 2, "one rollout does not vary")
    base = grpo(groups, n, deviation)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Varied(kappa, kappa_first, first)),),
        prompts=prompts.Banked(replays),
        max_candidates=max_candidates,
    )
