"""Evaluate a policy on held-out prompts: its accuracy, exact or sampled, and the diversity of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from math import sqrt
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.seeds import rng
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.generate.sampler import Generation, Request, generate
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy, computing
from rollalloc.models.settings import Precision, Sampling
from rollalloc.processes.stopping import StopRequest
from rollalloc.rewards.function import Outcome, Scored
from rollalloc.runs.metrics import pass_at_k

EXACT_K = 8  # k of pass@k if success rates are exact
_POLITE_S = 0.1  # seconds between two checks of a request to stop
_T = TypeVar("_T")
Score = Callable[[EncodedPrompts, Sequence[tuple[int, Generation]]], list[Outcome]]


class Interrupted(Exception):
    """An evaluation was abandoned because the run was asked to stop."""


def wait_unless_stopped(future: Future[_T], stop: StopRequest) -> _T:
    """Wait for the result of a future, such as scores. Give up as soon as the run is asked to stop.

    Raises:
        Interrupted: the run was asked to stop before the result came.
    """
    while not future.done():
        if stop.by is not None:
            future.cancel()
            raise Interrupted
        wait([future], _POLITE_S)
    return future.result()


@dataclass(frozen=True)
class HeldOut:
    """Prompts for evaluation. With `answers`, accuracy is computed exactly; otherwise answers are sampled and scored.

    Attributes:
        prompts: the held-out prompts.
        answers: the only right answer of each prompt as token ids, including the end of sequence. None: unknown.
    """

    prompts: EncodedPrompts
    answers: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Breadth:
    """How often at least one of several attempts at a prompt succeeds, and how much the attempts differ. None means unknown.

    Attributes:
        k: number of attempts per prompt: `EXACT_K` if success rates are exact, otherwise the number of samples.
        pass_at_k: best metric of k attempts, mean over prompts. For metrics of 0 and 1, it is the probability that one of
            k attempts is right.
        full_marks: share of attempts with a metric of 1, mean over prompts. It equals the accuracy unless metrics are
            graded. None if accuracy is exact.
        distinct_right: number of different right answers among k attempts, mean over prompts. None if accuracy is exact.
        right_pairs_differ: probability that two right answers to a prompt differ, mean over prompts with at least two
            right answers. Unlike `distinct_right`, it does not grow with the number of right answers.
        entropy: entropy of the next token, in nats. If accuracy is exact, the mean along the right answers; otherwise the
            mean of −log π over sampled tokens.
        tokens: mean length of an attempt, in tokens. None if accuracy is exact.
    """

    k: int
    pass_at_k: float
    full_marks: float | None
    distinct_right: float | None
    right_pairs_differ: float | None
    entropy: float | None
    tokens: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        accuracy: in [0, 1]. None if no sample has a score.
        standard_error: standard error over prompts; 0 if the accuracy is exact. None if unknown, for example because all
            prompts have the same mean.
        unscored: number of samples without a score, by reason.
        breadth: success and diversity of several attempts; None if no sample has a score.
        sampled: number of samples, with or without a score; 0 if the accuracy is exact.
        truncated: number of samples that the length limit cut off.
        constant: the metric that all scored samples have; None if their metrics differ.
    """

    accuracy: float | None
    standard_error: float | None
    unscored: Mapping[str, int] = field(default_factory=dict[str, int])
    breadth: Breadth | None = None
    sampled: int = 0
    truncated: int = 0
    constant: float | None = None


def evaluate(
    policy: Policy,
    heldout: HeldOut,
    score: Score,
    *,
    sampling: Sampling,
    samples: int,
    seed: int,
    precision: Precision = "fp32",
) -> Evaluation:
    """Evaluate a policy on held-out prompts, under the distribution from which rollouts are sampled.

    Args:
        policy: the policy.
        heldout: the prompts. If they have answers, accuracy is exact.
        score: takes the prompts, and the samples as pairs (index of the prompt, generation); returns one outcome per sample.
            Not used if accuracy is exact.
        sampling: how rollouts are sampled.
        samples: number of samples per prompt. Not used if accuracy is exact.
        seed: seed of the run. All evaluations use the same random numbers, so differences come from the model.
        precision: number format of an exact evaluation. Sampled evaluations use the format of rollouts.
    """
    if heldout.answers is not None:
        with computing(policy.model, precision):
            p_N, entropy_N = exact_answers(
                policy.model,
                heldout.prompts.tokens,
                heldout.answers,
                pad_id=policy.pad_id,
                temperature=sampling.temperature,
            )
        best = float((1 - (1 - p_N) ** EXACT_K).mean())
        breadth = Breadth(EXACT_K, best, None, None, None, float(entropy_N.mean()), None)
        return Evaluation(float(p_N.mean()), 0.0, breadth=breadth)
    requests = [
        Request(prompt, tokens, tuple(range(prompt * samples, (prompt + 1) * samples)))
        for prompt, tokens in enumerate(heldout.prompts.tokens)
    ]
    seed = int(rng(seed, "evaluation").integers(2**31))
    generations = generate(policy.model, requests, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=seed)
    with_prompt = [(generation.rollout // samples, generation) for generation in generations]
    return judged(generations, score(heldout.prompts, with_prompt), samples)


def judged(generations: Sequence[Generation], outcomes: Sequence[Outcome], samples: int) -> Evaluation:
    """The evaluation from samples and their scores: the mean metric per prompt, averaged over prompts, and the diversity.

    Args:
        generations: the samples: all of the first prompt, then all of the second, and so on.
        outcomes: the outcome of each generation.
        samples: number of samples per prompt.
    """
    metrics = [outcome.metric if isinstance(outcome, Scored) else np.nan for outcome in outcomes]
    metrics_NE = np.array(metrics).reshape(-1, samples)
    unscored = Counter(outcome.reason for outcome in outcomes if not isinstance(outcome, Scored))
    sampled, truncated = len(generations), sum(generation.truncated for generation in generations)
    scored_N = np.asarray(~np.isnan(metrics_NE).all(axis=1))
    mean_N = np.nanmean(metrics_NE[scored_N], axis=1)
    if not mean_N.size:
        return Evaluation(None, None, unscored, sampled=sampled, truncated=truncated)
    error = float(mean_N.std(ddof=1) / sqrt(mean_N.size)) if mean_N.size > 1 else None
    lowest, highest = float(np.nanmin(metrics_NE)), float(np.nanmax(metrics_NE))
    return Evaluation(
        float(mean_N.mean()),
        error or None,  # not 0, because 0 means an exact accuracy
        unscored,
        _breadth(generations, metrics_NE[scored_N], scored_N),
        sampled,
        truncated,
        lowest if lowest == highest else None,
    )


def _breadth(
    generations: Sequence[Generation], metrics_NE: NDArray[np.float64], scored_N: NDArray[np.bool_]
) -> Breadth:
    """The breadth of a policy from its samples, in the order of `judged`. `metrics_NE` has only prompts with a score."""
    samples = metrics_NE.shape[1]
    answers_NE = np.array([hash(generation.tokens) for generation in generations]).reshape(-1, samples)[scored_N]
    lengths = [len(generation.tokens) for generation in generations]
    tokens = sum(lengths)
    return Breadth(
        k=samples,
        **pass_at_k(answers_NE, metrics_NE),  # pyright: ignore[reportArgumentType]
        entropy=float(sum(-generation.logprobs.sum(dtype=np.float64) for generation in generations)) / tokens
        if tokens
        else None,
        tokens=float(np.mean(lengths)),
    )
