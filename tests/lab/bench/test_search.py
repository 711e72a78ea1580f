"""Successive halving: who goes on, and that no method gets more to search with than another."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from rollalloc.lab.bench.pool import Job
from rollalloc.lab.bench.search import Rung, Score, Search, Trial, better, rungs, score, search_rollouts
from rollalloc.runs.cost import Curve


def trial(*accuracy):
    """On a grid of 100 rollouts, from 0 on; the last one is of the end of the run, beyond the grid."""
    *accuracy, last = accuracy
    at = tuple(100.0 * point for point in range(len(accuracy)))
    curve = Curve(at, at, at, at, tuple(range(len(accuracy))), tuple(accuracy), (0.0,) * len(accuracy))
    return Trial(curve, last)


def test_a_score_by_hand():
    reached, never = trial(0.0, 0.5, 0.9, 0.9), trial(0.0, 0.1, 0.2, 0.3)
    # Half-way to 0.5 after 100 rollouts, so 0.4 after 80.
    assert score([reached], 0.4, 300) == Score(0, pytest.approx(80), pytest.approx(0.1))
    assert score([reached, never], 0.4, 300) == Score(1, pytest.approx(190), pytest.approx(0.4))
    assert score([reached, None], 0.4, 300) == Score(2, inf, inf)


def test_who_is_better():
    scores = {
        0: Score(1, 300, 0.5),
        1: Score(1, 300, 0.4),
        2: Score(0, 250, 0.9),
        3: Score(1, inf, inf),
        4: Score(0, 250, 0.9),
    }
    assert better(scores, 5) == (2, 4, 1, 0, 3)  # of equals the earlier one
    assert better(scores, 2) == (2, 4)


def test_rungs_halve_with_a_seed_of_their_own():
    assert rungs(9, 1000, (0.125, 0.25, 0.5)) == (
        Rung(9, (1000,), 0.125),
        Rung(4, (1001,), 0.25),
        Rung(2, (1002,), 0.5),
    )
    assert search_rollouts(rungs(9, 1000, (0.125, 0.25, 0.5)), 800) == 9 * 100 + 4 * 200 + 2 * 400


def test_a_search_goes_on_with_the_better_half_and_finds_the_best():
    """The accuracy of a setting is its number, but that number 3 diverges on the last rung."""
    made = []

    def job(rung, setting, seed):
        made.append((rung, setting, seed))
        return Job(None, Path(f"{rung}-{setting}-{seed}"))  # pyright: ignore[reportArgumentType]

    def of(job):
        rung, setting, _ = map(int, job.place.name.split("-"))
        return None if (rung, setting) == (1, 3) else trial(0.0, 0.1, setting / 10)

    search = Search((Rung(4, (7,), 0.5), Rung(2, (8, 9), 1.0)), 200, 0.95, job)
    over = set()
    first = search.advance(lambda job: job.place in over, of)
    assert [job.place.name for job in first] == ["0-0-7", "0-1-7", "0-2-7", "0-3-7"]
    over |= {job.place for job in first[1:]}
    assert search.advance(lambda job: job.place in over, of) == first[:1]  # nobody goes on before the rung is over
    assert search.found is None
    over |= {first[0].place}
    second = search.advance(lambda job: job.place in over, of)
    assert [job.place.name for job in second] == ["1-3-8", "1-3-9", "1-2-8", "1-2-9"]
    assert search.advance(lambda job: True, of) == []
    assert search.found == 2
    assert search.costs(of) == [200, 200]  # censored: the budget
    assert search.scores[0][3].error < search.scores[0][2].error
