"""README: its figures are those of the results files, and it stays a front page."""

import re
from pathlib import Path

import pytest

from test_tools import tool

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def readme():
    return tool("readme")


def test_every_figure_of_the_readme_comes_from_a_results_file(readme):
    assert readme.problems(README) == []


@pytest.mark.parametrize(
    ("changed", "to", "says"),
    [
        ("2.77 [2.64–3.15]", "2.97 [2.64–3.15]", "one line: rollouts: README should say .*2.77"),
        ("with 7 of 8 seeds", "with 8 of 8 seeds", "seeds of number_filtering_misled"),
        ("at none of its four", "at one of its four", "rates that reach the target, 8M"),
        ("Questions were short", "Accuracy rose by 40%", r"'40%.*' comes from no results file"),
    ],
)
def test_a_figure_that_differs_or_comes_from_nowhere_is_refused(readme, changed, to, says):
    assert changed in README
    found = readme.problems(README.replace(changed, to))
    assert any(re.search(says, problem) for problem in found), found


def test_the_front_page_is_short():
    assert len(README.splitlines()) <= 130
