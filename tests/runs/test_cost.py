"""Cost to target against tables worked out by hand, and damaged metrics files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rollalloc.runs.cost import Cost, Curve, cost_to_target, curve_of, whole_curve_of
from rollalloc.runs.reader import read_metrics, read_run


def curve(accuracy):
    """Evaluations at 0, 100, 200, ... rollouts, of three tokens and a hundredth of a step each."""
    points = [100.0 * at for at in range(len(accuracy))]
    tokens, seconds, steps = ([factor * point for point in points] for factor in (3, 0.1, 0.01))
    return Curve(*map(tuple, (points, tokens, seconds, steps, range(len(accuracy)), accuracy, [0.0] * len(points))))


@pytest.mark.parametrize(
    ("accuracy", "target", "cost"),
    [
        ([0.1, 0.5, 0.9], 0.5, 100),
        ([0.1, 0.5, 0.9], 0.3, 50),  # linearly between the grid point before and the one that reaches it
        ([0.1, 0.3, 0.7, 0.9], 0.6, 175),
        ([0.1, 0.3, 0.6, 0.6], 0.6, 200),
        ([0.0, 0.0, 0.8, 0.8], 0.4, 150),
        # One lucky evaluation is not enough.
        ([0.1, 0.9, 0.1, 0.9, 0.9], 0.5, 250),
        ([0.9, 0.1, 0.5, 0.5], 0.5, 200),
        # There from the start.
        ([0.9, 0.9, 0.1], 0.5, 0),
        ([0.5, 0.5], 0.5, 0),
    ],
)
def test_the_cost_to_the_target_by_hand(accuracy, target, cost):
    found = cost_to_target(curve(accuracy), target)
    paid = {"rollouts": cost, "tokens": 3 * cost, "seconds": 0.1 * cost, "steps": 0.01 * cost}
    assert found is not None
    assert found.at is not None
    assert found == Cost(pytest.approx(paid), censored=False, at=found.at)
    assert 100 * (found.at - 1) < cost <= 100 * found.at  # the grid is of 100 rollouts


@pytest.mark.parametrize(
    ("accuracy", "paid"),
    [
        ([0.1, 0.2, 0.49, 0.49], 300),
        ([0.1, 0.9, 0.1, 0.1], 300),
        ([0.1, 0.1, 0.9], 200),  # the run ended before anything confirmed it
        ([0.9], 0),
    ],
)
def test_a_run_that_never_got_there_is_censored_at_its_last_grid_point(accuracy, paid):
    found = cost_to_target(curve(accuracy), 0.5)
    assert found is not None
    assert found.censored
    assert found.paid["rollouts"] == paid


@pytest.mark.parametrize(
    ("final", "cost"),
    [
        ((3, 0.9), 150),  # the final weights confirm the last grid point
        ((3, 0.4), None),
        ((2, 0.9), None),  # they are those of the last grid point
        (None, None),
    ],
)
def test_the_last_evaluation_confirms_but_is_no_grid_point(final, cost):
    found = cost_to_target(replace(curve([0.1, 0.1, 0.9]), final=final), 0.5)
    assert found is not None
    assert (None if found.censored else found.paid["rollouts"]) == cost
    assert found.paid["rollouts"] == (cost or 200)
    alone = cost_to_target(replace(curve([0.1]), final=(5, 0.9)), 0.5)
    assert alone is not None
    assert alone.censored  # one evaluation is not enough


def line(kind="eval", **values):
    paid = {"rollouts_paid": 10, "tokens_paid": 30, "seconds": 0.5, "optimizer_steps": 2, "version": 1}
    return {"kind": kind, "at": 10, **paid, "accounts": {}, "accuracy": 0.25, "standard_error": 0.1} | values


def test_a_curve_holds_the_evaluations_on_the_grid_that_have_an_accuracy():
    metrics = [
        line(at=0),
        line("batch"),
        line(accuracy=None),
        line(at=20, rollouts_paid=18, tokens_paid=90, seconds=1.5, version=3, accuracy=0.5, standard_error=None),
        line(at=None, rollouts_paid=25),
        line("end"),
    ]
    columns = (0, 20), (30, 90), (0.5, 1.5), (2, 2), (1, 3), (0.25, 0.5), (0.1, None)
    assert curve_of(metrics) == Curve(*columns, final=(1, 0.25))
    assert curve_of([line("end")]) == Curve((), (), (), (), (), (), ())


def test_the_whole_curve_ends_with_the_final_weights():
    """They are evaluated beside the grid: a run that ends before its first grid point would else show no gain at all."""
    grid = [line(at=0, version=0), line(at=20, rollouts_paid=18)]
    final = line(at=None, rollouts_paid=25, version=2, accuracy=0.5)
    assert whole_curve_of([grid[0], final]).rollouts == (0, 25)
    assert whole_curve_of([*grid, final, line("end")]).accuracy == (0.25, 0.25, 0.5)
    assert whole_curve_of([*grid, final | {"rollouts_paid": 18}]).rollouts == (0, 20, 20)
    assert whole_curve_of([*grid, final | {"version": 1}]) == curve_of(grid)  # the last grid point's weights
    assert whole_curve_of([*grid, final | {"accuracy": None}]) == curve_of(grid)
    assert whole_curve_of([final]).accuracy == (0.5,)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('{"kind": "ev', "is not a line of JSON"),
        (json.dumps(line(standard_error="x")), "standard_error: expected"),
        (json.dumps(line(rollouts_paid=-1)), "rollouts_paid: expected a whole number from 0, got -1"),
    ],
)
def test_what_a_line_must_hold_is_the_same_for_all_who_read_it(tmp_path, wrong, said):
    (tmp_path / "metrics.jsonl").write_text(wrong + "\n")
    with pytest.raises(ValueError, match=rf"metrics\.jsonl:1 {said}.*the file is damaged"):
        read_metrics(tmp_path / "metrics.jsonl")
    assert said in (read_run(tmp_path).problem or "")
