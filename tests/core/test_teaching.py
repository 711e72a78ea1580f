"""Tests of `Teaching`: outcomes of groups, the window of recent rollouts, and when a warning is due."""

import json

import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.teaching import OUTCOMES, WINDOW, Teaching

BATCH = 64


def spoken(shares, each=BATCH):
    """The batches, of so many rollouts and that share of them all wrong, after which something is said."""
    teaching, said = Teaching(), []
    for at, share in enumerate(shares):
        wrong = round(share * each)
        teaching.add({"all_wrong": wrong, "mixed": each - wrong})
        teaching.after_batch()
        if teaching.should_warn:
            said.append(at)
    return said


FULL = WINDOW // BATCH  # batches of a full window


def test_outcomes_that_never_differed_are_said_after_the_first_batch_and_not_again_until_long_after():
    assert spoken([1.0] * 100) == [0]
    assert spoken([1.0] * 100, each=BATCH // 4) == [3]  # with `FIRST` rollouts
    assert spoken([1 - 1 / BATCH] * 20) == []  # one rollout was right: the window has to be full
    assert spoken([1.0] * (16 * FULL + 1)) == [0, 16 * FULL]


def test_a_warning_is_due_once_when_the_window_is_full_and_the_share_crosses():
    assert spoken([0.3] * 100) == []
    assert spoken([0.6] * 100) == [FULL - 1]
    crossing = spoken([0.0] * FULL + [1.0] * FULL)
    assert crossing[0] == FULL + FULL // 2 - 1  # half of the window
    assert len(crossing) == 4  # at 50%, 65%, 80% and 95%


def test_lone_rollouts_cause_a_warning_only_at_a_success_rate_near_0_or_1():
    """All wrong is half of what REINFORCE learns from: nothing is said of it until hardly anything else is left."""
    for right, expected in ((0.5, 0), (0.9, 0), (0.97, 1)):
        teaching, said = Teaching(), 0
        for _ in range(100):
            teaching.add({"right": round(right * 100), "wrong": 100 - round(right * 100)})
            teaching.after_batch()
            said += teaching.should_warn
        assert said == expected


@pytest.mark.parametrize(
    ("recipe", "rewards", "expected"),
    [
        (recipes.grpo(1, 4), [0, 0, 0, 0], {"all_wrong": 4}),
        (recipes.grpo(1, 4), [1, 1, 1, 1], {"all_right": 4}),
        (recipes.grpo(1, 4), [0.3, 0.3, 0.3, 0.3], {"all_alike": 4}),
        (recipes.grpo(1, 4), [1, 1, 0, 1], {"mixed": 4}),
        (recipes.grpo(1, 4), [-1, -1, -1, -1], {"all_wrong": 4}),
        (recipes.grpo(1, 4), [0, 0, None, None], {"all_wrong": 2}),
        (recipes.dapo(1, 2, gen_groups=2, max_candidates=2), [1, 1], {"all_right": 2}),
        (recipes.dapo(1, 2, gen_groups=2, max_candidates=2), [0.3, 0.1 + 0.2], {"all_alike": 2}),  # rounding
        (recipes.dapo(1, 2, gen_groups=1), [0.5, 0.65], {"mixed": 2}),
        (recipes.raft(1), [1], {"right": 1}),
        (recipes.raft(1), [0], {"wrong": 1}),
        (recipes.raft(1), [0.4], {"between": 1}),
        (recipes.raft(1), [7.5], {"between": 1}),
        (recipes.raft(1, 2), [1, 1], {"right": 2}),  # trained on, so that they were not compared
        (recipes.raft(1, 2), [0, 0], {"all_wrong": 2}),
        (recipes.pilot_commit(1, n_pilot=2, n_commit=2, gen_groups=1), [0, 0], {"pilots_wrong": 2}),
        (recipes.pilot_commit(1, n_pilot=2, n_commit=2, gen_groups=1), [1, 1], {"pilots_right": 2}),
    ],
)
def test_outcomes_by_hand(drive, recipe, rewards, expected):
    driver = drive(recipe, 2, default=tuple(rewards))
    driver.answer(driver.ask().generate[:1])
    driver.ask()
    teaching = driver.allocator.state_dict()["teaching"]
    counts = [sum(of) for of in zip(teaching["now"], *teaching["before"], strict=True)]
    assert {name: count for name, count in zip(OUTCOMES, counts, strict=True) if count} == expected


def test_pilots_cause_a_warning_only_if_hardly_any_prompt_is_worth_more_rollouts():
    """At a rate of .5 half of two pilots agree, and at .25 or .75 five of eight: that is what pilots are for."""
    for agree, expected in ((0.5, 0), (0.625, 0), (0.9, 0), (0.97, 1)):
        teaching, said = Teaching(), 0
        for _ in range(100):
            wrong, right = round(agree * 180), round(agree * 20)
            teaching.add({"pilots_wrong": wrong, "pilots_right": right, "mixed": 200 - wrong - right})
            teaching.after_batch()
            said += teaching.should_warn
        assert said == expected


def test_a_state_without_outcomes_of_pilots_is_read():
    teaching = Teaching()
    teaching.load_state_dict(Teaching().state_dict() | {"before": [[5, 0, 0, 4, 0, 0, 3]]})
    teaching.add({"mixed": 1})
    assert teaching.state_dict()["before"] == [[5, 0, 0, 4, 0, 0, 3, 0, 0, 0]]


def test_a_corrupt_state_is_refused():
    allocator = Allocator(recipes.grpo(1, 2), 2, 0)
    state = allocator.state_dict()
    for name, junk in (("said", 2), ("since", -1), ("speaks", 1), ("now", [1]), ("before", [[0.5] * 7])):
        with pytest.raises(ValueError, match="teaching"):
            allocator.load_state_dict(state | {"teaching": state["teaching"] | {name: junk}})


def test_a_saved_state_of_outcomes_is_complete():
    """When it was last said of what is in the state; whether it is to be said now, too, though no batch came since."""
    teaching = Teaching()
    for _ in range(3):
        teaching.add({"all_wrong": WINDOW})
        teaching.after_batch()
    teaching.add({"mixed": 5})
    saved = json.loads(json.dumps(teaching.state_dict()))
    assert (saved["said"], saved["since"], saved["speaks"]) == (1, 2 * WINDOW, False)
    for speaks in (True, False):
        again = Teaching()
        again.load_state_dict(saved | {"speaks": speaks})
        assert again.state_dict() == saved | {"speaks": speaks}
