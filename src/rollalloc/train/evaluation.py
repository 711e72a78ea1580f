"""Held-out accuracy of a policy, exact or sampled; how broad the policy still is, and whether it narrows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.seeds import rng
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.generate.sampler import Generation, Request, generate
from rollalloc.generate.sampling import Sampling
from rollalloc.models.dtypes import Precision
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy, computing
from rollalloc.processes.stopping import StopRequest
from rollalloc.rewards.function import Outcome, Scored

EXACT_K = 8  # attempts of pass@k if success rates are exact
_RIGHT = 1 - 1e-6  # metric from which on an answer counts as right: full marks
_MUCH = 0.02  # of pass@k, beyond what sampling explains
_ERRORS = 2.0  # standard errors that sampling explains
_HALF = 0.5  # of the share of differing right pairs that the first evaluation found
_POLITE_S = 0.1  # seconds between two looks at whether the run was asked to stop
_T = TypeVar("_T")
Score = Callable[[EncodedPrompts, Sequence[tuple[int, Generation]]], list[Outcome]]


class Interrupted(Exception):
    """An evaluation was given up because the run was asked to stop."""


def wait_unless_stopped(future: Future[_T], stop: StopRequest) -> _T:
    """The result of a future, such as scores, which may never come.

    Raises:
        Interrupted: the run was asked to stop before it came.
    """
    while not future.done():
        if stop.by is not None:
            future.cancel()
            raise Interrupted
        wait([future], _POLITE_S)
    return future.result()


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
class Breadth:
    """How well a policy does in several attempts, and how much its attempts differ; None: not known.

    Attributes:
        k: attempts per prompt: `EXACT_K` if success rates are exact, else the number of samples.
        pass_at_k: mean over prompts of the best metric of k attempts; of 0 and 1, the chance that one of k is right.
        full_marks: share of attempts that have full marks, mean over prompts; the accuracy itself unless metrics are graded:
            then that is a mean score. Only where answers are sampled.
        distinct_right: different right answers of k attempts, mean over prompts; only where answers are sampled.
        right_pairs_differ: the chance that two right answers of a prompt differ, mean over prompts with two; does not grow
            with the number of right ones as `distinct_right` does.
        entropy: of the next token, in nats: of sampled tokens the mean of −log π, else along the right answers.
        tokens: of an attempt, on average; only where answers are sampled.
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
        accuracy: in [0, 1]; None where no sample has a score.
        standard_error: over prompts; 0 where the accuracy is exact, None where it is not known, as where all prompts have
            the same mean.
        unscored: samples without a score, by reason.
        breadth: None where no sample has a score.
        sampled: samples that were scored or not; 0 where the accuracy is exact.
        truncated: of them, those that the length limit cut off.
        constant: the metric of all samples that have a score, where it is the same; else None.
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
    """The accuracy of a policy on held-out prompts, under the distribution that rollouts are sampled from.

    Args:
        policy: as it is now.
        heldout: the prompts, and their answers where accuracy is to be exact.
        score: (prompts, (index of the prompt, generation) of each sample) → outcome of each; unused where exact.
        sampling: of rollouts.
        samples: a prompt, where accuracy is not exact.
        seed: of the run. Every evaluation samples alike: differences between evaluations are the model's.
        precision: of an exact accuracy; what is sampled is sampled as rollouts are.
    """
    if heldout.answers is not None:
        return _exact(policy, heldout.prompts, heldout.answers, sampling.temperature, precision)
    return _sampled(policy, heldout.prompts, score, sampling, samples, int(rng(seed, "evaluation").integers(2**31)))


def _exact(
    policy: Policy,
    prompts: EncodedPrompts,
    answers: Sequence[tuple[int, ...]],
    temperature: float,
    precision: Precision,
) -> Evaluation:
    model, pad_id = policy.model, policy.pad_id
    with computing(model, precision):
        p_N, entropy_N = exact_answers(model, prompts.tokens, answers, pad_id=pad_id, temperature=temperature)
    pass_at_k = float((1 - (1 - p_N) ** EXACT_K).mean())
    breadth = Breadth(EXACT_K, pass_at_k, None, None, None, float(entropy_N.mean()), None)
    return Evaluation(float(p_N.mean()), 0.0, breadth=breadth)


def _sampled(
    policy: Policy, prompts: EncodedPrompts, score: Score, sampling: Sampling, samples: int, seed: int
) -> Evaluation:
    """Mean over prompts of their mean metric."""
    requests = [
        Request(prompt, tokens, tuple(range(prompt * samples, (prompt + 1) * samples)))
        for prompt, tokens in enumerate(prompts.tokens)
    ]
    generations = generate(policy.model, requests, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=seed)
    with_prompt = [(generation.rollout // samples, generation) for generation in generations]
    return judged(generations, score(prompts, with_prompt), samples)


def judged(generations: Sequence[Generation], outcomes: Sequence[Outcome], samples: int) -> Evaluation:
    """The mean over prompts of their mean metric, and how broad the policy is.

    Args:
        generations: `samples` of the first prompt, then as many of the second, and so on.
        outcomes: of the generations.
        samples: per prompt.
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
        error or None,  # None if all means are equal, which says nothing about the error: 0 means an exact accuracy
        unscored,
        _breadth(generations, metrics_NE[scored_N], scored_N),
        sampled,
        truncated,
        lowest if lowest == highest else None,
    )


class PassAtK(NamedTuple):
    """Figures of several attempts at each prompt; see `Breadth`."""

    pass_at_k: float
    full_marks: float
    distinct_right: float
    right_pairs_differ: float | None


def pass_at_k(answers_NE: NDArray[np.int64], metrics_NE: NDArray[np.float64]) -> PassAtK:
    """Figures of E attempts at each of N prompts; an answer is right if its metric is 1, full marks.

    Equal answers have equal numbers. The metric of an attempt without a score is NaN; each prompt has at least one score.
    """
    right_NE = metrics_NE >= _RIGHT
    right = [row_E[right_E] for row_E, right_E in zip(answers_NE, right_NE, strict=True)]
    times = [np.unique(row_R, return_counts=True)[1] for row_R in right]
    differ = [1 - float(n @ (n - 1)) / (n.sum() * (n.sum() - 1)) for n in times if n.sum() > 1]
    return PassAtK(
        float(np.nanmax(metrics_NE, axis=1).mean()),
        float(np.nanmean(np.where(np.isnan(metrics_NE), np.nan, right_NE), axis=1).mean()),
        float(np.mean([len(n) for n in times])),
        float(np.mean(differ)) if differ else None,
    )


def _breadth(
    generations: Sequence[Generation], metrics_NE: NDArray[np.float64], scored_N: NDArray[np.bool_]
) -> Breadth:
    """The breadth of a policy from all its samples, in the order of `judged`; the metrics are of prompts with a score."""
    samples = metrics_NE.shape[1]
    answers_NE = np.array([hash(generation.tokens) for generation in generations]).reshape(-1, samples)[scored_N]
    lengths = [len(generation.tokens) for generation in generations]
    tokens = sum(lengths)
    return Breadth(
        k=samples,
        **pass_at_k(answers_NE, metrics_NE)._asdict(),
        entropy=float(sum(-generation.logprobs.sum(dtype=np.float64) for generation in generations)) / tokens
        if tokens
        else None,
        tokens=float(np.mean(lengths)),
    )


def narrowed(watched: Mapping[str, float], evaluation: Evaluation, prompts: int) -> tuple[str | None, dict[str, float]]:
    """How a policy has become narrower without becoming worse, in words, and the values to compare the next one with.

        pass@k falls by more than 0.02 + 2·√(b(1 − b)/prompts) below its highest b, at no lower accuracy
        the share of differing right pairs falls below half of what it was at first, at no lower accuracy

    An exact pass@k has no error to allow for. Entropy is not judged: it falls in every run that learns.

    Args:
        watched: as returned for the previous evaluation; empty before the first.
        evaluation: the current one.
        prompts: number of held-out prompts.
    """
    breadth, accuracy, after = evaluation.breadth, evaluation.accuracy, dict(watched)
    if breadth is None or accuracy is None:
        return None, after
    signs: list[str] = []
    highest = watched.get("pass_at_k", -inf)  # a metric may be any number, of any sign
    error = sqrt(highest * (1 - highest) / prompts) if evaluation.standard_error != 0 and 0 < highest < 1 else 0.0
    allowed = _MUCH + _ERRORS * error
    if breadth.pass_at_k >= highest:
        after |= {"pass_at_k": breadth.pass_at_k, "accuracy": accuracy}
    elif highest - breadth.pass_at_k > allowed and accuracy >= watched["accuracy"]:
        signs.append(
            f"pass@{breadth.k} fell from {highest:.3f} to {breadth.pass_at_k:.3f} while accuracy went from "
            f"{watched['accuracy']:.3f} to {accuracy:.3f}"
        )
    if (differ := breadth.right_pairs_differ) is not None:
        first = watched.get("right_pairs_differ")
        if first is None:
            after |= {"right_pairs_differ": differ, "accuracy_at_first": accuracy}
        elif differ < _HALF * first and accuracy >= watched.get("accuracy_at_first", -inf):
            signs.append(f"two right answers to a prompt differ in {differ:.2f} of cases, at first in {first:.2f}")
    return "; ".join(signs) or None, after
