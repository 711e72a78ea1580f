"""What is said of rollouts that have stopped teaching."""

import pytest

from rollalloc.runs.teaching import in_words

LAST, NOTHING = "of the last 2,048 rollouts were", "almost nothing is learned from them;"
HARD = "easier prompts or a stronger model to begin with would help"


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({}, None),
        (
            {"all_wrong": 0.9, "all_right": 0.1},
            f"90% {LAST} in groups that were all wrong, 10% all right: {NOTHING} {HARD}",
        ),
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


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (
            {"all_wrong": 1.0, "mixed": 0.0},
            "check the reward function: the last rollouts were all wrong. Try it on an answer",
        ),
        ({"wrong": 1.0}, "check the reward function: the last rollouts were all wrong. Try it on an answer"),
        (
            {"all_right": 1.0},
            "the last rollouts were all right: harder prompts would help, or the run is done. If all rollouts were right",
        ),
        (
            {"right": 1.0},
            "the last rollouts were all right: harder prompts would help, or the run is done. If all rollouts were right",
        ),
        ({"all_alike": 1.0}, "check the reward function: in each of the last groups, all rollouts got the same reward"),
    ],
)
def test_where_outcomes_never_differed_the_reward_function_is_suspected_first(shares, said):
    assert in_words(shares).startswith(said)
