"""Comparisons: several runs in processes, their results, and that nothing finished is done again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from rollalloc.bench.compare import compare, is_finished, latest, result_of
from rollalloc.bench.cost import read_metrics

DOCUMENTED = {
    *("recipe", "seed", "reached", "rollouts_to_target", "rollouts_paid", "accounts", "tokens_paid", "seconds"),
    *("optimizer_steps_per_batch", "learning_rate"),
}
PILOT_COMMIT = {"groups": 2, "n_pilot": 2, "n_commit": 2, "gen_groups": 6}


def test_runs_in_processes_and_what_they_paid(run_of, task, tmp_path):
    shutil.copytree(task.model, tmp_path / "model")
    model, out = str(tmp_path / "model"), tmp_path / "out"
    runs = [
        run_of(model=model, seed=5, optimizer_steps_per_batch=2, target=1e-9),
        run_of("pilot_commit", PILOT_COMMIT, model=model, label="ours", learning_rate=3e-4),
    ]
    seen = []
    results = compare(runs, out, processes=2, watcher=seen.append)
    assert json.loads((out / "results.json").read_text()) == results
    for run, result in zip(runs, results, strict=True):
        assert set(result) >= DOCUMENTED
        assert (result["recipe"], result["seed"]) == (run.name, run.settings.seed)
        assert sum(result["accounts"].values()) == result["rollouts_paid"] <= 96
        assert result["accounts"]["open"] == 0
        assert result["optimizer_steps_per_batch"] == run.settings.optimizer_steps_per_batch
        assert result["learning_rate"] == run.settings.learning_rate
        assert result["seconds"] > 0
        assert result["tokens_paid"] >= result["rollouts_paid"]
    # A target that holds from the start is confirmed by the next evaluation; one that is never reached costs nothing.
    assert (results[0]["reached"], results[0]["rollouts_to_target"], results[0]["rollouts_paid"]) == (True, 0, 32)
    assert (results[1]["reached"], results[1]["rollouts_to_target"]) == (False, None)
    assert all(line is not None and line["kind"] == "end" for _, line in seen[-1])

    # Again: nothing is repeated, although it could not be, the model being gone.
    shutil.rmtree(tmp_path / "model")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "results.json"}
    (out / "results.json").unlink()
    assert compare(runs, out) == results
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert json.loads((out / "results.json").read_text()) == results

    # A run of which only part is there, or another run, is not taken for finished.
    folder = out / "ours-0"
    assert is_finished(runs[1], folder)
    assert not is_finished(replace(runs[1], max_rollouts=95), folder)
    assert not is_finished(replace(runs[1], settings=replace(runs[1].settings, learning_rate=1e-9)), folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    assert not is_finished(runs[1], folder)
    assert latest(folder) == json.loads(lines[-2])


def test_a_failing_run_is_named_and_the_others_finish(run_of, tmp_path):
    runs = [run_of(max_rollouts=32), run_of("gropo", label="typo", seed=3), run_of(max_rollouts=32, seed=1)]
    with pytest.raises(RuntimeError, match=r"typo with seed 3 failed: ValueError: unknown recipe 'gropo'") as caught:
        compare(runs, tmp_path, processes=1)
    assert "grpo with seed" not in str(caught.value)
    for name in ("grpo-0", "grpo-1"):
        assert read_metrics(tmp_path / name / "metrics.jsonl")[-1]["kind"] == "end"
    assert not (tmp_path / "results.json").exists()


def test_two_runs_of_one_name_and_seed_are_refused(run_of, tmp_path):
    with pytest.raises(ValueError, match="a name and seed of its own"):
        compare([run_of(seed=1), run_of(seed=1, learning_rate=3e-4)], tmp_path)
    with pytest.raises(ValueError, match="a name and seed of its own"):
        compare([run_of("dapo", label="grpo"), run_of("grpo")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_result_of_a_run_by_hand(run_of):
    def line(kind, paid, accuracy=None):
        values = {"kind": kind, "rollouts_paid": paid, "tokens_paid": 3 * paid, "seconds": paid / 10}
        return values | {"accounts": {"trained": paid}, "accuracy": accuracy, "why": "because"}

    curve = [(0, 0.2), (100, 0.4), (200, 0.8), (300, 0.9)]
    metrics = [*(line("eval", paid, accuracy) for paid, accuracy in curve), line("end", 310)]
    result = result_of(run_of(target=0.5, seed=4), metrics)
    assert result == {
        "recipe": "grpo",
        "seed": 4,
        "reached": True,
        "rollouts_to_target": 125,
        "rollouts_paid": 310,
        "accounts": {"trained": 310},
        "tokens_paid": 930,
        "seconds": 31.0,
        "optimizer_steps_per_batch": 1,
        "learning_rate": 1e-4,
        "parameters": {"groups": 4, "n": 4},
        "target": 0.5,
        "accuracy": 0.9,
        "why": "because",
    }
    untargeted = result_of(run_of(target=None), [line("end", 310)])
    assert (untargeted["reached"], untargeted["rollouts_to_target"], untargeted["accuracy"]) == (False, None, None)


def test_a_run_whose_process_dies_costs_no_other_run(run_of, tmp_path):
    deadly = tmp_path / "deadly.py"
    deadly.write_text(
        "import os\n\ndef score(data_source, solution_str, ground_truth, extra_info=None):\n    os._exit(7)\n"
    )
    runs = [
        run_of(max_rollouts=32, label="dies", reward=f"{deadly}:score"),
        run_of(max_rollouts=32, seed=1),
        run_of(max_rollouts=32, seed=2),
    ]
    with pytest.raises(RuntimeError) as caught:
        compare(runs, tmp_path / "out", processes=1)
    assert str(caught.value) == "dies with seed 0 failed: its process died with exit code 7"
    for name in ("grpo-1", "grpo-2"):
        assert read_metrics(tmp_path / "out" / name / "metrics.jsonl")[-1]["kind"] == "end"
