"""The documentation's examples do what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollalloc.rewards.function import Sample, Scored, load_reward, score_sample

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


@pytest.fixture(autouse=True)
def examples(tmp_path, monkeypatch):
    """The page's Python files, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        Path(name).write_text(code)


def test_scoring_from_python():
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
def test_rewards_of_one_s_own(path, completion, ground_truth):
    pytest.importorskip("math_verify")
    sample = Sample("docs", completion, ground_truth, {})
    assert score_sample(load_reward(path), sample) == Scored(1.0, 1.0)
