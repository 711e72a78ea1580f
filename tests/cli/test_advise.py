"""`rollalloc advise` on a model and prompts of one's own: the profile that it samples first."""

import json
import signal

import pyarrow.parquet
import pytest

from rollalloc.data.prompts import load_prompts

REWARD = """
import os, signal

calls = 0

def score(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    if calls > 20 and os.path.exists("kill"):
        os.remove("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(solution_str) % 2)
"""
ADVISE = ("advise", "--model", "model", "--prompts", "prompts.parquet", "--max-new-tokens", 4, "--device", "cpu")
ADVISE = (*ADVISE, "--reward-workers", 0, "--sample-prompts", 16, "--reward", "my_reward.py:score")


@pytest.mark.e2e
def test_a_profile_that_is_killed_goes_on_by_the_same_command_to_the_same_rollouts(own, script, call):
    (own / "killing.py").write_text(REWARD)
    (own / "kill").touch()
    command = (*ADVISE[:-1], "killing.py:score")
    assert script(*command, "--out", "killed").returncode == -signal.SIGKILL
    begun = (own / "killed" / "rollouts.jsonl").read_bytes()
    for folder in ("killed", "unbroken"):
        code, output = call(*command, "--out", folder)
        assert code == 0, output
        assert "64 rollouts of 16 prompts" in output
    whole = (own / "unbroken" / "rollouts.jsonl").read_bytes()
    assert 0 < len(begun) < len(whole)
    assert (own / "killed" / "rollouts.jsonl").read_bytes() == whole


def test_a_model_is_sampled_into_a_folder_named_after_it_and_its_log_can_be_read_again(call, own, tmp_path):
    code, output = call(*ADVISE, "--sample-n", 2, "--out", tmp_path / "new")
    assert code == 0, output
    assert "32 rollouts of 16 prompts" in output
    described = json.loads((tmp_path / "new" / "profile.json").read_text())
    assert (described["prompts"], described["of"], described["n"]) == (16, 24, 2)
    assert "32 rollouts of 16 prompts" in call("advise", tmp_path / "new")[1]


def test_a_profile_whose_rollouts_were_changed_by_hand_is_not_advised_on(call, own, tmp_path):
    assert call(*ADVISE, "--out", tmp_path / "new")[0] == 0
    log = tmp_path / "new" / "rollouts.jsonl"
    whole = log.read_text()
    for changed, said in (
        (whole.replace('"metric": 1.0', '"metric": 0.0'), "the log was modified after sampling"),
        (whole + whole.splitlines()[-1] + "\n", "if lines were added, remove them"),
    ):
        log.write_text(changed)
        for place in (tmp_path / "new", log):
            code, output = call("advise", place)
            assert (code, said in output) == (2, True), output
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "rollouts.jsonl").write_text(changed)  # a log like any other
    assert call("advise", tmp_path / "copy")[0] == 0


def test_a_curriculum_is_exported_and_is_a_file_of_prompts(call, own, tmp_path):
    file = tmp_path / "curriculum.parquet"
    words = (*ADVISE, "--out", tmp_path / "profile")
    code, output = call(*words, "--export", file, "--mix", "gaussian:0.5,0.2")
    assert code == 0, output
    assert "16 prompts with their sampling weights are in" in output
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert sum(row["weight"] for row in rows) == pytest.approx(1)
    assert {row["rollouts"] for row in rows} == {4}
    assert set(load_prompts(file).keys) == {row["key"] for row in rows}
    assert call(*words, "--export", file)[0] == 0  # over its own


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a log of rollouts; or, to sample a profile, give --task, or --prompts and --reward with either"),
        (("log.jsonl", "--model", "model"), "--model: does not apply to a log"),
        (("log.jsonl", "--sample-n", 4), "--sample-n: does not apply to a log"),
        ((*ADVISE[1:], "--format", "trl"), "--format: does not apply when a profile is sampled"),
        (("--task", "sort", "--reward", "a.py:f"), "--reward: the task sets this itself"),
        (("--model", "model"), "--model needs --prompts and --reward"),
        (
            (*ADVISE[1:], "--mix", "uniform"),
            "--mix sets the sampling weights that --export writes, so it needs --export FILE; give both",
        ),
        ((*ADVISE[1:], "--export", "a.csv"), "ends in .parquet"),
        (
            (*ADVISE[1:], "--export", "prompts.parquet"),
            "prompts.parquet, which was not written by rollalloc",
        ),
        ((*ADVISE[1:], "--out", "here", "--export", "here/a.parquet"), "in the folder of the log"),
        ((*ADVISE[1:], "--sample-n", 0), "n must be a whole number of at least 1"),
        ((*ADVISE[1:], "--out", "model/config.json"), "model/config.json is a file"),
    ],
)
def test_what_cannot_be_sampled_is_refused(call, words, said):
    code, output = call("advise", *words)
    assert code == 2
    assert said in output
    assert "Traceback" not in output
