"""The example runs, in a short form."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_pilot_commit.py"


def test_the_example_trains_and_says_where_rollouts_went():
    short = [sys.executable, str(EXAMPLE), "--steps", "2", "--taught", "100"]
    done = subprocess.run(short, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *_, accuracies, accounts = done.stdout.splitlines()
    assert accuracies.startswith("right on held-out sums: 0.")
    assert "'out_of_band'" in accounts
