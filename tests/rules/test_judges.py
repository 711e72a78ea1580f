"""Judges: what becomes of a group whose results come in."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from rollalloc import recipes
from rollalloc.core.group import GroupView
from rollalloc.core.prompts import NEVER, NOW, Epochs
from rollalloc.core.rule import Act, Verdict, View
from rollalloc.recipes.cgrpo import Resolved, conformal_place, first_success
from rollalloc.recipes.pilot_commit import Band, surely_at_least
from rollalloc.recipes.reinforce_ada import Collected
from rollalloc.recipes.vcrl import Varied, relative_variance
from rollalloc.rules.judges import Complete, NonzeroVariance
from rollalloc.rules.rows import Everything

NO_VIEW = View.of()  # none of these rules looks at the run
MIXED, EQUAL = Verdict(Act.TRAIN), Verdict(Act.DROP, "zero_variance")


@pytest.mark.parametrize(
    ("judge", "group", "expected"),
    [
        (Complete(), GroupView.of([1, 1]), MIXED),
        (Complete(), GroupView.of([1, 0], running=1), None),
        (Complete(NOW), GroupView.of([1]), Verdict(Act.TRAIN, until=NOW)),
        (NonzeroVariance(), GroupView.of([1, 0]), MIXED),
        (NonzeroVariance(), GroupView.of([0.1] * 8), EQUAL),
        (NonzeroVariance(), GroupView.of([0.3, 0.1 + 0.2]), EQUAL),  # they differ by rounding
        (NonzeroVariance(), GroupView.of([0.3, 0.3 + 1e-8]), MIXED),
        (NonzeroVariance(early=True), GroupView.of([0.3, 0.1 + 0.2], running=1), None),
        (NonzeroVariance(), GroupView.of([1]), EQUAL),
        (NonzeroVariance(), GroupView.of([1, 0], running=1), None),
        (NonzeroVariance(early=True), GroupView.of([1, 0], running=1), MIXED),
        (NonzeroVariance(early=True), GroupView.of([1, 1], running=1), None),
        (NonzeroVariance(early=True), GroupView.of([], running=1), None),
        (NonzeroVariance(Act.NEXT), GroupView.of([1, 0]), Verdict(Act.NEXT)),
        (NonzeroVariance(until=NEVER), GroupView.of([0, 0]), Verdict(Act.DROP, "zero_variance", NEVER)),
        # selection looks at the metric, not at the shaped reward
        (NonzeroVariance(), GroupView.of([1, 1], rewards=[1.0, 0.7]), EQUAL),
        (NonzeroVariance(), GroupView.of([1, 0], rewards=[0.5, 0.5]), MIXED),
    ],
)
def test_verdict_by_hand(judge, group, expected):
    assert judge(group, NO_VIEW) == expected


def band(ones, count, *, running=0, **window):
    settings: dict[str, Any] = {"p_lower": 0.125, "p_upper": 0.25, "p_solve": 1.0} | window
    return Band(**settings)(GroupView.of([1] * ones + [0] * (count - ones), running=running), NO_VIEW)


IN = Verdict(Act.NEXT)
HARD, EASY = Verdict(Act.DROP, "out_of_band/too_hard"), Verdict(Act.DROP, "out_of_band/too_easy")


@pytest.mark.parametrize(
    ("ones", "count", "window", "expected"),
    [
        (1, 8, {}, IN),  # both edges belong to the window
        (0, 8, {}, HARD),
        (6, 8, {}, IN),
        (7, 8, {}, EASY),
        (8, 8, {}, Verdict(Act.DROP, "out_of_band/solved", NEVER)),
        (8, 8, {"reprobe_every": 3}, Verdict(Act.DROP, "out_of_band/solved", Epochs(3))),
        (8, 8, {"p_solve": 1.1}, EASY),  # above 1 evicts nothing
        (7, 8, {"p_solve": 0.875}, Verdict(Act.DROP, "out_of_band/solved", NEVER)),
        (1, 10, {"p_lower": 0.1}, IN),
        (1, 10, {"p_lower": 0.1, "p_upper": 0.9}, IN),  # 1 - 0.9 is a little less than 1/10
        (2, 10, {"p_lower": 0.1, "p_upper": 0.9}, EASY),
        (3, 10, {"p_lower": 0.3}, IN),  # 3/10 is not 0.1 * 3
        (7, 10, {"p_lower": 0.1, "p_upper": 0.3}, IN),
        (1, 3, {"p_lower": 1 / 3, "p_upper": 1 - 1 / 3}, IN),
        (4, 4, {"p_lower": 0.0, "p_upper": 0.0, "p_solve": 2.0}, IN),
        (0, 4, {"p_lower": 0.0}, IN),
    ],
)
def test_band_by_hand(ones, count, window, expected):
    assert band(ones, count, **window) == expected


@given(ones=st.integers(0, 60), more=st.integers(0, 60), lower=st.integers(0, 60), upper=st.integers(0, 60))
def test_band_edges_are_exact_fractions(ones, more, lower, upper):
    """With edges that are multiples of 1/count, membership is that of whole numbers."""
    count = ones + more
    if count == 0 or lower + upper > count:
        return
    verdict = band(ones, count, p_lower=lower / count, p_upper=upper / count, p_solve=2.0)
    assert verdict is not None
    assert (verdict.act is Act.NEXT) == (lower <= ones <= count - upper)


@given(
    attempts=st.integers(1, 3000), share=st.floats(0, 1), rate=st.floats(0.05, 0.98), confidence=st.floats(0.5, 0.999)
)
def test_the_evidence_is_clopper_and_pearsons_lower_bound(attempts, share, rate, confidence):
    failures = int(share**4 * attempts)
    bound = beta.ppf(1 - confidence, attempts - failures, failures + 1) if failures < attempts else 0.0
    if abs(bound - rate) > 1e-6:
        assert surely_at_least(rate, attempts, failures, confidence) == (bound > rate)


@pytest.mark.parametrize(
    ("metrics", "visits", "expected"),
    [
        ([1, 1], [], EASY),
        ([1] * 4, [], EASY),
        ([1] * 4, [[1] * 8] * 2, EASY),
        ([1] * 4, [[1] * 8] * 5, Verdict(Act.DROP, "out_of_band/solved", Epochs(4))),
        ([1] * 4, [[0] * 8] * 2 + [[1] * 8] * 5, EASY),
        ([1] * 4, [[0] * 8] * 2 + [[1] * 8] * 40, Verdict(Act.DROP, "out_of_band/solved", Epochs(4))),
        ([1, 1, 1, 0], [[1] * 8] * 40, IN),  # a visit within the window continues, whatever the record
        ([0, 0, 0, 0], [[1] * 8] * 40, HARD),
        ([0.95] * 4, [[0.95] * 8] * 8, EASY),  # marks: 3.4 failures of 65
        ([0.99] * 4, [[0.99] * 8] * 8, Verdict(Act.DROP, "out_of_band/solved", Epochs(4))),
    ],
)
def test_a_band_with_a_confidence_evicts_by_all_visits_of_a_prompt(metrics, visits, expected):
    judge, group = Band(0.125, 0.25, 0.9, 4, 0.95), GroupView.of(metrics, visits=visits)
    assert judge(group, NO_VIEW) == expected
    assert all(judge.promises(expected, group, NO_VIEW).values())


def test_a_band_waits_until_all_pilots_ended():
    assert band(1, 4, running=1) is None


@pytest.mark.parametrize(
    ("rows", "half", "metrics", "enough"),
    [
        (4, True, [1, 0, 1, 0], True),
        (4, True, [1, 0, 0, 0], False),
        (4, True, [1, 1, 1, 0, 0], True),
        (5, True, [1, 1, 0, 0], False),  # of five rows three are failures
        (5, True, [1, 1, 0, 0, 0], True),
        (2, True, [0.7, 0.0], False),  # a success is above 0.7
        (2, True, [0.75, 0.7], True),
        (4, False, [0, 0, 0, 1], True),
        (4, False, [1, 1], True),
        (None, False, [0, 0, 0], False),
    ],
)
def test_collected_by_hand(rows, half, metrics, enough):
    act = Act.TRAIN if enough else Act.NEXT
    assert Collected(half)(GroupView.of(metrics), View.of(rows=rows)) == Verdict(act)
    assert Collected(half)(GroupView.of(metrics, running=1), View.of(rows=rows)) is None


def test_collected_needs_a_number_of_rows_unless_a_success_is_enough():
    with pytest.raises(
        ValueError, match=r"Collected\(.* reads the number of rows per group, but Everything\(\) does not declare it"
    ):
        replace(recipes.reinforce_ada(4, 4), rows=Everything())
    assert replace(recipes.reinforce_ada(4, 4, stop="positive"), rows=Everything()).group_rows is None


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([1, 0, 0, 0], 3 / 4),
        ([1, 1, 0, 0], 1),
        ([1, 1, 1], 0),
        ([1, 0, 1], 1),
        ([1, *[0] * 7], 7 / 16),
        ([0.25, 0.75], 0.25),
        ([1], 0),
        ([], 0),
    ],
)
def test_relative_variance_by_hand(metrics, expected):
    assert relative_variance(np.array(metrics, float)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metrics", "version", "expected"),
    [
        ([1, 0, 0, 0], 0, Verdict(Act.TRAIN, until=NOW)),
        ([1, 0, 0, 0], 19, Verdict(Act.TRAIN, until=NOW)),
        ([1, 0, 0, 0], 20, Verdict(Act.DROP, "out_of_band/low_variance", NOW)),
        ([1, 1, 0, 0], 20, Verdict(Act.TRAIN, until=NOW)),
        ([1, 1], 0, Verdict(Act.DROP, "zero_variance", NOW)),
        ([1], 0, Verdict(Act.DROP, "zero_variance", NOW)),
    ],
)
def test_varied_by_hand(metrics, version, expected):
    assert Varied()(GroupView.of(metrics), View.of(version=version)) == expected
    assert Varied()(GroupView.of(metrics, running=1), View.of(version=version)) is None


def test_first_success_by_hand():
    assert [first_success(np.array(m, float)) for m in ([1, 0], [0, 0.7, 0.8], [0, 0], [])] == [1, 3, 0, 0]


@pytest.mark.parametrize(
    ("places", "delta", "expected"),
    [
        ([], None, np.inf),
        ([1, 2, 3, 4], 0.2, 4),  # the fourth of four: ⌈5 · 0.8⌉
        ([4, 3, 2, 1], 0.4, 3),
        ([1, 2, 3, 4], 0.01, 4),  # the fifth of four is the largest
        ([1, 2, 0, 0], 0.4, np.inf),  # the third smallest had no success
        ([1, 2, 0, 0], None, np.inf),  # delta is 1/2 + 0.05: ⌈5 · 0.45⌉ = 3, and the third had no success
        ([1, 2] * 5 + [0] * 10, None, 2),  # ⌈21 · 0.45⌉ = 10
        ([0, 0, 0], None, np.inf),  # delta is kept at 0.95: the first of three, which had none
        ([1] + [0] * 39, None, np.inf),  # likewise, the third of forty: ⌈41 · 0.05⌉
        ([1, 1, 1, 9], None, 9),
    ],
)
def test_conformal_place_by_hand(places, delta, expected):
    assert conformal_place(places, delta) == expected


def test_resolved_by_hand():
    view = View.of(memory={"places": [1, 1, 2, 2, 3, 3, 3, 3, 4, 9]})
    judge = Resolved(0.2)  # the ninth of ten: 4
    for metrics, act in (
        ([0, 1], Act.TRAIN),
        ([0, 0, 0, 0, 1], Act.NEXT),
        ([0, 0], Act.NEXT),
        ([0, 0, 0, 1], Act.TRAIN),
    ):
        assert judge(GroupView.of(metrics), view) == Verdict(act)
    assert judge(GroupView.of([0, 1], running=1), view) is None
    assert judge(GroupView.of([0, 0, 0, 0, 1]), View.of()) == Verdict(Act.TRAIN)  # nothing is known: any success
