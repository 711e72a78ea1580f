"""The examples run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forks import script

ROOT = Path(__file__).parents[1]


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments], capture_output=True, text=True, check=False
    )
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


@pytest.mark.parametrize(("reached", "code"), [(0.95, 0), (0.4, 1)])
def test_what_a_run_with_verl_paid_is_shown(tmp_path: Path, reached: float, code: int) -> None:
    figures = {"rollalloc/driver_seconds": 0.1, "timing_s/step": 10.0, "rollalloc/accounts/trained": 64}
    steps = [{"step": 0, "data": {"val/score": 0.1}}]
    for step, score in enumerate([0.2, reached], start=1):
        steps.append({"step": step, "data": figures | {"critic/score/mean": score, "rollalloc/accounts/stale": 0}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    show = [sys.executable, ROOT / "examples" / "verl" / "show.py", tmp_path]
    done = subprocess.run(show, capture_output=True, text=True, check=False)
    assert done.returncode == code
    head, first, last, work = done.stdout.splitlines()
    assert head.split() == ["step", "reward", "trained"]
    assert first.split() == ["1", "0.200", "64"]
    assert last.split() == ["2", f"{reached:.3f}", "64"]
    assert "1.0% of the steps' time" in work
    assert (f"the mean reward is {reached:.3f} at the end" in done.stderr) == bool(code)


def test_every_example_is_run_by_a_test() -> None:
    """Named where a test starts it or imports it, or by cpu.sh; those of verl are run where verl is, `make verl-test`."""
    starting = [*sorted((ROOT / "tests").rglob("*.py")), ROOT / "examples" / "verl" / "cpu.sh"]
    tests = "\n".join(path.read_text("utf-8") for path in starting)
    for example in sorted((ROOT / "examples").rglob("*.*")):
        if example.suffix in (".py", ".sh"):
            named = (f'"{example.name}"', f'"{example.stem}:', f"from {example.stem} import", f"={example.stem}")
            assert any(name in tests for name in named), f"no test runs {example.relative_to(ROOT)}"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("taught", "steps", "learns"), [(40, 1, False), pytest.param(1500, 16, True, marks=pytest.mark.slow)]
)
def test_a_model_trains_with_a_tool_under_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taught: int, steps: int, learns: bool
) -> None:
    """The commands of docs/agents.md, with a function as the tool and with an environment.

    CI trains for a step. That a model learns to call its tool takes minutes, of which most make the model that calls it in a
    third of its rollouts.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    examples, said = ROOT / "examples", tmp_path / "said"
    assert script(examples / "multiplying.py", tmp_path, taught, said=said) == 0, said.read_text("utf-8")
    for how in ([], ["--environment"]):
        code = script(examples / "trl_tools.py", tmp_path, "--steps", steps, *how, said=said)
        assert code == 0, said.read_text("utf-8")
        (line,) = re.findall("^right on held-out questions: .*", said.read_text("utf-8"), re.MULTILINE)
        before, after = (float(number) for number in re.findall(r"\d\.\d+", line))
        assert after > before + 0.2 or not learns, "256 questions: a standard error of at most .045 of the difference"


def test_the_new_judge_keeps_the_laws() -> None:
    assert "keeps every law" in run("new_judge.py")
