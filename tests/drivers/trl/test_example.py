"""The example runs, in a short form."""

from pathlib import Path

import pytest

from forks import script

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_pilot_commit.py"


def test_the_example_trains_and_says_where_rollouts_went(tmp_path):
    code = script(EXAMPLE, "--steps", 2, "--taught", 100, said=tmp_path / "said")
    said = (tmp_path / "said").read_text("utf-8")
    assert code == 0, said[-2000:]
    assert "right on held-out sums: 0." in said
    assert "'out_of_band'" in said
