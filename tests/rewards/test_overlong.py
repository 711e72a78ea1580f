"""DAPO's overlong penalty, and the scorer that adds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc.rewards.function import Sample, Scored
from rollalloc.rewards.overlong import OverlongScorer, overlong_penalty
from rollalloc.rewards.scorers import InlineScorer


def samples(*lengths, completion="4"):
    return [Sample("test", completion, "4", {}, tokens=tokens) for tokens in lengths]


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0), (16_384, 0), (18_432, -0.5), (20_480, -1), (20_481, -1), (16_385, -1 / 4096)]
)
def test_the_overlong_penalty_equals_the_papers(tokens, penalty):
    assert overlong_penalty(tokens, max_tokens=20_480, buffer=4_096) == pytest.approx(penalty)


@given(st.integers(0, 300), st.integers(1, 100), st.data())
def test_longer_is_never_better(tokens, max_tokens, data):
    buffer = data.draw(st.integers(1, max_tokens))
    shorter, longer = (overlong_penalty(length, max_tokens, buffer) for length in (tokens, tokens + 1))
    assert -1 <= longer <= shorter <= 0


@pytest.mark.parametrize(("tokens", "max_tokens", "buffer"), [(-1, 10, 5), (1, 10, 0), (1, 10, 11)])
def test_out_of_range_is_refused(tokens, max_tokens, buffer):
    with pytest.raises(ValueError, match="must be"):
        overlong_penalty(tokens, max_tokens, buffer)


def test_the_reward_is_shaped_and_the_metric_is_not():
    scorer = OverlongScorer(InlineScorer(lambda **_: {"score": 1.0, "acc": 1.0}), max_tokens=10, buffer=4)
    expected = [Scored(1.0, 1.0), Scored(0.5, 1.0), Scored(0.0, 1.0)]
    assert scorer.score(samples(6, 8, 10)) == expected
    assert scorer.submit(samples(6, 8, 10)).result() == expected
    assert scorer.report()["scored"] == 6


def test_a_scorer_that_drops_outcomes_is_an_error():
    class Short(InlineScorer):
        def score(self, samples):
            return super().score(samples)[1:]

    scorer = OverlongScorer(Short(lambda **_: 1.0), max_tokens=10, buffer=4)
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        scorer.score(samples(6, 8))


def test_an_unknown_length_is_an_error():
    scorer = OverlongScorer(InlineScorer(lambda **_: 1.0), max_tokens=10, buffer=4)
    for score in (scorer.score, lambda batch: scorer.submit(batch).result()):
        with pytest.raises(ValueError, match=r"set Sample\.tokens"):
            score(samples(None))
