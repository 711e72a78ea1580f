"""PODS's cost, from files as verl's `file` logger writes them."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "recipes" / "verl" / "time_to_peak.py"
METRIC = "val-core/openai/gsm8k/acc/mean@1"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("time_to_peak", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logged(path, step_seconds, accuracies):
    """A validation before training and after each step; the second step writes a checkpoint, which costs nothing here."""
    lines = [{"step": 0, "data": {METRIC: accuracies[0]}}]
    for step, accuracy in enumerate(accuracies[1:], start=1):
        data = {METRIC: accuracy, "timing_s/step": step_seconds, "timing_s/testing": 1000.0}
        if step == 2:
            data |= {"timing_s/step": step_seconds + 50, "timing_s/save_checkpoint": 50.0}
        lines.append({"step": step, "data": data})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_seconds_to_a_share_of_the_baselines_best(tool, tmp_path):
    baseline = logged(tmp_path / "grpo.jsonl", 10.0, [0.1, 0.5, 0.75, 0.8, 0.799, 0.7])
    fast = logged(tmp_path / "pods.jsonl", 4.0, [0.1, 0.6, 0.793, 0.8])
    never = logged(tmp_path / "never.jsonl", 4.0, [0.1, 0.2, 0.7])
    assert [line.partition(": ")[2] for line in tool.table(METRIC, baseline, fast, never)] == [
        "0.7920 after 30 s, the baseline's over it 1.00",
        "0.7920 after 8 s, the baseline's over it 3.75",
        "0.7920 never",
    ]


def test_a_model_that_needs_no_training_and_a_metric_that_is_not_there(tool, tmp_path):
    flat = logged(tmp_path / "flat.jsonl", 10.0, [0.8, 0.7])
    assert [line.partition(": ")[2] for line in tool.table(METRIC, flat)] == ["0.7920 after 0 s"]
    with pytest.raises(ValueError, match="has no accuracy; name a key"):
        list(tool.table("accuracy", flat))
