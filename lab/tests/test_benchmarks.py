"""Every benchmark runs at its smallest shape, and what an experiment imports is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from forks import script
from test_tools import module_at

ROOT = Path(__file__).parents[1]
BENCHMARKS, EXPERIMENTS = ROOT / "benchmarks", ROOT / "experiments"
OTHERS = (
    "predictor.py ask",
    "predictor.py drift",
    "predictor.py selection",
    "rewards.py forks",
    "rewards.py hostile_functions",
    "rewards.py raises",
)
NOT_RUN = {  # with the reason
    "against_trl.py": "its smallest run trains for minutes",
    "hostile_functions.py": "functions, which rewards.py calls",
    "trl_driver.py learning": "trains twelve runs to a target",
}


@pytest.fixture(scope="module")
def bars() -> ModuleType:
    return module_at(BENCHMARKS / "bars.py")


def commands() -> tuple[str, ...]:
    """The commands of `make bench`."""
    return module_at(BENCHMARKS / "every.py").COMMANDS


@pytest.mark.e2e
@pytest.mark.parametrize("command", [*commands(), *OTHERS])
def test_a_benchmark_runs_at_its_smallest_shape(command: str, tmp_path: Path) -> None:
    program, *words = command.split()
    code = script(BENCHMARKS / program, *words, "--smallest", said=tmp_path / "said")
    said = (tmp_path / "said").read_text("utf-8")
    assert code == 0, said
    assert "MISSED" not in said
    assert command in OTHERS or "bar: at" in said


def test_logs_of_a_few_rollouts_are_read_and_profiled() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "reading.py", "64"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall("64 rollouts: read in", done.stdout)) == 3


def test_every_spelling_and_every_near_miss_of_a_ground_truth_is_scored(tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text('["3", "7"]')
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "crossmatch.py", tmp_path / "two.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| two | 2 |" in done.stdout


def test_no_benchmark_is_left_out() -> None:
    run = {command.split()[0] for command in (*commands(), *OTHERS)} | {
        "reading.py",
        "crossmatch.py",
        "every.py",
        "bars.py",
        "small.py",
    }
    assert {file.name for file in BENCHMARKS.glob("*.py")} == run | {each for each in NOT_RUN if " " not in each}


@pytest.mark.e2e
def test_what_experiments_import_is_there(tmp_path: Path) -> None:
    names = sorted(file.stem for file in EXPERIMENTS.glob("*.py"))
    program = tmp_path / "program.py"
    program.write_text(
        f"import importlib, sys; sys.path.insert(0, {str(EXPERIMENTS)!r})\n"
        f"for name in {names}: importlib.import_module(name)"
    )
    assert script(program, said=tmp_path / "said") == 0, (tmp_path / "said").read_text("utf-8")
    assert len(names) > 20


@pytest.mark.parametrize(("how", "figure"), [("at_most", 2.1), ("at_least", 1.9)])
def test_a_bar_that_is_missed_ends_a_benchmark_with_its_name(bars: ModuleType, how: str, figure: float) -> None:
    held = bars.Bars()
    assert getattr(held, how)("sampling", 2.0, 2.0) == f"bar: {how.replace('_', ' ')} 2"
    held.end()
    assert getattr(held, how)("sampling", figure, 2.0).endswith("MISSED")
    with pytest.raises(SystemExit, match=rf"missed: sampling: {figure}, not {how.replace('_', ' ')} 2"):
        held.end()


def test_the_smallest_shape_is_held_against_no_bar(bars: ModuleType) -> None:
    held = bars.Bars(judged=False)
    held.at_most("sampling", 3.0, 2.0)
    held.end()


@pytest.mark.e2e
def test_a_command_against_trl_that_can_do_nothing_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An arm that is misspelt would otherwise end as a command of which every run is over."""
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(BENCHMARKS)
    against = module_at(BENCHMARKS / "against_trl.py")
    one = against.chosen_keys("falls", tmp_path, "0.15m", "foresight-again")
    assert {(key.arm, key.rate) for key in one} == {("foresight-again", 6e-4)}
    with pytest.raises(ValueError, match=r"falls at 0\.15m has no arm 'foresihgt'; it has foresight, foresight-again"):
        against.chosen_keys("falls", tmp_path, "0.15m", "foresight,foresihgt")
    with pytest.raises(ValueError, match=r"lacks runs of stock-4 at 8m-u; first: .* tune 8m-u"):
        against.chosen_keys("final", tmp_path, "8m-u", "")
    for size in ("8m", "8m-u"):
        with pytest.raises(ValueError, match=f"no final run of a U-shaped pool at {size}"):
            against.pairs(tmp_path, size)


@pytest.mark.e2e
def test_the_picture_against_trl_leaves_out_arms_of_which_a_run_missed_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(BENCHMARKS)
    against = module_at(BENCHMARKS / "against_trl.py")
    found = json.loads((ROOT / "docs" / "against_trl.json").read_text("utf-8"))["8m"]
    assert [arm["arm"] for _, _, arm in against.drawn(found)] == ["stock-4", "line", "foresight"]
    found["arms"][0]["costs"]["rollouts"][3][1] = True
    assert [arm["arm"] for _, _, arm in against.drawn(found)] == ["stock-4", "line"]
