"""Metrics of a batch: TRL's own metrics under TRL's names, and metrics of the recipe under `rollalloc/`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollalloc.core.events import Batch
from rollalloc.drivers.trl.allocation import Allocation
from rollalloc.drivers.trl.rewards import RewardFunctions, Score
from rollalloc.drivers.trl.rollout import Rollout
from rollalloc.runs.metrics import of_batch, pass_at_k, prediction, scalars, totals

Figures = dict[str, float]


def generated_figures(allocation: Allocation) -> Figures:
    """Metrics of all rollouts that were generated to their end, including those that are not trained on.

    A mean over the trained rollouts would mislead, because the recipe selects them.
    """
    rewards, everything = allocation.rewards, allocation.generated
    made = [rollout for rollout in everything if not rollout.made.cancelled]
    counts: Figures = {
        "rollalloc/generated": len(everything),
        "rollalloc/stopped": len(everything) - len(made),
        "rollalloc/failed": allocation.failed,
    }
    if not made:
        return counts if everything else {}
    found = _lengths("completions", [rollout.length for rollout in made])
    found["completions/clipped_ratio"] = float(np.mean([rollout.made.truncated for rollout in made]))
    found |= _lengths("completions", [rollout.length for rollout in made if not rollout.made.truncated], "_terminated")
    for at, name in enumerate(rewards.names):
        scores = [score for rollout in made if (score := rollout.scores_F[at]) is not None]
        found |= _moments(f"rewards/{name}/mean", f"rewards/{name}/std", scores)
    scored = [reward for rollout in made if (reward := rewards.reward(rollout.scores_F)) is not None]
    found |= _moments("reward", "reward_std", scored)
    found |= {name: float(np.mean(values or [0.0])) for name, values in allocation.logged.items()}
    own = [slice(None) if rollout.own is None else np.array(rollout.own) for rollout in everything]
    logprobs_T = np.concatenate([rollout.made.logprobs[at] for rollout, at in zip(everything, own, strict=True)])
    if logprobs_T.size and not np.isnan(logprobs_T).any():
        # The mean is over all rollouts. TRL's entropy is a mean over trained rows only.
        found["rollalloc/entropy"] = -float(logprobs_T.mean())
    return found | counts


def batch_figures(allocation: Allocation, batch: Batch) -> Figures:
    """Metrics of the rows that are trained on."""
    groups: dict[int, list[float]] = {}
    for row in batch.rows:
        if not row.replays:
            groups.setdefault(row.group, []).append(row.advantage)
    equal = float(np.mean([not any(advantages) for advantages in groups.values()]))
    core = allocation.allocator
    gated = {} if core.recipe.gate is None else {"moved": allocation.moved, "left_out": core.left_out}
    return {"frac_reward_zero_std": equal} | scalars(of_batch(core, batch) | gated)


def evaluated_figures(
    rewards: RewardFunctions, scores_BF: Sequence[Sequence[Score]], completions: Sequence[Sequence[int]], each: int
) -> Figures:
    """Metrics of an evaluation: success in several attempts (pass@k), and how much a prompt's right answers differ.

    Args:
        rewards: the reward functions.
        scores_BF: one score per completion and function. The completions of a prompt follow one another.
        completions: token ids of this process's completions. If other processes have some of the B completions, the metrics
            that compare answers are left out.
        each: number of completions per prompt.
    """
    if rewards.is_weighted_sum:
        return {}  # a score of 1 does not mean a right answer
    metrics = [np.nan if (metric := rewards.selected_by(scores_F)) is None else metric for scores_F in scores_BF]
    if not metrics or len(metrics) % each:
        return {}
    metrics_NE = np.array(metrics, np.float64).reshape(-1, each)
    scored_N = np.asarray(~np.isnan(metrics_NE).all(axis=1))
    if not scored_N.any():
        return {}
    all_here = len(completions) == len(metrics)
    answers = [hash(tuple(ids)) for ids in completions] if all_here else [0] * len(metrics)
    found = pass_at_k(np.array(answers).reshape(-1, each)[scored_N], metrics_NE[scored_N])
    if not all_here:
        del found["distinct_right"], found["right_pairs_differ"]
    return scalars({"breadth": found})


def running_totals(allocation: Allocation) -> Figures:
    """Totals of the run so far: rollouts and tokens, the state of the prompts, and the quality of predictions."""
    core = allocation.allocator
    return scalars(totals(core) | prediction(core) | {"held": {"rollouts": len(allocation.rollouts)}})


def tokens_generated(made: Sequence[Rollout]) -> int:
    """Number of tokens of prompts and completions, as TRL's `num_tokens` counts them.

    A rollout that was stopped before it began does not count.
    """
    return sum(len(rollout.prompt_tokens) + rollout.length for rollout in made if rollout.made.tokens)


def _lengths(prefix: str, lengths: Sequence[int], kind: str = "") -> Figures:
    lengths = lengths or [0]
    return {
        f"{prefix}/{name}{kind}_length": float(statistic(lengths))
        for name, statistic in (("mean", np.mean), ("min", np.min), ("max", np.max))
    }


def _moments(mean: str, std: str, values: Sequence[float]) -> Figures:
    return (
        {mean: float(np.mean(values)), std: float(np.std(values, ddof=1)) if len(values) > 1 else 0.0} if values else {}
    )
