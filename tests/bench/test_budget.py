"""Forecast of a budget: exact where the curve is its own, refused where there is no trend."""

from __future__ import annotations

import numpy as np
import pytest

from rollalloc.bench.budget import SPREAD, Unforeseeable, forecast_to
from rollalloc.runs.cost import Curve


def curve(*accuracies, every=1000, tokens=5):
    at = tuple(float(every * number) for number in range(len(accuracies)))
    return Curve(at, tuple(tokens * each for each in at), at, at, tuple(range(len(at))), accuracies, (0.0,) * len(at))


def line(logits):
    return tuple(float(1 / (1 + np.exp(-each))) for each in logits)


def test_a_straight_line_of_logits_is_followed():
    found = forecast_to(curve(*line([0, 0.2, 0.4])), line([3.0])[0])
    assert found.rollouts.value == pytest.approx(15_000)
    assert found.rollouts.interval == pytest.approx([15_000 * factor for factor in SPREAD])
    assert found.tokens.value == pytest.approx(75_000)
    assert (found.evaluations, found.reached) == (3, False)


def test_it_cannot_cost_less_than_what_is_paid():
    found = forecast_to(curve(*line([0, 0.2, 0.4])), line([0.5])[0])
    assert found.rollouts.interval[0] == 2000
    assert found.rollouts.value == pytest.approx(2500)


def test_a_target_that_was_reached_is_no_forecast_unless_looked_at_before():
    reached = curve(0.5, 0.6, 0.7, 0.8, 0.9)
    found = forecast_to(reached, 0.75)
    assert found.reached
    assert found.rollouts.value == found.rollouts.interval[0] == pytest.approx(2500)
    assert not forecast_to(reached, 0.75, upto=1000).reached


@pytest.mark.parametrize("accuracies", [(), (0.5,), (0.5, 0.5), (0.5, 0.4, 0.3)])
def test_no_trend_no_forecast(accuracies):
    with pytest.raises(Unforeseeable, match="wait for"):
        forecast_to(curve(*accuracies), 0.9)


@pytest.mark.parametrize("target", [0, 1, -1, float("nan"), 1.5])
def test_a_target_is_an_accuracy(target):
    with pytest.raises(ValueError, match="target must be"):
        forecast_to(curve(0.5, 0.6), target)
