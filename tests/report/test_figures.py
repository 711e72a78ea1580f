"""The figure's numbers against hand-made curves, and that what is written is a picture."""

from __future__ import annotations

import numpy as np
import pytest

from rollalloc.bench.cost import Curve
from rollalloc.report.figures import accuracy_against_rollouts, median_curve


def curve(rollouts, accuracy):
    rollouts = tuple(map(float, rollouts))
    exact = (0.0,) * len(rollouts)
    return Curve(rollouts, rollouts, rollouts, rollouts, tuple(range(len(rollouts))), tuple(accuracy), exact)


def test_the_median_is_over_runs_and_only_where_each_run_is():
    runs = [curve((0, 100, 200), (0.0, 0.5, 1.0)), curve((0, 300), (0.2, 0.2)), curve((10, 250), (0.4, 0.4))]
    grid_X, median_X = median_curve(runs, points=20)
    assert (grid_X[0], grid_X[-1], len(grid_X)) == (10, 200, 20)
    # The rising run lies below, between and above the flat ones at 0.2 and 0.4.
    expected_X = np.clip(grid_X / 200, 0.2, 0.4)
    np.testing.assert_allclose(median_X, expected_X)


def test_of_one_run_the_median_is_the_run():
    grid_X, median_X = median_curve([curve((0, 50, 100), (0.1, 0.3, 0.2))], points=5)
    np.testing.assert_allclose(grid_X, [0, 25, 50, 75, 100])
    np.testing.assert_allclose(median_X, [0.1, 0.2, 0.3, 0.25, 0.2])


@pytest.mark.parametrize("target", [None, 0.8])
def test_a_picture_is_written(tmp_path, target):
    runs = {f"recipe {number}": [curve((0, 100), (0.1, number / 10))] * 2 for number in range(9)}
    accuracy_against_rollouts(runs, tmp_path / "figure.png", target=target, title="a title")
    written = (tmp_path / "figure.png").read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(written) > 10_000
