"""Intake rules: how many groups to open now."""

import pytest

from rollalloc.core.rule import View
from rollalloc.recipes.greso import Estimated
from rollalloc.recipes.pilot_commit import EveryRound
from rollalloc.rules.intake import Ahead, Fill, KeepInFlight


def opened(rule, need, held_S, running_S, max_staleness=1):
    return rule(View.of(need=need, held_S=held_S, running_S=running_S, groups=4, max_staleness=max_staleness), {})


@pytest.mark.parametrize(
    ("rule", "need", "held_S", "running_S", "expected"),
    [
        (Fill(), 4, (0,), (0,), 4),
        (Fill(), 4, (0,), (3,), 1),
        (Fill(), 0, (4,), (0,), 0),
        (Fill(), 4, (1, 0), (0, 1), 2),  # what waits or runs in any stage is on its way
        (KeepInFlight(12), 4, (0,), (0,), 12),
        (KeepInFlight(12), 1, (3,), (5,), 7),
        (KeepInFlight(12), 0, (6,), (5,), 0),  # enough: what runs is not topped up
        (KeepInFlight(12), 4, (4, 0), (0, 0), 0),  # four wait for their commits
        (KeepInFlight(12), 4, (1, 0), (6, 2), 6),
        (KeepInFlight(12), 4, (2, 0), (0, 2), 0),
        (KeepInFlight(12, ahead=True), 4, (2, 0), (0, 2), 12),  # a batch ahead
        (KeepInFlight(12, ahead=True), 4, (4, 0), (0, 4), 0),
        (KeepInFlight(12, ahead=True), 0, (3, 4), (0, 0), 12),
        (Ahead(Fill(), 6), 4, (0,), (0,), 10),
        (Ahead(Fill(), 6), 1, (3,), (5,), 2),
        (Ahead(Fill(), 6), 0, (4,), (6,), 0),
        (Ahead(Fill(), 6), 0, (9,), (0,), 1),  # a trainer that is slower: what is ready beyond its batch counts
        (Ahead(Fill(), 6), 0, (12,), (0,), 0),
        (Ahead(KeepInFlight(12), 6), 0, (10,), (5,), 0),
        (Ahead(KeepInFlight(12), 6), 0, (4, 4), (5, 1), 7),  # five further on, where six are wanted
        (Ahead(KeepInFlight(12), 5), 0, (4, 4), (5, 1), 0),
    ],
)
def test_intake_by_hand(rule, need, held_S, running_S, expected):
    assert opened(rule, need, held_S, running_S) == expected


def test_without_staleness_no_batch_is_looked_ahead():
    assert opened(KeepInFlight(12, ahead=True), 4, (2, 0), (0, 2), max_staleness=0) == 0
    assert opened(KeepInFlight(12, ahead=True), 0, (3, 4), (0, 0), max_staleness=0) == 0
    assert opened(Ahead(Fill(), 6), 4, (0,), (1,), max_staleness=0) == 3


@pytest.mark.parametrize(
    ("in_flight", "need", "held_S", "running_S", "expected"),
    [
        (0, 4, (0, 0), (0, 0), 12),
        (0, 0, (99, 4), (0, 0), 12),  # whatever waits
        (0, 4, (9, 0), (0, 4), 12),  # the commits of this round, decided and not handed out
        (0, 4, (9, 0), (12, 4), 0),  # its pilots, too
        (1, 4, (9, 0), (0, 1), 0),  # the last commit of a round
        (5, 4, (0, 0), (2, 0), 0),
    ],
)
def test_every_round_by_hand(in_flight, need, held_S, running_S, expected):
    view = View.of(in_flight=in_flight, need=need, held_S=held_S, running_S=running_S, groups=4, max_staleness=4)
    assert EveryRound(12)(view, {}) == expected


@pytest.mark.parametrize(
    ("need", "ready", "running", "without", "expected"),
    [
        (8, 0, 0, 0, 24),  # nothing is known yet
        (8, 0, 0, 24, 24),  # none had variance so far
        (2, 6, 0, 18, 10),  # a quarter had: 1.25 · 2 · 4
        (2, 6, 4, 18, 6),
        (2, 6, 10, 18, 0),
        (2, 6, 20, 18, 0),  # what runs is not topped up
        (8, 1, 0, 9, 24),  # 100, and 24 at most
        (3, 5, 0, 0, 4),  # all had: 3.75
        (0, 8, 0, 9, 0),
    ],
)
def test_estimated_by_hand(need, ready, running, without, expected):
    view = View.of(version=3, need=need, held_S=(ready,), running_S=(running,), groups=8)
    memory = {"version": 3, "solved": without // 3, "failed": without - without // 3, "mixed": 0}
    assert Estimated(24)(view, memory) == expected
    for other in ({}, {"mean_N": 0}, memory | {"version": 2}):  # of another rule, or of the batch before
        none = Estimated(24)(view, memory | {"solved": 0, "failed": 0})
        assert Estimated(24)(view, other) == none
