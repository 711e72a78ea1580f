"""One rollout per prompt, or few: the baseline comes from the batch, or from what was expected of the prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rollalloc.core.prompt_pool import NEXT_EPOCH, NOW
from rollalloc.core.recipe import Recipe, one_of
from rollalloc.recipes.groups import grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, judges, predictions


@sized
def reinforce(
    groups: int = 32,
    n: int = 1,
    baseline: Literal["batch", "running"] = "batch",
    neg: float | None = None,
    replay: int = 0,
    replay_staleness: int = 12,
) -> Recipe:
    """REINFORCE: one rollout for each of many prompts, and one baseline for all of them. The plainest estimator there is.

        A = r - b, times neg where that is below 0

    Williams 1992. At the price of `grpo(groups // n, n)` it sees n times as many prompts, and no rollout is spent on a
    baseline of its prompt's own.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        baseline: "batch": the mean reward of the batch's other rollouts; "running": the mean of all rewards so far, the
            newest counting most, and the batch's where a prompt was drawn before the first reward.
        neg: weight of what did worse than the baseline, 0 or more; None: what makes the update vary least, by how uncertain
            successes and failures were (`advantages.variance_ratio`). At 1 runs fell below where they began.
        replay: as for `foresight`.
        replay_staleness: as for `foresight`.
    """
    one_of("baseline", baseline, ("batch", "running"))
    base = grpo(groups, n, replay=replay, replay_staleness=replay_staleness)
    prompts = predictions.RunningMean() if baseline == "running" else base.prompts
    return replace(base, prompts=prompts, advantage=advantages.Rewards(), over_batch=advantages.BatchMean(neg))


@sized
def raft(groups: int = 32, n: int = 1) -> Recipe:
    """RAFT: only what was rewarded is learned from, A = max(r, 0). arXiv 2304.06767, as in 2504.11343.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
    """
    return replace(grpo(groups, n), advantage=advantages.Successes())


@sized
def spo(groups: int = 32, n: int = 1, half_way: float = 0.06, spread: float = 0.05) -> Recipe:
    """SPO: each prompt's tracked success rate is its baseline, advantages are normalised over the batch. arXiv 2509.13232.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        half_way: how far, in nats per token, the weights move until half of a prompt's record is forgotten; above 0.
        spread: share of every prompt in the draw ∝ √(v(1 - v)) + spread; above 0.
    """
    base = grpo(groups, n)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NOW)),),
        prompts=predictions.Tracker(half_way=half_way, spread=spread),
        advantage=advantages.AgainstBaseline(),
        over_batch=advantages.BatchNormalised(),
    )


@sized
def foresight(
    groups: int = 32,
    n: int = 1,
    exponent: float | None = 3.0,
    neg: float | None = None,
    floor: float = 0.1,
    once: bool = True,
    replay: int = 0,
    replay_staleness: int = 12,
) -> Recipe:
    """Foresight: each prompt's success rate is predicted before it is paid for; it is the baseline, and says what to draw.

        prompts drawn ∝ p̂(1 - p̂)^exponent, `floor` of them uniformly;  A = r - b(p̂), times neg where that is below 0

    Ours; see docs/foresight.md. What the predictor knows are the table's features, each prompt's own record, and the mean.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        exponent: the larger, the more hard prompts; None: drawn uniformly, once an epoch, only the baseline is predicted.
        neg: as for `reinforce`.
        floor: share of uniform draws, in [0, 1].
        once: no prompt is drawn a second time before all were; False: each may come again at once.
        replay: rows of earlier batches, of rollouts that did better than expected, trained on again in each batch, at most.
        replay_staleness: updates of the weights after which they are not, at least 1.
    """
    base = grpo(groups, n, replay=replay, replay_staleness=replay_staleness)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NEXT_EPOCH if once or exponent is None else NOW)),),
        prompts=predictions.Foresight(exponent, floor),
        advantage=advantages.Rewards(),
        over_batch=advantages.BatchMean(neg),
    )
