"""Held-out accuracy of a policy: exact where each prompt has a single right answer, else the mean metric of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from rollalloc.core.seeds import rng
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.engines.likelihood import exact_success
from rollalloc.engines.policy import Policy
from rollalloc.engines.sampler import Generation, Request, generate
from rollalloc.engines.sampling import Sampling
from rollalloc.rewards.function import Outcome, Scored

Score = Callable[[EncodedPrompts, Sequence[tuple[int, Generation]]], list[Outcome]]


@dataclass(frozen=True)
class HeldOut:
    """Prompts for evaluation. With `answers`, accuracy is exact by teacher forcing; else it is sampled.

    Attributes:
        prompts: never trained on.
        answers: the single right answer of each prompt as token ids, end of sequence included; None: sample and score.
    """

    prompts: EncodedPrompts
    answers: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        accuracy: in [0, 1]; None where no sample has a score.
        standard_error: over prompts; 0 where the accuracy is exact, None where it is not known.
        unscored: samples without a score.
    """

    accuracy: float | None
    standard_error: float | None
    unscored: int = 0


def evaluate(
    policy: Policy, heldout: HeldOut, score: Score, *, sampling: Sampling, samples: int, seed: int
) -> Evaluation:
    """The accuracy of a policy on held-out prompts, under the distribution that rollouts are sampled from.

    Args:
        policy: as it is now.
        heldout: the prompts, and their answers where accuracy is to be exact.
        score: (prompts, (index of the prompt, generation) of each sample) → outcome of each; unused where exact.
        sampling: of rollouts.
        samples: a prompt, where accuracy is not exact.
        seed: of the run. Every evaluation samples alike: differences between evaluations are the model's.
    """
    if heldout.answers is not None:
        return _exact(policy, heldout.prompts, heldout.answers, sampling.temperature)
    return _sampled(policy, heldout.prompts, score, sampling, samples, int(rng(seed, "evaluation").integers(2**31)))


def _exact(
    policy: Policy, prompts: EncodedPrompts, answers: Sequence[tuple[int, ...]], temperature: float
) -> Evaluation:
    p_N = exact_success(policy.model, prompts.tokens, answers, pad_id=policy.pad_id, temperature=temperature)
    return Evaluation(float(p_N.mean()), 0.0)


def _sampled(
    policy: Policy, prompts: EncodedPrompts, score: Score, sampling: Sampling, each: int, seed: int
) -> Evaluation:
    """Mean over prompts of their mean metric."""
    requests = [
        Request(prompt, tokens, tuple(range(prompt * each, (prompt + 1) * each)))
        for prompt, tokens in enumerate(prompts.tokens)
    ]
    made = generate(policy.model, requests, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=seed)
    outcomes = score(prompts, [(generation.rollout // each, generation) for generation in made])
    metrics = [outcome.metric if isinstance(outcome, Scored) else np.nan for outcome in outcomes]
    metrics_NE = np.array(metrics).reshape(-1, each)
    unscored = int(np.isnan(metrics_NE).sum())
    scored_N = ~np.isnan(metrics_NE).all(axis=1)
    mean_N = np.nanmean(metrics_NE[scored_N], axis=1)
    if not mean_N.size:
        return Evaluation(None, None, unscored)
    error = float(mean_N.std(ddof=1) / sqrt(mean_N.size)) if mean_N.size > 1 else None
    return Evaluation(float(mean_N.mean()), error, unscored)
