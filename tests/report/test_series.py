"""Series against hand-made metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rollalloc.report import series
from rollalloc.runs.recorded import RecordedRun


def run_of(*lines, **end):
    """A run of (rollouts, accuracy) evaluations; `why` ends it."""
    metrics = [
        {
            "kind": "eval",
            "rollouts_paid": rollouts,
            "at": rollouts,
            "tokens_paid": 10 * rollouts,
            "seconds": 0.0,
            "optimizer_steps": rollouts,
            "version": rollouts,
            "accuracy": accuracy,
            "standard_error": 0.0,
        }
        for rollouts, accuracy in lines
    ]
    if end:
        metrics.append({"kind": "end", "rollouts_paid": lines[-1][0], **end})
    return RecordedRun(Path("a"), metrics=metrics)


def batches(*said):
    return RecordedRun(Path("a"), metrics=[{"kind": "batch", **line} for line in said])


def over_seeds(runs, cost="rollouts"):
    middle = series.accuracy_over_seeds(runs, cost)
    assert middle is not None
    return middle


REACHED = {"why": "target: reached"}


def test_a_run_that_reached_its_target_keeps_its_accuracy():
    early, late = run_of((0, 0.0), (100, 0.8), **REACHED), run_of((0, 0.0), (200, 0.8), **REACHED)
    middle = over_seeds([early, late])
    assert (middle.x_X[0], middle.x_X[-1]) == (0, 200)
    expected_X = (np.minimum(0.8, middle.x_X * 0.008) + middle.x_X * 0.004) / 2
    np.testing.assert_allclose(middle.middle_X, expected_X)


def test_the_line_ends_where_the_first_run_short_of_its_target_ends():
    reached, spent = run_of((0, 0.0), (100, 0.8), **REACHED), run_of((0, 0.0), (150, 0.3), why="budget: spent")
    running = run_of((0, 0.0), (70, 0.2))
    assert over_seeds([reached, spent]).x_X[-1] == 150
    assert over_seeds([reached, spent, running]).x_X[-1] == 70
    assert over_seeds([reached, spent], "tokens").x_X[-1] == 1500


def test_of_fewer_than_five_seeds_there_is_no_interval():
    runs = [run_of((0, 0.1 * seed), (100, 0.5 + 0.1 * seed)) for seed in range(5)]
    few, enough = over_seeds(runs[:4]), over_seeds(runs)
    assert np.isnan(few.low_X).all()
    assert np.isnan(few.high_X).all()
    assert (enough.low_X < enough.middle_X).all()
    assert (enough.middle_X < enough.high_X).all()


def test_what_training_measured_is_brought_onto_one_axis_and_what_is_not_known_is_left_out():
    run = batches(
        {"rollouts_paid": 10, "reward_mean": 0.2, "grad_norm": 2.0, "loss": None},
        {"rollouts_paid": 30, "reward_mean": 0.6, "grad_norm": 1.0, "loss": float("nan")},
    )
    over = series.training_over_time([run])
    assert over is not None
    assert over.values.keys() == {"reward", "grad norm"}
    assert (over.x_X[0], over.x_X[-1]) == (10, 30)
    assert over.values["reward"][[0, -1]].tolist() == [0.2, 0.6]
    assert series.training_over_time([batches({"rollouts_paid": 10}, {"rollouts_paid": 20})]) is None


def test_entropy_is_the_batches_or_else_that_of_evaluations():
    evaluated = run_of((0, 0.1), (40, 0.2))
    for line, entropy in zip(evaluated.metrics, (2.0, 1.0), strict=True):
        line["breadth"] = {"entropy": entropy}
    of_batches = batches({"rollouts_paid": 10, "entropy": 0.5}, {"rollouts_paid": 20, "entropy": 0.4})
    for run, entropy in ((evaluated, [2.0, 1.0]), (of_batches, [0.5, 0.4])):
        over = series.entropy_over_time([run])
        assert over is not None
        assert over.values["entropy"][[0, -1]].tolist() == entropy
    assert series.entropy_over_time([run_of((0, 0.1), (40, 0.2))]) is None
