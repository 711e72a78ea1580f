"""The profile of logs that were made up: what each of its parts must come to, and what is said of logs that tell little."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logged import Group, columns

from rollalloc.advise.profile import profile_of
from rollalloc.advise.shares import alike
from rollalloc.waste.groups import Gathering, Log
from rollalloc.waste.shares import share_of

NAN = float("nan")


def log_of(rewards, *, prompts=None, steps=None, asked=None, answered=None, tokens=None, truncated=None, limited=None):
    """A log with one group for each row of rewards.

    Args:
        rewards: a row of rewards for each group; None is a rollout without a score.
        prompts: the prompt of each group; a prompt of its own by default.
        steps: the training step of each group.
        asked: (group) → the prompt's text.
        answered: (group, rollout) → the completion's text.
        tokens: (group, rollout) → the completion's length.
        truncated: (group, rollout) → whether it reached a limit.
        limited: (group, rollout) → whether that was the recipe's limit.
    """
    gathering = Gathering()
    for group, row in enumerate(rewards):
        for at, reward in enumerate(row):
            gathering.add(
                group,
                f"p{group if prompts is None else prompts[group]}",
                None if steps is None else steps[group],
                None if reward is None else float(reward),
                asked=asked and asked(group),
                answered=answered and answered(group, at),
                tokens=tokens and tokens(group, at),
                truncated=truncated and truncated(group, at),
                limited=bool(limited and limited(group, at)),
            )
    return Log("verl", gathering.groups())


def drawn(prompts=200, n=4, seed=0, rates=None):
    """Rewards 0 or 1 of n rollouts of each prompt, drawn with the prompt's success rate; rates are random by default."""
    random = np.random.default_rng(seed)
    rates = random.random(prompts) if rates is None else rates
    return (random.random((len(rates), n)) < np.asarray(rates)[:, None]).astype(float)


def profiled(rewards, **more):
    """The profile of `log_of(rewards, **more)`."""
    return profile_of(log_of(rewards, **more), resamples=30)


def test_features_predict_success_where_the_text_tells_it_and_a_record_predicts_it_anyway():
    """Every second prompt has a success rate of 0.9, the others 0.1; in the first log those prompts are also longer."""
    rewards = drawn(200, rates=[0.9 if group % 2 else 0.1 for group in range(200)])
    telling = profiled(rewards, asked=lambda group: "x" * (5 + 40 * (group % 2))).predictability
    assert telling.features.auc.value > 0.85
    assert telling.both.log_loss.value < telling.blind.value
    same_text = profiled(rewards, asked=lambda group: "x").predictability
    assert 0.45 < same_text.features.auc.value < 0.55
    assert same_text.record.auc.value > 0.8


def test_where_nothing_predicts_success_every_predictor_has_an_auc_of_one_half():
    """All prompts have a success rate of 0.5, and texts are random.

    Error rate: of 1,000 rollouts an AUC has a standard error of 0.019; four of them have a probability of 6e-5.
    """
    random = np.random.default_rng(1)
    found = profiled(drawn(250, rates=[0.5] * 250), asked=lambda group: str(random.random())).predictability
    for predictor in (found.features, found.record, found.both):
        assert predictor.auc.value == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([[1, 1, 1, 1]] * 30, "nothing to predict"),
        ([[0, 1, 0, 1]] * 12, "success cannot be predicted from 12 prompts, at least 20 are needed"),
    ],
)
def test_what_cannot_be_predicted_is_said(rewards, said):
    found = profiled(rewards)
    assert found.predictability is None
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (log_of([[0, 1, 1]] * 3), "3 prompts, at least 10 are needed"),
        (log_of(drawn(100, n=1)), "most prompts have only one scored rollout"),
        (log_of([row for row in drawn(400) if 0 < row.sum() < 4]), "the log was filtered before it was written"),
        (log_of(drawn(16)), "the share of groups of 4 without variance can be anything from"),
    ],
)
def test_too_few_says_of_what(log, said):
    found = profile_of(log, resamples=30)
    assert said in found.too_few


@pytest.mark.parametrize(("kept", "filtered"), [(1.0, False), (0.5, True), (0.0, True)])
def test_a_log_of_which_some_groups_without_variance_were_filtered_is_said_to_be(kept, filtered):
    """800 prompts, two visits of 4 rollouts each; of the groups without variance, this share is kept.

    Found in 20 of 20 logs with half of these groups missing, in none with all there.
    """
    for seed in range(3):
        random = np.random.default_rng(seed)
        rewards = drawn(seed=seed, rates=np.tile(random.random(800), 2))
        stay = (rewards.std(axis=1) > 0) | (random.random(1600) < kept)
        found = profiled(rewards[stay], prompts=np.tile(range(800), 2)[stay])
        assert ("the log was filtered" in found.too_few) == filtered


def test_a_method_that_adds_rollouts_to_groups_that_are_alike_does_not_make_its_log_look_filtered():
    """Groups whose first two rewards are equal get 14 rollouts more, so that all groups that stay at two rollouts differ.

    That is what a log looks like from which groups without variance were removed, but here nothing is missing.
    """
    gathering, rewards = Gathering(), drawn(400, 16)
    for group, row in enumerate(rewards):
        for at, reward in enumerate(row if row[0] == row[1] else row[:2]):
            gathering.add(group, f"p{group}", None, float(reward), stage=int(at >= 2))
    assert profile_of(Log("rollalloc", gathering.groups()), resamples=30).too_few == ""


def test_a_log_that_may_be_filtered_and_has_no_group_without_variance_decides_nothing():
    rewards = [row for row in drawn(400, 8) if 0 < row.sum() < 8]
    assert "the log was filtered" in profile_of(replace(log_of(rewards), complete=False), resamples=30).too_few


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((-1.0, 1.0), "are outside [0, 1]"),
        ((0.0, 3.0), "are outside [0, 1]"),
        ((0.0, 0.3, 1.0), "take 3 values"),
    ],
)
def test_rewards_that_rule_something_out_say_what(values, said):
    rewards = np.random.default_rng(0).choice(values, (60, 4))
    assert any(said in sentence for sentence in profiled(rewards).reward.rules_out)
    told = profile_of(log_of(rewards), threshold=0.5, resamples=30).reward
    assert (told.rules_out, told.graded, told.outside) == ((), False, False)


def test_constant_and_missing_rewards_are_told_of():
    constant = profiled([[0, 0, 0, 0]] * 59 + [[0, 0, 0, 1]]).reward.rules_out
    assert any("of the rewards are the same" in sentence for sentence in constant)
    missing = profiled([[0, 1, None, 1]] * 40).reward
    assert missing.unscored.value == 0.25
    assert any("have no score" in sentence for sentence in missing.rules_out)


@pytest.mark.parametrize("log", [log_of([[None, None]] * 20), log_of([[NAN, NAN]] * 20)])
def test_no_score_at_all_is_refused(log):
    with pytest.raises(ValueError, match="no rollout of the log has one; name another field"):
        profile_of(log)


def test_of_graded_rewards_groups_are_alike_where_all_are_the_same():
    rewards = [[0.1, 0.2, 0.1, 0.2]] * 20 + [[0.9, 0.9, 0.9, 0.9]] * 20
    found = profiled(rewards)
    assert found.reward.graded
    assert found.zero_variance[4].value == 0.5  # nobody is right in the first twenty, and still they differ
    assert found.zero_variance[2].value == pytest.approx(0.5 + 0.5 * 2 / 6)
    assert found.zero_variance.keys() == {2, 4}  # how many groups of 8 are alike, groups of 4 do not tell


def test_lengths_have_their_tail():
    rewards = drawn(100, rates=[0.5] * 100)
    found = profiled(rewards, tokens=lambda group, at: 90 - 80 * int(rewards[group, at])).lengths
    assert (found.unit, found.longest) == ("tokens", 90)
    assert found.p50.interval[0] <= found.p50.value <= found.p95.value <= 90
    in_text = profiled(rewards, answered=lambda group, at: "abc").lengths
    assert (in_text.unit, in_text.p50.value) == ("characters", 3)
    assert profiled(rewards).lengths is None


def test_lengths_say_what_a_limit_at_the_right_rollouts_would_save():
    """Right rollouts have 10 to 20 tokens, wrong ones 100: beyond the 95th percentile are 80 of 100."""
    rewards = drawn(100, rates=[0.5] * 100)
    found = profiled(rewards, tokens=lambda group, at: 10 + group % 11 if rewards[group, at] else 100).lengths
    assert found.right_p95.value == 20
    assert found.right_p95.interval[0] <= 20 <= found.right_p95.interval[1]
    wrong, right = (rewards == 0).sum(), np.array([10 + group % 11 for group in range(100)]) @ rewards.sum(axis=1)
    assert found.beyond.value == pytest.approx(80 * wrong / (100 * wrong + right))
    nobody = profiled(np.zeros((20, 4)), tokens=lambda group, at: 7).lengths
    assert (nobody.right_p95, nobody.beyond) == (None, None)


def test_what_the_recipe_s_limit_stopped_is_a_share_of_its_own():
    """A quarter of the rollouts reached the generator's limit, another quarter the recipe's."""
    rewards = np.zeros((20, 4))
    own = profiled(
        rewards, tokens=lambda group, at: 7, truncated=lambda group, at: at < 2, limited=lambda group, at: not at
    )
    assert (own.lengths.truncated.value, own.lengths.limited.value) == (0.25, 0.25)
    plain = profiled(rewards, tokens=lambda group, at: 7, truncated=lambda group, at: at < 2).lengths
    assert (plain.truncated.value, plain.limited) == (0.5, None)


def test_a_limit_above_which_nothing_is_saves_nothing():
    rewards = drawn(100, rates=[0.5] * 100)
    found = profiled(rewards, tokens=lambda group, at: 90 if rewards[group, at] else 10).lengths
    assert (found.right_p95.value, found.beyond.value) == (90, 0)


# --------------------------------------------------------------------------------------------------------------- shares


def test_the_interval_of_a_share_counts_prompts_by_hand():
    """`share_of(hits, counts, prompts)`: half of 400 prompts is 0.5 ± 1.96 · √(0.25 / 400); none of 40 has Clopper and
    Pearson's upper limit; five prompts are too few for an interval, however many rollouts each has."""
    half = share_of(np.tile([0.0, 1.0], 200), np.ones(400), np.arange(400))
    assert half.value == 0.5
    assert half.interval == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=1e-3)
    none = share_of(np.zeros(40), np.ones(40), np.arange(40))
    assert none.interval == pytest.approx((0, 1 - 0.025 ** (1 / 40)))
    of_five_prompts = share_of(np.ones(40), np.ones(40), np.arange(40) % 5)
    assert of_five_prompts.interval is None
    assert share_of(np.zeros(3), np.zeros(3), np.arange(3)) is None  # a share of nothing


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=1, max_size=6), min_size=1, max_size=12))
def test_the_share_of_groups_of_two_that_are_alike_is_that_over_all_pairs_of_a_group(rewards):
    """Rollouts without a score (NaN) are left out; None where no group has a pair."""
    share = alike(columns(Group(str(at), 0, row) for at, row in enumerate(rewards)), 2)
    scored = [[reward for reward in row if not np.isnan(reward)] for row in rewards]
    equal_pairs = [np.mean([a == b for a, b in combinations(row, 2)]) for row in scored if len(row) > 1]
    assert (share is None) == (not equal_pairs)
    assert share is None or share.value == pytest.approx(np.mean(equal_pairs))


def test_what_has_no_score_counts_neither_as_right_nor_as_wrong():
    """Half of the scored rollouts are right, one in three has no score."""
    found = profiled([[0, 1, None]] * 60)
    assert found.mean.value == pytest.approx(0.5, abs=0.01)
    assert profiled([[1, None, None]] * 60).mean.value > 0.95
