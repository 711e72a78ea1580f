"""A run whose rollouts teach nothing says so, in the log and in its metrics; where notices are off, in neither."""

import json
from dataclasses import replace

import pytest

from rollalloc.core import teaching
from rollalloc.train.execution import execute
from small_run import one_torch_thread, run_of, task

__all__ = ["one_torch_thread", "run_of", "task"]  # fixtures


@pytest.mark.parametrize("notices", [True, False])
def test_it_is_said_once_unless_it_is_turned_off(notices, run_of, tmp_path, monkeypatch, caplog):
    """By a reward that is always 0, in a window of two batches."""
    monkeypatch.setattr(teaching, "WINDOW", 32)
    run = run_of(target=None, reward="rollalloc.rewards.math:compute_score", heldout=None, single_answer=False)
    execute(replace(run, settings=replace(run.settings, notices=notices)), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    batches = [line for line in lines if line["kind"] == "batch"]
    said = [record.message for record in caplog.records if "teach next to nothing" in record.message]
    assert len(batches) == 6
    assert [bool(line["teaching"]) for line in batches] == [notices and at > 0 for at in range(6)]
    assert len(said) == notices
    assert {line["selection"]["difficulty_trained"] for line in batches} == {1}
