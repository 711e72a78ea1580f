"""GRPO, Dr. GRPO and RLOO: n rollouts per prompt, each against the others of its prompt."""

from __future__ import annotations

from dataclasses import replace

from rollalloc.core.recipe import Budget, Recipe, Replay, Stage, at_least
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, intake, judges, promote, prompts, rows, sizes

QUARANTINE_AFTER = 3  # one visit without a score may be an outage, three are the prompt's own fault


@sized
def grpo(
    groups: int = 16,
    n: int = 4,
    deviation: advantages.Deviation | None = None,
    replay: int = 0,
    replay_staleness: int = 12,
) -> Recipe:
    """GRPO: n rollouts for each of `groups` prompts, all trained on. The baseline.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        deviation: what advantages are divided by: the "population"'s standard deviation of the group's rewards, or the
            "sample"'s. None: that of what trains: the population's in rollalloc's own trainer, the sample's in TRL and verl.
        replay: rows of earlier batches, of rollouts that did better than their group, trained on again in each batch, at
            most.
        replay_staleness: updates of the weights after which they are not, at least 1.
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
        replay=replay_of(replay, replay_staleness),
    )


@sized
def dr_grpo(groups: int = 16, n: int = 4) -> Recipe:
    """Dr. GRPO: n rollouts per prompt, each against the group's mean, not divided by its deviation. arXiv 2503.20783.

    The paper's other half, a loss that is not divided by a rollout's length, is the trainer's: `aggregation="dr_grpo"`
    (`loss_type="dr_grpo"` in TRL).

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
    """
    at_least("n", n, 2, "a rollout alone is its own mean")
    return replace(grpo(groups, n), advantage=advantages.OverGroup(advantages.dr_grpo))


@sized
def rloo(groups: int = 16, n: int = 4) -> Recipe:
    """RLOO: n rollouts per prompt, each against the mean of the others of its prompt. arXiv 2402.14740.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
    """
    at_least("n", n, 2, "a rollout alone has no others")
    return replace(grpo(groups, n), advantage=advantages.OverGroup(advantages.rloo))


def batches_ahead(groups: int, gen_groups: int | None) -> int:
    """Prompts generated at a time: as said, or those of three batches.

    Raises:
        ValueError: fewer than 1.
    """
    if gen_groups is None:
        at_least("groups", groups, 1)
        return 3 * groups
    at_least("gen_groups", gen_groups, 1)
    return gen_groups


def replay_of(rows: int, staleness: int) -> Replay | None:
    """Rows that did better than expected, as often as they are young enough; None for none."""
    at_least("replay", rows, 0)
    at_least("replay_staleness", staleness, 1)
    return Replay(rows=rows, max_staleness=staleness) if rows else None
