"""What an engine makes of a recipe whose rollouts stream."""

import re
from dataclasses import replace
from typing import Any

import pytest

from rollalloc import recipes
from rollalloc.recipes.streaming import streamed, streaming_notes
from rollalloc.rules.intake import Ahead, Fill
from rollalloc.rules.promote import MostRecent, Oldest, TopVariance

GRPO = recipes.grpo(4, 2)
PILOTS: dict[str, Any] = {"groups": 4, "n_pilot": 2, "n_commit": 2, "gen_groups": 8}


@pytest.mark.parametrize(
    ("staleness", "ahead", "intake", "allowed"),
    [
        (None, None, Fill(), 0),
        (1, None, Fill(), 1),
        (None, 1, Fill(), 1),
        (3, 1, Fill(), 3),
        (None, 2, Ahead(Fill(), 4), 4),
        (2, 2, Ahead(Fill(), 4), 2),
        (None, 3, Ahead(Fill(), 8), 6),
    ],
)
def test_groups_are_opened_for_as_many_batches_as_are_ahead(staleness, ahead, intake, allowed):
    made = streamed(GRPO, staleness=staleness, ahead=ahead)
    assert made == replace(GRPO, intake=intake, max_staleness=allowed)


def test_a_recipe_that_looks_ahead_itself_has_one_batch_less_to_open():
    recipe = recipes.pilot_commit(**PILOTS, promote="oldest")
    assert streamed(recipe, ahead=2).intake == recipe.intake
    assert streamed(recipe, ahead=3) == replace(recipe, intake=Ahead(recipe.intake, 4), max_staleness=6)
    rounds = recipes.pilot_commit(**PILOTS, promote="oldest", pilots="every_round")
    assert streamed(rounds, ahead=2) == rounds


@pytest.mark.parametrize(
    ("promote", "waves", "stream"),
    [
        (None, TopVariance(), Oldest()),
        ("top_variance", TopVariance(always=True), TopVariance(always=True)),
        ("most_recent", MostRecent(), MostRecent()),
    ],
)
def test_pilots_wait_for_all_others_in_waves_and_where_the_user_says_so(promote, waves, stream):
    recipe = recipes.pilot_commit(**PILOTS, promote=promote)
    assert recipe.stages[0].promote == waves
    assert streamed(recipe).stages[0].promote == stream
    assert streamed(recipe, staleness=0) == replace(recipe, max_staleness=0), "nothing overlaps"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"ahead": 0},
            "ahead must be a whole number of at least 1 .with staleness 0 no batch can be generated ahead., got 0",
        ),
        ({"staleness": -1}, "staleness must be a whole number of at least 0"),
        (
            {"ahead": 2, "staleness": 1},
            "ahead=2: .* staleness allows only 1; use staleness=2 or more, or ahead=1 at most",
        ),
        ({"ahead": 1, "staleness": 0}, "ahead=1: .* staleness allows only 0"),
    ],
)
def test_an_impossible_number_of_batches_ahead_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        streamed(GRPO, **given)


@pytest.mark.parametrize(
    ("recipe", "given", "says"),
    [
        (GRPO, {}, ["do not overlap; use staleness 1 for overlap"]),
        (GRPO, {"staleness": 1}, []),
        (GRPO, {"staleness": 3}, ["staleness 3 is more than this run can use: .* set ahead=2"]),
        (GRPO, {"staleness": 3, "ahead": 2}, ["less than twice the 2 batches .* staleness=4 keeps them"]),
        (GRPO, {"staleness": 4, "ahead": 2}, []),
        (GRPO, {"ahead": 3}, []),
        (recipes.pilot_commit(**PILOTS, promote="oldest"), {"staleness": 5, "ahead": 3}, ["staleness=6 keeps them"]),
        (recipes.reinforce(8, replay=4, replay_staleness=3), {"staleness": 3}, []),  # replayed rows are as old
        (recipes.pilot_commit(**PILOTS), {}, ["that passed the pilot stage go on first; promote=top_variance"]),
        (recipes.pilot_commit(**PILOTS, promote="top_variance"), {}, []),
        (
            recipes.pilot_commit(**PILOTS, promote="oldest", pilots="every_round"),
            {},
            ["begins a round only after the last round"],
        ),
    ],
)
def test_streaming_notes_warn_of_settings_that_a_recipe_cannot_use(recipe, given, says):
    notes = streaming_notes(recipe, streamed(recipe, **given))
    assert len(notes) == len(says)
    for note, expected in zip(notes, says, strict=True):
        assert re.search(expected, note), note
