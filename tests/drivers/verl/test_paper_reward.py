"""The reward of the paper's runs, as verl calls it."""

import pytest

from rollalloc.drivers.verl.scores import read_score
from rollalloc.rewards.function import Scored, Unscored

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def reward():
    from rollalloc.rewards.signed import reward

    yield reward
    reward.scorer.close()


@pytest.mark.parametrize(("answer", "scored"), [("1/2", Scored(1.0, 1.0)), ("3", Scored(-1.0, 0.0))])
def test_rewards_are_plus_and_minus_one_and_the_metric_is_a_success_rate(reward, answer, scored):
    given = reward(data_source="polaris", solution_str=f"so \\boxed{{{answer}}}", ground_truth="0.5", extra_info={})
    assert read_score(given["score"], given) == scored


@pytest.mark.parametrize("text", ["so it is 42", "The answer is 42.", "so 42, that is \\boxed{42", "\\boxed{4", ""])
def test_an_answer_without_a_closed_box_is_wrong(reward, text):
    """Truncated completions included: "\\boxed{4" may have been cut off before 42."""
    given = reward(data_source="polaris", solution_str=text, ground_truth="42", extra_info={})
    assert read_score(given["score"], given) == Scored(-1.0, 0.0)
    assert given["pred"] == ""


def test_majorities_are_counted_over_the_boxed_answers(reward):
    """verl's maj@k takes the most frequent `pred`, and needs one of every sample."""
    texts = [f"I think \\boxed{{ {answer} }}" for answer in ("1/2", "3", "1/2")]
    given = [reward(data_source="a", solution_str=text, ground_truth="0.5", extra_info={}) for text in texts]
    assert [each["pred"] for each in given] == ["1/2", "3", "1/2"]
    assert [each["acc"] for each in given] == [1.0, 0.0, 1.0]


def test_a_ground_truth_that_is_none_is_unscored(reward):
    given = reward(data_source="polaris", solution_str="\\boxed{1}", ground_truth="", extra_info={})
    assert isinstance(read_score(given["score"], given), Unscored)
