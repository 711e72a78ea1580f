"""The reward of the paper's runs, as verl calls it."""

import importlib.util
from pathlib import Path

import pytest

from rollalloc.drivers.verl.scores import read_score
from rollalloc.rewards.function import Scored, Unscored

pytest.importorskip("math_verify")

FILE = Path(__file__).parents[3] / "recipes" / "verl" / "math_reward.py"


@pytest.fixture(scope="module")
def reward():
    spec = importlib.util.spec_from_file_location("paper_reward", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.reward
    module.reward.scorer.close()


@pytest.mark.parametrize(("answer", "scored"), [("1/2", Scored(1.0, 1.0)), ("3", Scored(-1.0, 0.0))])
def test_right_is_plus_one_wrong_minus_one_and_selection_sees_a_success_rate(reward, answer, scored):
    given = reward(data_source="polaris", solution_str=f"so \\boxed{{{answer}}}", ground_truth="0.5", extra_info={})
    assert read_score(given["score"], given) == scored


def test_a_ground_truth_that_is_none_is_unscored(reward):
    given = reward(data_source="polaris", solution_str="\\boxed{1}", ground_truth="", extra_info={})
    assert isinstance(read_score(given["score"], given), Unscored)
