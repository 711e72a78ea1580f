"""Tests that metrics, terminal, page and comparison agree about a run, however it ended."""

from __future__ import annotations

import json

import pytest

from rollalloc.compare.summary import ended
from rollalloc.report.page import sections
from rollalloc.runs.discovery import comparisons
from rollalloc.runs.reader import read_run
from rollalloc.train.config import read_config

REWARD = """
import os, signal

def score(data_source, solution_str, ground_truth, extra_info):
    if os.path.exists("stop"):
        os.remove("stop")
        os.kill(os.getpid(), signal.SIGTERM)
    return float(len(solution_str) % 3 == 0)

def shaped(data_source, solution_str, ground_truth, extra_info):
    return 5.0

def away(data_source, solution_str, ground_truth, extra_info):
    return None
"""
TRAIN = ("train", "--model", "model", "--prompts", "prompts.parquet", "--heldout", "heldout.jsonl")
TRAIN = (*TRAIN, "--max-new-tokens", 4, "--device", "cpu", "--reward-workers", 0, "--learning-rate", 0.001)
TRAIN = (*TRAIN, "--recipe", "grpo", "--set", "groups=4", "--set", "n=4")
RUNS = {  # case → what is given, the exit code, the state
    "below the grid": (("--max-rollouts", 40, "--eval-every", 1000), 0, "finished"),
    "above the grid": (("--max-rollouts", 40, "--eval-every", 16), 0, "finished"),
    "reached": (("--max-rollouts", 96, "--eval-every", 16, "--target", 1e-9), 0, "target reached"),
    "missed": (("--max-rollouts", 40, "--eval-every", 1000, "--target", 1), 0, "finished"),
    "stopped": (("--max-rollouts", 96, "--eval-every", 16), 143, "not ended"),
    "resumed": (("--max-rollouts", 40, "--eval-every", 1000), 0, "finished"),
    "failed": (("--max-rollouts", 40, "--reward", "agreeing.py:shaped", "--target", 1), 2, "failed"),
    "without scores": (("--max-rollouts", 400, "--eval-every", 1000, "--reward", "agreeing.py:away"), 2, "failed"),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("case", RUNS)
def test_report_table_and_log_of_a_run_agree(call, own, tmp_path, case):
    given, expected, state = RUNS[case]
    (own / "agreeing.py").write_text(REWARD)
    folder = tmp_path / "runs" / "mine"
    command = (*TRAIN, "--reward", "agreeing.py:score", *given, "--out", folder)
    if case in ("stopped", "resumed"):
        (own / "stop").touch()
    code, output = call(*command)
    if case == "resumed":
        assert code == 143, output
        code, output = call(*command, "--resume")
    assert code == expected, output

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["accuracy"] for line in lines if line["kind"] == "eval" and line["accuracy"] is not None]
    paid = next(line["rollouts_paid"] for line in reversed(lines) if line["kind"] != "eval")
    run = read_run(folder)
    assert (run.paid, run.problem) == (paid, None)
    assert run.reached == (case == "reached")
    assert (run.curve.accuracy[:1], run.curve.accuracy[-1:]) == (tuple(accuracy[:1]), tuple(accuracy[-1:]))
    assert len(run.curve.accuracy) > 1 or not accuracy or case == "stopped"  # else a figure of them is a dot
    assert (run.ended, run.failed) == (state in ("finished", "target reached"), state == "failed")

    terminal = output
    [page] = sections(comparisons(folder), folder)
    story = "".join(f"{finding.lead}{finding.rest}" for finding in page.findings)
    assert f"{paid:,} rollouts" in story or not paid
    if accuracy:
        assert f"{accuracy[-1]:.3f} (± " in terminal
        assert f" {accuracy[-1]:.3f}" in story
    if len(accuracy) > 1:
        assert f"held-out {accuracy[0]:.3f} → {accuracy[-1]:.3f}" in terminal
        assert f"from {accuracy[0]:.3f} to {accuracy[-1]:.3f}" in story
    if code == 0:
        assert f"│ all │ {paid:,} │" in terminal
        over = ended(read_config(folder), folder)
        assert (over.last["accuracy"], over.end["rollouts_paid"]) == (accuracy[-1], paid)
        assert (over.cost is not None and not over.cost.censored) == run.reached
    if state == "failed":
        assert run.why in " ".join(page.caveats)
        assert "failed" in " ".join(page.caveats)
