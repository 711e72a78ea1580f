"""How lab/experiments/released.py reads its runs: costs to an accuracy, and ratios over seeds."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
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
    assert [each and (each.arm, each.pool, each.rate) for each in first] == [
        *(
            (arm, pool, rate)
            for arm, pool in (("pc6", released.HELD), ("grpo", released.HELD), ("pc6", released.A))
            for rate in released.RATES
        ),
        None,
    ]


def test_the_share_of_pilots_that_pass_is_read_batch_by_batch(tmp_path):
    """Two batches of 8 x 48 commits: after 24 prompts with 16 pilots, of which a half fails, 48 more, of which a quarter."""
    others = {"kind": "batch", "tokens_paid": 0, "seconds": 0.0}
    lines = [
        {**others, "batch": batch, "rollouts_paid": 384 * batch + 16 * pilots, "accounts": {"out_of_band": failed}}
        for batch, pilots, failed in ((1, 24, 16 * 12), (2, 72, 16 * 24))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert released.passing(tmp_path) == pytest.approx([0.5, 0.75])


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (3e-4, [1.5e-4, 3e-4, 6e-4]),
        (7.5e-5, [3.75e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4]),
        (6e-4, [1.5e-4, 3e-4, 6e-4, 1.2e-3]),
    ],
)
def test_rates_are_added_until_the_best_is_inside(tmp_path, monkeypatch, best, tried):
    def curve(run, *places):
        return progress(1 - abs(np.log(run.rate / best)))

    monkeypatch.setattr(released, "curve_of", curve)
    found = released.tuning("grpo", released.A, tmp_path, tmp_path)
    assert found.rate == pytest.approx(best)
    assert [run.rate for run in found.runs] == pytest.approx(tried)
