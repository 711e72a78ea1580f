"""Group baselines: n rollouts per prompt, each against the others of its prompt."""

from __future__ import annotations

from dataclasses import replace

from rollalloc.core.recipe import Budget, Recipe, Stage, at_least
from rollalloc.rules import advantages, intake, judges, promote, prompts, rows, sizes

QUARANTINE_AFTER = 3  # one visit without a score may be an outage, three are the prompt's own fault


def grpo(groups: int, n: int, deviation: advantages.Deviation | None = None) -> Recipe:
    """GRPO: n rollouts for each of `groups` prompts, all trained on. The baseline.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        deviation: what advantages are divided by: the "population"'s standard deviation of the group's rewards, or the
            "sample"'s. None: that of what trains: the population's in rollalloc's own trainer, the sample's in TRL and verl.
    """
    return Recipe(
        groups=groups,
        stages=(Stage("rollout", sizes.Fixed(n), judges.Complete(), None, promote.Oldest()),),
        prompts=prompts.Shuffled(),
        intake=intake.Fill(),
        rows=rows.Everything(),
        advantage=advantages.OverGroup(advantages.kernel_of(deviation)),
        max_staleness=0,
        max_candidates=None,
        budget=Budget(),
        quarantine_after=QUARANTINE_AFTER,
    )


def dr_grpo(groups: int, n: int) -> Recipe:
    """Dr. GRPO: n rollouts per prompt, each against the group's mean, not divided by its deviation. arXiv 2503.20783.

    The paper's other half, a loss that is not divided by a rollout's length, is the trainer's: `aggregation="dr_grpo"`
    (`loss_type="dr_grpo"` in TRL).

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
    """
    at_least("n", n, 2, "a rollout alone is its own mean")
    return replace(grpo(groups, n), advantage=advantages.OverGroup(advantages.dr_grpo))


def rloo(groups: int, n: int) -> Recipe:
    """RLOO: n rollouts per prompt, each against the mean of the others of its prompt. arXiv 2402.14740.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
    """
    at_least("n", n, 2, "a rollout alone has no others")
    return replace(grpo(groups, n), advantage=advantages.OverGroup(advantages.rloo))
