"""What an evaluation says beside the accuracy, on hand-made samples."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest

from rollalloc.data.prompts import EncodedPrompts
from rollalloc.generate.sampler import Generation
from rollalloc.models.settings import Sampling
from rollalloc.rewards.function import Scored, Unscored
from rollalloc.train import evaluation
from rollalloc.train.evaluation import EXACT_K, HeldOut, evaluate

SAMPLING = Sampling(4, temperature=0.7)


# Of three prompts, four attempts each: tokens, log-probability of each token, metric.
SAMPLES = [
    ((5, 1), -1.0, 1.0), ((5, 1), -1.0, 1.0), ((6, 1), -1.0, 1.0), ((7, 7, 1), -2.0, 0.5),
    ((5, 1), -1.0, 0.0), ((5, 1), -1.0, 0.0), ((6, 1), -1.0, 0.25), ((8, 1), -1.0, 0.0),
    ((5, 1), -1.0, None), ((5, 1), -1.0, 1.0), ((6, 1), -1.0, None), ((8, 1), -1.0, 0.0),
]  # fmt: skip


@pytest.fixture
def sampled(monkeypatch):
    def of(samples):
        generations = [
            Generation(at, tokens, np.full(len(tokens), logprob, np.float32), truncated=False)
            for at, (tokens, logprob, _) in enumerate(samples)
        ]

        def generated(model, requests, sampling, **named):
            assert sampling == SAMPLING
            return generations

        monkeypatch.setattr(evaluation, "generate", generated)
        metrics = [metric for _, _, metric in samples]
        score = lambda prompts, given: [Unscored("x") if m is None else Scored(m, m) for m in metrics]  # noqa: E731
        prompts = EncodedPrompts(None, ((3,),) * (len(samples) // 4))

        class Policy:
            model, eos_ids, pad_id = None, (1,), 0

        return evaluate(Policy(), HeldOut(prompts), score, sampling=SAMPLING, samples=4, seed=0)

    return of


def test_breadth_by_hand(sampled):
    found = sampled(SAMPLES)
    assert found.accuracy == pytest.approx((3.5 / 4 + 0.25 / 4 + 1 / 2) / 3)
    assert sum(found.unscored.values()) == 2
    assert (found.sampled, found.constant) == (12, None)
    breadth = found.breadth
    assert breadth.k == 4
    assert breadth.pass_at_k == pytest.approx((1 + 0.25 + 1) / 3)  # the best metric of four
    assert breadth.full_marks == pytest.approx((3 / 4 + 0 + 1 / 2) / 3)
    assert breadth.distinct_right == pytest.approx((2 + 0 + 1) / 3)
    assert breadth.right_pairs_differ == pytest.approx(
        2 / 3
    )  # of the first prompt's three pairs two differ; no other has one
    tokens = 11 * 2 + 3
    assert breadth.tokens == pytest.approx(tokens / 12)
    assert breadth.entropy == pytest.approx((11 * 2 + 3 * 2) / tokens)


def test_a_prompt_without_any_score_counts_for_nothing(sampled):
    unscored = [((9, 1), -1.0, None)] * 4
    without = sampled(SAMPLES).breadth
    for with_it in (sampled(SAMPLES + unscored).breadth, sampled(unscored + SAMPLES).breadth):
        for name in ("pass_at_k", "full_marks", "distinct_right", "right_pairs_differ"):
            assert getattr(with_it, name) == getattr(without, name)
    assert sampled(unscored).breadth is None


def test_pass_at_k_is_exact_where_success_rates_are(monkeypatch):
    p_N, entropy_N = np.array([0.5, 0.1]), np.array([0.3, 0.5])
    temperatures = []

    def exact(*given, temperature, **named):
        temperatures.append(temperature)
        return p_N, entropy_N

    monkeypatch.setattr(evaluation, "exact_answers", exact)
    monkeypatch.setattr(evaluation, "computing", lambda *given: nullcontext())

    class Policy:
        model, pad_id = None, 0

    prompts = EncodedPrompts(None, ((3,), (4,)))
    found = evaluate(Policy(), HeldOut(prompts, ((1,), (1,))), None, sampling=SAMPLING, samples=4, seed=0)
    assert temperatures == [0.7]
    assert found.accuracy == pytest.approx(0.3)
    by_hand = (1 - math.pow(0.5, EXACT_K) + 1 - math.pow(0.9, EXACT_K)) / 2
    assert found.breadth.pass_at_k == pytest.approx(by_hand)
    assert (found.breadth.k, found.breadth.entropy) == (EXACT_K, pytest.approx(0.4))
    assert (
        found.breadth.full_marks
        is found.breadth.distinct_right
        is found.breadth.right_pairs_differ
        is found.breadth.tokens
        is None
    )


def test_full_marks_equal_the_accuracy_if_scores_are_0_or_1(sampled):
    found = sampled([(tokens, logprob, metric and float(metric == 1)) for tokens, logprob, metric in SAMPLES])
    assert found.breadth.full_marks == found.accuracy


def test_where_no_two_are_right_it_is_not_known_whether_they_differ(sampled):
    assert sampled([((5, 1), -1.0, 0.0)] * 4).breadth.right_pairs_differ is None
