"""Intake rules: how many groups to open now."""

import pytest

from rollalloc.core.recipe import View
from rollalloc.rules.intake import Fill, KeepInFlight


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
    ],
)
def test_intake_by_hand(rule, need, held_S, running_S, expected):
    assert opened(rule, need, held_S, running_S) == expected


def test_without_staleness_no_batch_is_looked_ahead():
    assert opened(KeepInFlight(12, ahead=True), 4, (2, 0), (0, 2), max_staleness=0) == 0
    assert opened(KeepInFlight(12, ahead=True), 0, (3, 4), (0, 0), max_staleness=0) == 0


def test_keep_in_flight_refuses():
    with pytest.raises(ValueError, match="groups"):
        KeepInFlight(0)
    with pytest.raises(
        ValueError, match="ahead must be True or False: how many groups a batch has the recipe says, got 4"
    ):
        KeepInFlight(1, ahead=4)  # pyright: ignore
