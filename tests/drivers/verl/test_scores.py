"""Tests of how verl's rewards become rewards and metrics of rollouts."""

import math

import numpy as np
import pytest

from rollalloc.drivers.verl.scores import read_score
from rollalloc.rewards import frameworks
from rollalloc.rewards.answers import exact
from rollalloc.rewards.extract import boxed
from rollalloc.rewards.function import Scored, Unscored
from rollalloc.rewards.scorers import InlineScorer


@pytest.mark.parametrize(
    ("score", "extra", "scored"),
    [
        (0.5, {"acc": 1.0}, Scored(0.5, 1.0)),
        (0.5, {"acc": True}, Scored(0.5, 1.0)),
        (0.5, {"acc": None}, Scored(0.5, 0.5)),
        (0.5, {}, Scored(0.5, 0.5)),
        (np.array(0.5), {"acc": np.float32(1)}, Scored(0.5, 1.0)),
    ],
)
def test_selection_looks_at_acc_and_at_the_score_where_there_is_none(score, extra, scored):
    assert read_score(score, extra) == scored


@pytest.mark.parametrize("score", [None, math.nan, math.inf, "1"])
def test_what_is_no_finite_number_is_unscored_as_score_and_as_acc(score):
    assert isinstance(read_score(score, {}), Unscored)
    if score is not None:
        assert isinstance(read_score(1.0, {"acc": score}), Unscored)


def test_what_our_own_reward_could_not_score_is_unscored_for_its_reason():
    def raises(**given):
        raise OSError("the judge is away")

    answer = frameworks.Reward(InlineScorer(raises))(data_source="", solution_str="", ground_truth="")
    assert answer["score"] == 0.0
    assert read_score(answer["score"], answer) == Unscored("OSError: the judge is away")


def test_selection_may_look_at_another_field_which_must_be_there():
    """verl's reward may return several; the released Pilot-Commit calls the choice `agg_metric`."""
    assert read_score(1.0, {"acc": 0.0, "half": 0.5}, "half") == Scored(1.0, 0.5)
    missing = read_score(1.0, {"acc": 0.0}, "half")
    assert missing == Unscored("trainer.v1.rollalloc.metric=half, but the reward function returned acc")


def test_verl_computes_mean_best_and_majority_of_a_questions_samples():
    """Of a validation file with the column `__rollout_n__`: a row's samples have one uid, and the reward's `pred` votes."""
    metrics = pytest.importorskip("verl.trainer.ppo.metric_utils", reason="verl's environment: make verl-test")
    reward = frameworks.Reward(InlineScorer(exact), answer=boxed)
    texts = ["\\boxed{7}", "\\boxed{3}", "\\boxed{7}", "cut off in \\boxed{7"]
    given = [reward(data_source="aime", solution_str=text, ground_truth="7", extra_info={}) for text in texts]
    infos = {name: [each[name] for each in given] for name in given[0]}
    of_acc = metrics.process_validation_metrics(["aime"] * 4, ["question 1"] * 4, infos)["aime"]["acc"]
    assert of_acc["mean@4"] == 0.5
    assert 0.5 < of_acc["maj@4/mean"] < of_acc["best@4/mean"] <= 1
