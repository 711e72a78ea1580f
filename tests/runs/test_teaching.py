"""What is said of rollouts that have stopped teaching."""

import pytest

from rollalloc.runs.teaching import in_words

LAST, NOTHING = "of the last 2,048 rollouts were", "they teach next to nothing;"
HARD = "easier prompts or a stronger model to begin with would help"


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({}, None),
        ({"all_wrong": 0.3, "mixed": 0.7}, None),
        ({"wrong": 0.9, "right": 0.1}, None),
        (
            {"all_wrong": 0.71, "all_right": 0.12, "mixed": 0.17},
            f"71% {LAST} in groups that were all wrong, 12% all right: {NOTHING} {HARD}",
        ),
        (
            {"all_alike": 0.6, "mixed": 0.4},
            f"60% {LAST} in groups that were all alike: {NOTHING} a reward that tells rollouts apart would help",
        ),
        (
            {"right": 0.98, "wrong": 0.02},
            f"98% {LAST} right: {NOTHING} harder prompts would help, or the run is done",
        ),
    ],
)
def test_a_line_says_what_most_were_and_what_would_help(shares, said):
    assert in_words(shares) == said
