"""How experiments/released.py reads its runs: costs to an accuracy, and ratios over seeds."""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from math import inf
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import released
from released import Progress, Ratio, ratio


def progress(*accuracy, per_entry=10.0):
    spent_N = per_entry * np.arange(1, len(accuracy) + 1)
    return Progress(np.array(accuracy), {"rollouts": spent_N, "batches": spent_N, "steps": spent_N})


def test_a_cost_is_interpolated_to_the_first_entry_at_the_accuracy():
    curve = progress(0.2, 0.4, 0.3, 0.8)
    assert curve.until(0.3, "rollouts") == pytest.approx(15)
    assert curve.until(0.1, "rollouts") == 10
    assert curve.until(0.9, "rollouts") == inf


def test_ratios_are_grpos_cost_over_the_methods_and_bounds_are_marked():
    grpo, twice_as_fast = progress(0.2, 0.4, 0.6), progress(0.2, 0.4, 0.6, per_entry=5.0)
    same = ratio([(grpo, twice_as_fast, 1)] * 3, 1.0, "rollouts")
    assert same.point == pytest.approx(2)
    assert not same.bound
    never = ratio([(grpo, progress(0.2, 0.3, 0.5), 1)], 1.0, "rollouts")
    assert never.bound
    assert str(never) == "< 1.00 (1.00)"


def test_intervals_are_students_on_logarithms():
    low, high = np.exp(Ratio((1.0, 2.0, 4.0)).ends())
    assert Ratio((1.0, 2.0, 4.0)).point == pytest.approx(2)
    assert low == pytest.approx(2 / np.exp(4.303 * np.log(2) / 3**0.5), rel=1e-3)
    assert low * high == pytest.approx(4)


def test_a_plan_begins_with_tuning_and_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(released, "curve_of", lambda *given: None)
    first = list(released.planned(tmp_path, tmp_path))
    assert [each and (each.arm, each.rate) for each in first] == [
        *(("grpo", rate) for rate in released.RATES),
        *(("pc6", rate) for rate in released.RATES),
        None,
    ]


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (3e-4, [1.5e-4, 3e-4, 6e-4, 1.2e-3]),
        (7.5e-5, [3.75e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4, 1.2e-3]),
        (1.2e-3, [1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3]),
    ],
)
def test_rates_are_added_until_the_best_is_inside(tmp_path, monkeypatch, best, tried):
    def curve(run, *places):
        return progress(1 - abs(np.log(run.rate / best)))

    monkeypatch.setattr(released, "curve_of", curve)
    found = released.tuning("grpo", tmp_path, tmp_path)
    assert found.rate == pytest.approx(best)
    assert [run.rate for run in found.runs] == pytest.approx(tried)
