"""The warning that the policy is narrowing: pass@k falls while accuracy does not. By hand."""

from __future__ import annotations

import json
import logging

import pytest

from rollalloc.generate.sampling import Sampling
from rollalloc.train.config import Config
from rollalloc.train.evaluation import Breadth, Evaluation, narrowed
from rollalloc.train.grid import Grid
from rollalloc.train.state import Counters


def evaluated(accuracy, pass_at_8, standard_error=0.0):
    return Evaluation(accuracy, standard_error, breadth=Breadth(8, pass_at_8, None, None, None, None, None))


def warnings_after(*evaluations, prompts=100):
    """What is said after each evaluation of so many prompts; None: nothing."""
    watched, warnings = {}, []
    for evaluation in evaluations:
        warning, watched = narrowed(watched, evaluation, prompts)
        warnings.append(warning)
    return warnings


def test_a_fall_of_pass_at_k_at_no_lower_accuracy_is_said_with_its_figures():
    assert warnings_after(evaluated(0.5, 0.9), evaluated(0.6, 0.95), evaluated(0.7, 0.92)) == [
        None,
        None,
        "pass@8 fell from 0.950 to 0.920 while accuracy went from 0.600 to 0.700",
    ]


@pytest.mark.parametrize(
    "later",
    [
        evaluated(0.7, 0.94),
        evaluated(0.7, 0.96),
        evaluated(0.59, 0.8),
        Evaluation(None, None),
        evaluated(0.7, 0.931, standard_error=0.02),
    ],
    ids=["by little", "it rose", "all became worse", "not known", "sampling explains it"],
)
def test_what_is_no_narrowing(later):
    assert warnings_after(evaluated(0.6, 0.95, standard_error=later.standard_error or 0.0), later) == [None, None]


def test_what_sampling_explains_depends_on_the_number_of_prompts():
    """pass@8 falls by 0.05: less than 0.02 and two standard errors of 100 prompts, more than those of 10,000."""
    sampled = (evaluated(0.6, 0.9, standard_error=0.02), evaluated(0.7, 0.85, standard_error=0.02))
    assert warnings_after(*sampled, prompts=100)[1] is None  # 0.02 + 2·0.03
    assert warnings_after(*sampled, prompts=10_000)[1] is not None  # 0.02 + 2·0.003
    further = (sampled[0], evaluated(0.7, 0.815, standard_error=0.02))
    assert warnings_after(*further, prompts=100)[1] is not None  # 0.085, beyond two errors and within three


def test_a_warning_comes_once_and_not_again_after_a_load(caplog):
    counters = Counters()
    values = iter([evaluated(0.5, 0.9), evaluated(0.6, 0.8), evaluated(0.6, 0.7), evaluated(0.6, 0.6)])

    def narrower(counters, version):
        made = Grid(100, Config(sampling=Sampling(8)), counters)
        made.add(version, next(values))
        return made.record(None)["narrower"]

    with caplog.at_level(logging.WARNING):
        assert [narrower(counters, version) is None for version in range(3)] == [True, False, False]
        loaded = Counters(watched=json.loads(json.dumps(counters.watched)))
        assert narrower(loaded, 3) is not None
    assert [record.message.startswith("the policy is becoming narrower") for record in caplog.records] == [True]
