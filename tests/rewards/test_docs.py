"""Tests that the examples of the rewards' guide do what it says."""

import subprocess
import sys

import pytest

from rollalloc.rewards.function import Sample, Scored, load_reward, score_sample


@pytest.fixture(autouse=True)
def examples(files_of):
    """The page's Python files, in the working directory."""
    files_of("docs/rewards.md")


def test_the_guides_scoring_from_python_runs():
    finished = subprocess.run([sys.executable, "score.py"], capture_output=True, text=True, timeout=120)
    assert "[Scored(reward=1.0, metric=1.0), Scored(reward=-0.5, metric=0.0)]" in finished.stdout, finished.stderr
    assert "'scored': 2" in finished.stdout


@pytest.mark.parametrize(
    ("path", "completion", "ground_truth"),
    [
        ("choices.py:choice", "the answer is (B)", "B"),
        ("choices.py:roughly", "#### 99.5", "100"),
        ("choices.py:patient", r"\boxed{\frac12}", "0.5"),
        ("my_rewards.py:reward", r"\boxed{2^2}", "4"),
    ],
)
def test_the_guides_own_rewards_run(path, completion, ground_truth):
    pytest.importorskip("math_verify")
    sample = Sample("docs", completion, ground_truth, {})
    assert score_sample(load_reward(path), sample) == Scored(1.0, 1.0)
