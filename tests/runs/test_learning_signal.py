"""Tests of the share of rollouts that taught, and of the warnings if most did not."""

import pytest

from rollalloc.runs.learning_signal import in_words, share_taught

LAST, NOTHING = "of the last 2,048 rollouts were", "almost nothing is learned from them;"
NEITHER = "no one cause leads, so prompts that are sometimes solved would help more than easier or harder ones"
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
        (  # neither easier nor harder prompts, because the next page may see the causes in the other order
            {"all_wrong": 0.34, "all_right": 0.32, "mixed": 0.34},
            f"34% {LAST} in groups that were all wrong, 32% all right: {NOTHING} {NEITHER}",
        ),
        (
            {"all_right": 0.31, "all_wrong": 0.23, "mixed": 0.46},
            f"31% {LAST} in groups that were all right, 23% all wrong: {NOTHING} {NEITHER}",
        ),
        ({"pilots_wrong": 0.4, "pilots_right": 0.3, "all_wrong": 0.1, "mixed": 0.2}, None),
        (
            {"pilots_wrong": 0.9, "pilots_right": 0.06, "mixed": 0.04},
            f"90% {LAST} in groups that were all wrong, 6% all right: {NOTHING} {HARD}",
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
        ({"all_wrong": 0.5, "pilots_wrong": 0.5}, "check the reward function: the last rollouts were all wrong. Try"),
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


@pytest.mark.parametrize(
    ("accounts", "share"),
    [
        ({}, None),
        ({"open": 8}, None),
        ({"trained": 30, "zero_variance": 50, "surplus": 20, "open": 100}, 0.3),
        ({"trained": 0, "zero_variance": 5}, 0.0),
    ],
)
def test_what_taught_is_what_was_trained_of_all_that_ended(accounts, share):
    assert share_taught(accounts) == share
