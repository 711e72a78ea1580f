"""GRPO, Dr. GRPO and RLOO: n rollouts per prompt, each compared with the other rollouts of the same prompt.

These are the baselines. Every other recipe starts from `grpo` and replaces some of its rules. A recipe contains the choice
of rollouts and the advantages. The averaging of the loss and the KL term are settings of the trainer. PAPERS.md lists the
kind of standard deviation that each trainer uses.

Sources: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740.
"""

from __future__ import annotations

from dataclasses import replace

from rollalloc.core.recipe import Budget, Gate, Recipe, Replay, Stage, at_least
from rollalloc.recipes.shapes import Sizes, plain, sized
from rollalloc.rules import advantages, intake, judges, promote, prompts, rows, sizes

# An outage can cause a visit without a score. After three such visits in a row, the prompt is probably the cause.
QUARANTINE_AFTER = 3


def shape(rows: int = 64, group_rows: int = 4) -> Sizes:
    """Groups of `group_rows` rollouts, all of which are trained on. This is the shape of every method that has only n.

    Args:
        rows: rows of a batch, at least 1.
        group_rows: rows of a group, at least 1.
    """
    return plain(rows, group_rows)


@sized(shape)
def grpo(
    groups: int = 16,
    n: int = 4,
    deviation: advantages.Deviation | None = None,
    replay: int = 0,
    replay_staleness: int = 12,
    replay_moved: float | None = None,
    replay_pause: int = 4,
) -> Recipe:
    """GRPO: generate n rollouts of each of `groups` prompts, and train on all of them. arXiv 2402.03300.

        A_i = (r_i - mean of the group) / standard deviation of the group

    1. Draw `groups` prompts, in random order and each once an epoch.
    2. Generate n rollouts of each prompt.
    3. Train on all rollouts that have a score, with the advantage above.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1. With 1, there is no mean to compare with, and `Allocator` refuses the recipe. Use
            1 with another advantage rule, or with an estimator of verl that does not compare rollouts, such as `gae`.
        deviation: kind of standard deviation by which the advantages are divided: "population" or "sample". None: the
            training framework decides. Rollalloc's own trainer uses "population", TRL and verl use "sample".
        replay: maximum number of rows of earlier batches to train on again in each batch; 0 or more. Only rollouts that
            did better than their group are replayed.
        replay_staleness: maximum age of a replayed rollout, in updates of the weights; at least 1.
        replay_moved: leave the replayed rows of a batch out if the policy has moved away from more than this share of
            their tokens, in [0, 1]; see docs/train.md. None: never.
        replay_pause: number of batches without replay after a batch whose replayed rows were left out; 0 or more.
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
        replay=replayed(replay, replay_staleness, replay_moved, replay_pause),
    )


def replayed(rows: int, staleness: int, moved: float | None, pause: int) -> Replay | None:
    """The replay of the parameters `replay`, `replay_staleness`, `replay_moved` and `replay_pause` of a recipe.

    Raises:
        ValueError: a number is out of its range, or there is a gate but no replay.
    """
    at_least("replay", rows, 0)
    at_least("replay_staleness", staleness, 1)
    at_least("replay_pause", pause, 0)
    if moved is not None and not 0 <= moved <= 1:
        raise ValueError(f"replay_moved must be a share of tokens in [0, 1], or None for no gate, got {moved!r}")
    if moved is not None and not rows:
        raise ValueError(
            f"replay_moved={moved} needs replay, the number of rows to train on again in a batch, such as 64"
        )
    gate = None if moved is None else Gate(most=moved, pause=pause)
    return Replay(rows=rows, max_staleness=staleness, gate=gate) if rows else None


@sized(shape)
def dr_grpo(groups: int = 16, n: int = 4) -> Recipe:
    """Dr. GRPO: GRPO without the division by the group's standard deviation. arXiv 2503.20783.

        A_i = r_i - mean of the group

    The paper also changes the loss: it is not divided by the length of a rollout. For this, use the trainer's setting
    `aggregation="dr_grpo"`, or `loss_type="dr_grpo"` in TRL.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
    """
    at_least("n", n, 2, "so that there is a mean to compare with")
    return replace(grpo(groups, n), advantage=advantages.OverGroup(advantages.dr_grpo))


@sized(shape)
def rloo(groups: int = 16, n: int = 4) -> Recipe:
    """RLOO: n rollouts per prompt, each compared with the mean of the prompt's other rollouts. arXiv 2402.14740.

        A_i = r_i - mean of r_j over the other rollouts j ≠ i of the prompt

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
    """
    at_least("n", n, 2, "so that there are other rollouts to compare with")
    return replace(grpo(groups, n), advantage=advantages.OverGroup(advantages.rloo))


def batches_ahead(groups: int, gen_groups: int | None) -> int:
    """Return `gen_groups`, the number of prompts in generation at a time. None: three times `groups`.

    Raises:
        ValueError: the number is below 1.
    """
    if gen_groups is None:
        at_least("groups", groups, 1)
        return 3 * groups
    at_least("gen_groups", gen_groups, 1)
    return gen_groups
