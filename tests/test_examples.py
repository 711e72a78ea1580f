"""The examples run, and what the README shows of them is what they are."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollalloc.core.events import Batch, Order

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


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


@pytest.mark.parametrize(("reached", "code"), [(0.95, 0), (0.4, 1)])
def test_what_a_run_with_verl_paid_is_shown(tmp_path: Path, reached: float, code: int) -> None:
    figures = {"rollalloc/driver_seconds": 0.1, "timing_s/step": 10.0, "rollalloc/rollouts/trained": 64}
    steps = [{"step": 0, "data": {"val/score": 0.1}}]
    for step, score in enumerate([0.2, reached], start=1):
        steps.append({"step": step, "data": figures | {"critic/score/mean": score, "rollalloc/rollouts/stale": 0}})
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
    """Named where a test starts it or imports it; those of verl are run where verl is, `make verl-test`."""
    tests = "\n".join(test.read_text("utf-8") for test in sorted((ROOT / "tests").rglob("*.py")))
    for example in sorted((ROOT / "examples").rglob("*.*")):
        if example.suffix in (".py", ".sh"):
            named = (f'"{example.name}"', f'"{example.stem}:', f"from {example.stem} import")
            assert any(name in tests for name in named), f"no test runs {example.relative_to(ROOT)}"


def test_the_new_judge_keeps_the_laws() -> None:
    assert "keeps every law" in run("new_judge.py")


def shown(heading: str) -> str:
    """The Python that the README shows under that heading."""
    (code,) = re.findall(rf"^## {heading}\n(?:(?!^## ).)*?```python\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    return code


def class_of(code: str) -> str:
    """The one class of a file, without its docstring."""
    (found,) = [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]
    if ast.get_docstring(found):
        del found.body[0]
    return ast.unparse(found)


def test_the_readme_shows_the_judge_of_the_example() -> None:
    exec(compile(shown("Add a rule"), "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    assert class_of(shown("Add a rule")) == class_of((ROOT / "examples" / "new_judge.py").read_text("utf-8"))


def test_the_loop_of_the_readme_trains_until_no_prompt_has_variance_left() -> None:
    """Each prompt is right half of the time until it was trained on twice; then it is solved."""
    visits: Counter[int] = Counter()

    def train(batch: Batch) -> None:
        visits.update({row.prompt for row in batch.rows})

    def generate_and_score(order: Order) -> list[tuple[float, float, int]]:
        results = [1.0 if visits[order.prompt] > 1 else float(rollout % 2) for rollout in order.rollouts]
        return [(won, won, 7) for won in results]

    names: dict[str, Any] = {"train": train, "generate_and_score": generate_and_score}
    code = shown("In a loop of your own")
    assert "prompts=8192" in code
    exec(code.replace("prompts=8192", "prompts=300"), names)
    accounts = names["allocator"].accounts()
    assert sum(visits.values()) == accounts["trained"] / 16 == 600
    assert accounts["open"] == 0
    forgetful: dict[str, Any] = names | {"generate_and_score": lambda order: generate_and_score(order)[:-1]}
    with pytest.raises(ValueError, match="shorter"):  # rather than ask for ever
        exec(code, forgetful)
