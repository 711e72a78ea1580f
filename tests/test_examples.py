"""The examples run, and what the README shows of them is what they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(name: str) -> str:
    done = subprocess.run([sys.executable, ROOT / "examples" / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_synchronous_loop_spends_its_budget_under_each_recipe() -> None:
    lines = run("sync_loop.py").splitlines()
    assert len(lines) == 3
    assert all(sum(eval_counts(line)) <= 20_000 for line in lines)
    assert all(sum(eval_counts(line)) > 19_000 for line in lines)


def eval_counts(line: str) -> list[int]:
    """The numbers of a printed dictionary of counts."""
    return [int(item.rpartition(":")[2]) for item in line.strip("{}").split(",")]


def test_the_asynchronous_loop_stops_rollouts_and_loses_none() -> None:
    output = run("async_loop.py")
    assert "'cancelled'" in output
    assert "'open'" not in output
    assert "budget" in output


def test_the_new_judge_keeps_the_laws() -> None:
    assert "keeps every law" in run("new_judge.py")


@pytest.mark.parametrize("line", ["class SomeOfEach:", "if min(wins, group.metrics_G.size - wins) >= self.least:"])
def test_the_readme_shows_the_judge_of_the_example(line: str) -> None:
    assert line in (ROOT / "README.md").read_text()
    assert line in (ROOT / "examples" / "new_judge.py").read_text()
