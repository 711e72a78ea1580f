"""The watch on diversity, by hand."""

from __future__ import annotations

import json
import logging

import pytest

from rollalloc.generate.sampling import Sampling
from rollalloc.train.config import Config
from rollalloc.train.evaluation import Breadth, Evaluation, narrowed
from rollalloc.train.grid import Grid
from rollalloc.train.state import Counters


def found(accuracy, pass_at_k, differ=None, error=0.0):
    return Evaluation(accuracy, error, breadth=Breadth(8, pass_at_k, None, None, differ, None, None))


def judged(*evaluations, prompts=100):
    watched, said = {}, []
    for each in evaluations:
        words, watched = narrowed(watched, each, prompts)
        said.append(words)
    return said


def test_a_fall_of_pass_at_k_at_no_lower_accuracy_is_said_with_its_figures():
    assert judged(found(0.5, 0.9), found(0.6, 0.95), found(0.7, 0.92)) == [
        None,
        None,
        "pass@8 fell from 0.950 to 0.920 while accuracy went from 0.600 to 0.700",
    ]


@pytest.mark.parametrize(
    "later",
    [found(0.7, 0.94), found(0.7, 0.96), found(0.59, 0.8), Evaluation(None, None), found(0.7, 0.931, error=0.02)],
    ids=["by little", "it rose", "all became worse", "not known", "sampling explains it"],
)
def test_what_is_no_narrowing(later):
    assert judged(found(0.6, 0.95, error=later.standard_error or 0.0), later) == [None, None]


def test_what_sampling_explains_depends_on_the_number_of_prompts():
    sampled = (found(0.6, 0.9, error=0.02), found(0.7, 0.85, error=0.02))
    assert judged(*sampled, prompts=100)[1] is None  # 0.02 + 2·0.03
    assert judged(*sampled, prompts=10_000)[1] is not None  # 0.02 + 2·0.003
    further = (sampled[0], found(0.7, 0.815, error=0.02))
    assert judged(*further, prompts=100)[1] is not None  # 0.085, beyond two errors and within three


def test_a_warning_comes_once_and_not_again_after_a_load(caplog):
    counters = Counters()
    values = iter([found(0.5, 0.9), found(0.6, 0.8), found(0.6, 0.7), found(0.6, 0.6)])

    def narrower(counters, version):
        made = Grid(100, Config(sampling=Sampling(8)), counters)
        made.add(version, next(values))
        return made.record(None)["narrower"]

    with caplog.at_level(logging.WARNING):
        assert [narrower(counters, version) is None for version in range(3)] == [True, False, False]
        loaded = Counters(watched=json.loads(json.dumps(counters.watched)))
        assert narrower(loaded, 3) is not None
    assert [record.message.startswith("the policy is becoming narrower") for record in caplog.records] == [True]
