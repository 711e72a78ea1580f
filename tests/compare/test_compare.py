"""Comparisons: several runs in processes, their results, and that nothing finished is done again."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rollalloc.compare.compare import check_places, compare, is_finished, result_of, standing
from rollalloc.files.claims import InUse, Lock, claim_files
from rollalloc.models.checkpoint import newest
from rollalloc.processes.stopping import Stopped
from rollalloc.runs.reader import newest_line, read_metrics
from rollalloc.runs.recorded import share_done
from rollalloc.train.store import RunFolder
from rollalloc.train.train import train
from tiny_policy import killed_after, untimed

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
        assert (result["recipe"], result["seed"]) == (run.name, run.seed)
        assert sum(result["accounts"].values()) == result["rollouts_paid"] <= 96
        assert result["accounts"]["open"] == 0
        assert result["optimizer_steps_per_batch"] == run.optimizer_steps_per_batch
        assert result["learning_rate"] == run.learning_rate
        assert result["seconds"] > 0
        assert result["tokens_paid"] >= result["rollouts_paid"]
    # A target that holds from the start is confirmed at the next grid point, when a batch has gone beyond it.
    assert (results[0]["reached"], results[0]["rollouts_to_target"], results[0]["rollouts_paid"]) == (True, 0, 48)
    assert (results[1]["reached"], results[1]["rollouts_to_target"]) == (False, None)
    assert [run for run, _ in seen[-1]] == runs
    for _, end in seen[-1]:
        assert end.ended
        assert share_done(end) == 1
        assert end.curve.accuracy
        assert sum(end.accounts.values()) == end.paid > 0

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
    assert not is_finished(replace(runs[1], learning_rate=1e-9), folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    assert not is_finished(runs[1], folder)
    assert newest_line(folder) == json.loads(lines[-2])


@pytest.mark.usefixtures("forked_runs")
def test_a_failing_run_is_named_and_the_others_finish(run_of, tmp_path):
    runs = [run_of(max_rollouts=32), run_of("gropo", label="typo", seed=3), run_of(max_rollouts=32, seed=1)]
    with pytest.raises(RuntimeError, match=r"typo with seed 3 failed: unknown recipe 'gropo'") as caught:
        compare(runs, tmp_path, processes=1)
    assert "grpo with seed" not in str(caught.value)
    for name in ("grpo-0", "grpo-1"):
        assert read_metrics(tmp_path / name / "metrics.jsonl")[-1]["kind"] == "end"
    assert [result["seed"] for result in json.loads((tmp_path / "results.json").read_text())] == [0, 1]


@pytest.mark.usefixtures("forked_runs")
def test_warnings_of_the_processes_are_logged_here_once_for_each_recipe(run_of, tmp_path, caplog):
    reward = "rollalloc.rewards.math:compute_score"  # gives 0 for every answer of this task
    wrong = {"reward": reward, "heldout": None, "single_answer": False, "target": None, "max_rollouts": 96}
    compare([run_of(seed=seed, label=label, **wrong) for label in ("a", "b") for seed in (0, 1)], tmp_path, processes=1)
    warnings = [text for text in caplog.messages if "check the reward function" in text]
    assert [text.split(":")[0] for text in warnings] == ["a with seed 0", "b with seed 0"]


def test_two_runs_of_one_name_and_seed_are_refused(run_of, tmp_path):
    with pytest.raises(ValueError, match="a name and seed of its own"):
        compare([run_of(seed=1), run_of(seed=1, learning_rate=3e-4)], tmp_path)
    with pytest.raises(ValueError, match="a name and seed of its own"):
        compare([run_of("dapo", label="grpo"), run_of("grpo")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_result_of_a_run_by_hand(run_of):
    def line(kind, paid, accuracy=None):
        values = {"kind": kind, "rollouts_paid": paid, "tokens_paid": 3 * paid, "seconds": paid / 10, "version": paid}
        values |= {"at": paid, "optimizer_steps": paid // 50, "standard_error": 0.01}
        return values | {"accounts": {"trained": paid}, "accuracy": accuracy, "why": "because"}

    curve = [(0, 0.2), (100, 0.4), (200, 0.8), (300, 0.9)]
    metrics = [*(line("eval", paid, accuracy) for paid, accuracy in curve), line("end", 310)]
    result = result_of(run_of(target=0.5, seed=4), metrics)
    assert result == {
        "task": "",
        "recipe": "grpo",
        "seed": 4,
        "reached": True,
        "rollouts_to_target": 125,
        "tokens_to_target": 375,
        "seconds_to_target": 12.5,
        "steps_to_target": 2.5,
        "rollouts_paid": 310,
        "accounts": {"trained": 310},
        "tokens_paid": 930,
        "seconds": 31.0,
        "optimizer_steps_per_batch": 1,
        "learning_rate": 1e-4,
        "parameters": {"groups": 4, "n": 4},
        "target": 0.5,
        "accuracy": 0.9,
        "breadth": None,
        "standard_error": 0.01,
        "why": "because",
    }
    untargeted = result_of(run_of(target=None), [line("end", 310)])
    assert (untargeted["reached"], untargeted["rollouts_to_target"], untargeted["accuracy"]) == (False, None, None)


@pytest.mark.usefixtures("forked_runs")
def test_a_run_whose_process_dies_costs_no_other_run(run_of, tmp_path):
    """Not even where what it forked lives on, and holds its end of the pipe open."""
    deadly, child = tmp_path / "deadly.py", tmp_path / "child"
    deadly.write_text(
        "import os, pathlib, time\n\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if (child := os.fork()) == 0:\n"
        "        time.sleep(1000)\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(child))\n"
        "    os._exit(7)\n"
    )
    runs = [
        run_of(max_rollouts=32, label="dies", reward=f"{deadly}:score"),
        run_of(max_rollouts=32, seed=1),
        run_of(max_rollouts=32, seed=2),
    ]
    try:
        with pytest.raises(RuntimeError) as caught:
            compare(runs, tmp_path / "out", processes=1)
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)
    assert str(caught.value) == "dies with seed 0 failed: its process died with exit code 7"
    for name in ("grpo-1", "grpo-2"):
        assert read_metrics(tmp_path / "out" / name / "metrics.jsonl")[-1]["kind"] == "end"


@pytest.mark.usefixtures("forked_runs")
def test_a_run_that_was_begun_goes_on_from_its_checkpoint(run_of, tmp_path):
    """What was trained before is not done again: the metrics up to the checkpoint stay as they are, times included."""
    run = run_of(seed=3, checkpoint_every=2)
    place = tmp_path / "grpo-3"
    with pytest.raises(KeyboardInterrupt):
        train(run, place, killed_after(5))
    before = (place / "metrics.jsonl").read_text().splitlines()
    compare([run], tmp_path)
    after = (place / "metrics.jsonl").read_text().splitlines()
    upto = next(number for number, line in enumerate(before) if '"batch": 4' in line)
    assert after[: upto + 1] == before[: upto + 1]
    assert json.loads(after[-1])["kind"] == "end"
    train(run, tmp_path / "unbroken")
    assert untimed(tmp_path / "unbroken") == untimed(place)


@pytest.mark.usefixtures("forked_runs")
def test_what_was_begun_as_another_run_is_refused_or_overwritten(run_of, tmp_path):
    run = run_of(seed=3, checkpoint_every=1)
    other = replace(run, max_rollouts=32)
    train(other, tmp_path / "grpo-3")
    assert standing(other, tmp_path / "grpo-3").ended
    assert not standing(run, tmp_path / "grpo-3").metrics
    with pytest.raises(FileExistsError, match=r"grpo-3 holds a run that has ended; its settings .*--overwrite"):
        compare([run, run_of(seed=4)], tmp_path)
    assert standing(other, tmp_path / "grpo-3").ended
    assert not (tmp_path / "grpo-4").exists()  # it is said before any run begins
    [result] = compare([run], tmp_path, overwrite=True)
    assert result["rollouts_paid"] == 96


def test_a_comparison_stands_beside_runs_of_train_and_their_report_but_not_beside_anything_else(run_of, tmp_path):
    """Runs that `train` wrote, by themselves or by task, and a report's page do not make the folder somebody else's."""
    for place in (tmp_path / "grpo-3", tmp_path / "sum" / "grpo-4"):
        with RunFolder(place) as folder:
            folder.begin()
    claim_files([tmp_path / "report.html"])
    (tmp_path / "report.html").write_text("<p>")
    check_places([run_of()], tmp_path)
    (tmp_path / "sum" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds sum, which was not written by rollalloc"):
        check_places([run_of()], tmp_path)
    (tmp_path / "sum" / "thesis.txt").rename(tmp_path / "thesis.txt")
    with pytest.raises(FileExistsError, match=r"holds thesis\.txt, which"):
        compare([run_of()], tmp_path)
    (tmp_path / "thesis.txt").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "grpo-3")
    with pytest.raises(FileExistsError, match="holds elsewhere, empty, which"):
        compare([run_of()], tmp_path)


def test_a_second_comparison_in_a_folder_is_refused(run_of, tmp_path, monkeypatch):
    monkeypatch.setattr("rollalloc.files.claims.PATIENCE_S", 0.2)
    with Lock(tmp_path, "comparison"), pytest.raises(InUse, match=f"in use by process {os.getpid()}"):
        compare([run_of()], tmp_path)


def test_a_comparison_that_is_asked_to_stop_saves_its_runs(run_of, tmp_path):
    """Then the same call goes on with what was begun, and the metrics are those of runs that were never stopped."""
    run = run_of(max_rollouts=2000, target=None)
    asked = []

    def watch(standings):
        if not asked and standings[0][1].paid:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(Stopped, match="stopped by SIGTERM with 2 of 2 runs to go") as caught:
        compare([run, replace(run, label="later")], tmp_path, processes=1, watcher=watch)
    assert caught.value.by == signal.SIGTERM
    assert newest(tmp_path / "grpo-0") is not None
    assert not (tmp_path / "later-0").exists()


def test_a_finished_run_on_files_that_have_changed_since_is_done_again(run_of, task, tmp_path):
    files = {name: tmp_path / name for name in ("train.parquet", "heldout.parquet", "reward.py")}
    shutil.copytree(task.model, tmp_path / "model")
    shutil.copy(task.train, files["train.parquet"])
    shutil.copy(task.heldout, files["heldout.parquet"])
    files["reward.py"].write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n"
    )
    run = run_of(
        max_rollouts=16,
        model=str(tmp_path / "model"),
        prompts=(str(files["train.parquet"]),),
        heldout=str(files["heldout.parquet"]),
        reward=f"{files['reward.py']}:score",
    )
    place = tmp_path / "run"
    train(run, place)
    assert is_finished(run, place)
    for path in (*files.values(), tmp_path / "model" / "config.json"):
        original = path.read_bytes()
        path.write_bytes(original + b"\n")
        assert not is_finished(run, place), path
        path.write_bytes(original)
        assert is_finished(run, place), path


def test_a_comparison_that_is_killed_leaves_no_run_behind(run_of, tmp_path):
    """The reward names its process and then waits for ever."""
    reward = tmp_path / "slow.py"
    reward.write_text(
        "import os, pathlib, time\n\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()) + chr(10))\n"
        "    time.sleep(1000)\n"
    )
    context = multiprocessing.get_context("spawn")
    comparison = context.Process(target=compare, args=([run_of(reward=f"{reward}:score")], tmp_path / "out"))
    comparison.start()
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
        assert comparison.is_alive()
        time.sleep(0.05)
    comparison.kill()
    comparison.join()
    run = Path("/proc") / pid / "stat"
    for _ in range(200):
        if not run.exists() or ") Z" in run.read_text():
            return
        time.sleep(0.05)
    os.kill(int(pid), signal.SIGKILL)
    raise AssertionError("the run goes on")


def test_ctrl_c_while_tasks_are_made_leaves_at_once_and_says_so(rollalloc, interrupted_tasks, tmp_path):
    out = ("--out", tmp_path / "out", "--tasks", tmp_path / "tasks")
    code, _, error = rollalloc("compare", "--task", "sort", "--recipes", "grpo", *out, "--processes", 1)
    assert code == 130, error
    assert "stopped; run the same command again to continue" in " ".join(error.split())
