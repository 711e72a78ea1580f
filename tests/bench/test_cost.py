"""Cost to target against tables worked out by hand, and metrics files whole, torn and damaged."""

from __future__ import annotations

import json

import pytest

from rollalloc.bench.cost import Curve, cost_to_target, curve_of, read_metrics


@pytest.mark.parametrize(
    ("accuracy", "target", "cost"),
    [
        # Evaluations at 0, 100, 200, ... rollouts.
        ([0.1, 0.5, 0.9], 0.5, 100),
        ([0.1, 0.5, 0.9], 0.3, 50),  # linearly between the evaluation before and the one that reaches it
        ([0.1, 0.3, 0.7, 0.9], 0.6, 175),
        ([0.1, 0.3, 0.6, 0.6], 0.6, 200),
        ([0.0, 0.0, 0.8, 0.8], 0.4, 150),
        # One lucky evaluation is not enough.
        ([0.1, 0.9, 0.1, 0.1], 0.5, None),
        ([0.1, 0.9, 0.1, 0.9, 0.9], 0.5, 250),
        ([0.9, 0.1, 0.5, 0.5], 0.5, 200),
        ([0.1, 0.1, 0.9], 0.5, None),  # the run ended before anything confirmed it
        # There from the start.
        ([0.9, 0.9, 0.1], 0.5, 0),
        ([0.5, 0.5], 0.5, 0),
        # Never, or nothing to judge by.
        ([0.1, 0.2, 0.49, 0.49], 0.5, None),
        ([0.9], 0.5, None),
        ([], 0.5, None),
    ],
)
def test_cost_to_target(accuracy, target, cost):
    found = cost_to_target([100.0 * at for at in range(len(accuracy))], accuracy, target)
    assert found == (None if cost is None else pytest.approx(cost))


def test_costs_need_not_be_evenly_spaced_or_rollouts():
    assert cost_to_target([2.0, 10.0, 40.0], [0.0, 0.4, 0.6], 0.3) == pytest.approx(8.0)
    assert cost_to_target([7.0, 8.0], [0.4, 0.6], 0.3) == 7.0


def line(kind="eval", **values):
    return {"kind": kind, "rollouts_paid": 10, "tokens_paid": 30, "seconds": 0.5, "accuracy": 0.25} | values


def test_a_curve_holds_the_evaluations_that_have_an_accuracy():
    metrics = [
        line(rollouts_paid=0),
        line("batch"),
        line(accuracy=None),
        line(rollouts_paid=20, tokens_paid=90, seconds=1.5, accuracy=0.5),
        line("end"),
    ]
    assert curve_of(metrics) == Curve((0.0, 20.0), (30.0, 90.0), (0.5, 1.5), (0.25, 0.5))
    assert curve_of([line("end")]) == Curve((), (), (), ())


@pytest.mark.parametrize("torn", ["", '{"kind": "ev', '{"kind": "eval", "rollouts_paid": 1'])
def test_a_torn_last_line_is_left_out(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line()) + "\n" + json.dumps(line("end")) + "\n" + torn)
    assert read_metrics(path) == [line(), line("end")]


def test_a_damaged_line_is_an_error_that_says_where(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line()) + '\n{"kind": "ev\n' + json.dumps(line("end")) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a line of JSON"):
        read_metrics(path)


def test_no_lines_and_no_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "none.jsonl")
