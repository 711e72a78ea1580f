"""Stopping and resuming a run from the command line."""

# pyright: reportArgumentType=false, reportCallIssue=false

import json
import multiprocessing
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from rollalloc.data.prompts import write_prompts
from rollalloc.models.settings import Sampling
from rollalloc.train.config import is_described_in, is_run_in, read_config
from tiny_policy import untimed

# Sends signals to its own process once, SIGTERM or those that it names, where the file "stop" is there. About half of any
# model's answers are right: how many batches there are must not hang on what a hardly trained one happens to say.
REWARD = """
import hashlib, multiprocessing, os, signal

def half(answer):
    return float(hashlib.sha256(answer.encode()).digest()[0] % 2)

def score(data_source, solution_str, ground_truth, extra_info):
    if os.path.exists("stop"):
        with open("stop") as file:
            names = file.read().split() or ["SIGTERM"]
        os.remove("stop")
        for name in names:
            os.kill(os.getpid(), getattr(signal, name))
    return half(solution_str)

def stops_the_generator(data_source, solution_str, ground_truth, extra_info):
    for process in multiprocessing.active_children():
        if process.name == "rollalloc generator" and os.path.exists("stop"):
            os.remove("stop")
            os.kill(process.pid, signal.SIGSTOP)
    return half(solution_str)
"""
SHORT = ("--max-new-tokens", 4, "--max-rollouts", 96, "--device", "cpu", "--reward-workers", 0)
PILOTS = ("--recipe", "pilot_commit", "--set", "groups=2", "--set", "n_pilot=4", "--set", "n_commit=4")
PILOTS = (*PILOTS, "--set", "gen_groups=6", "--eval-every", 24, "--learning-rate", 0.001)
TRAIN = ("train", "--model", "model", "--prompts", "prompts.parquet", "--heldout", "heldout.jsonl")
TRAIN = (*TRAIN, "--reward", "stopping.py:score", *SHORT, *PILOTS)


@pytest.fixture(autouse=True)
def reward(own):
    (own / "stopping.py").write_text(REWARD)
    yield
    (own / "stop").unlink(missing_ok=True)


@pytest.fixture
def stopped(call, own, tmp_path):
    """The folder of a run that SIGTERM stopped in its first batch."""
    (own / "stop").touch()
    code, output = call(*TRAIN, "--out", tmp_path / "stopped")
    assert code == 143, output
    assert "stopped by SIGTERM after batch 1; a checkpoint is in" in output
    assert "(--resume)" in output
    return tmp_path / "stopped"


def test_a_stopped_run_is_resumed(call, stopped, tmp_path):
    assert call(*TRAIN, "--out", tmp_path / "unbroken")[0] == 0
    code, output = call(*TRAIN, "--out", stopped, "--resume")
    assert code == 0, output
    assert "resuming from the checkpoint after batch 1" in output
    assert untimed(stopped) == untimed(tmp_path / "unbroken")


def test_the_same_files_under_other_names_are_the_same_run(call, own, stopped):
    """A relative path, an absolute one, and a reward by its module instead of its file."""
    other = {"model": own / "model", "prompts.parquet": own / "prompts.parquet", "heldout.jsonl": "./heldout.jsonl"}
    words = [
        other.get(word, word) if before.startswith("--") else word for before, word in pairwise(["", *map(str, TRAIN)])
    ]
    words[words.index("stopping.py:score")] = "stopping:score"
    assert own / "model" in words
    code, output = call(*words, "--out", stopped, "--resume")
    assert code == 0, output
    assert "resuming from the checkpoint after batch 1" in output


def test_another_function_of_the_same_file_is_another_run(call, stopped):
    words = ["stopping:stops_the_generator" if word == "stopping.py:score" else word for word in TRAIN]
    code, output = call(*words, "--out", stopped, "--resume")
    assert code == 2
    assert "config.reward: saved 'stopping.py:score', given 'stopping:stops_the_generator'" in output


@pytest.mark.parametrize(
    ("signals", "code", "message"),
    [
        ("SIGHUP", 129, "stopped by SIGHUP after batch 1; a checkpoint is in"),
        ("SIGINT SIGINT", 130, "stopped; --resume continues from the newest checkpoint"),
    ],
)
def test_ctrl_c_and_a_terminal_that_goes_away_leave_a_run_to_resume(
    script, call, own, tmp_path, signals, code, message
):
    (own / "stop").write_text(signals)
    done = script(*TRAIN, "--out", tmp_path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    code, output = call(*TRAIN, "--out", tmp_path, "--resume")
    assert code == 0, output
    assert "rollouts ·" in output  # there is no terminal, and lines came
    assert untimed(tmp_path)[-1]["kind"] == "end"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--seed", 1), "config.seed: saved 0, given 1"),
        (("--reward", "my_reward.py:score"), "config.reward: saved 'stopping.py:score', given 'my_reward.py:score'"),
        (("--set", "groups=3"), "recipe.groups: saved 2, given 3"),
    ],
)
def test_another_run_is_refused_by_name(call, stopped, changes, message):
    code, output = call(*TRAIN, *changes, "--out", stopped, "--resume")
    assert code == 2
    assert message in output
    assert json.loads((stopped / "run.json").read_text())["seed"] == 0


def test_another_recipe_may_be_accepted(call, stopped):
    code, output = call(*TRAIN, "--set", "groups=3", "--out", stopped, "--resume", "--accept-recipe")
    assert code == 0, output
    assert [line["groups"] for line in untimed(stopped) if line["kind"] == "batch"][:2] == [2, 3]
    assert json.loads((stopped / "run.json").read_text())["parameters"]["groups"] == 3


def test_changed_prompts_are_refused_with_their_counts_and_may_be_accepted(call, own, stopped, caplog):
    """The prompts without the first four, and with a new one, in reverse."""
    rows = [json.loads(line) for line in (own / "prompts.jsonl").read_text().splitlines()]
    write_prompts(own / "other.jsonl", [rows[0] | {"prompt": "s5 s5 s5 ="}, *reversed(rows[4:])])
    other = ["other.jsonl" if value == "prompts.parquet" else value for value in TRAIN]
    code, output = call(*other, "--out", stopped, "--resume")
    assert code == 2
    assert "run.prompts: 4 lost, 1 new, 20 kept by key (accept_data=True, or --accept-data, continues" in output
    code, output = call(*other, "--out", stopped, "--resume", "--accept-data")
    assert code == 0, output
    assert "continuing with other data: run.prompts: 4 lost, 1 new, 20 kept by key" in caplog.text
    [line] = [line for line in untimed(stopped) if line["kind"] == "resume"]
    assert (line["lost"], line["new"]) == (4, 1)
    assert sum(line["prompts"].values()) == 21
    assert json.loads((stopped / "run.json").read_text())["prompts"] == ["other.jsonl"]
    assert untimed(stopped)[-1]["rollouts_paid"] == 96


def test_a_described_run_is_read_back(call, stopped):
    run = read_config(stopped)
    written = json.loads((stopped / "run.json").read_text())
    assert written.pop("digests")  # of the files, which are not the run's
    assert written.pop("starts")
    assert run.description() == written
    assert (run.sampling, run.learning_rate, run.eval_every) == (Sampling(4), 0.001, 24)
    saving = replace(run, checkpoint_every=3, keep_checkpoints=5)
    assert saving.description() == run.description()  # a finished run stays finished, however often it was saved
    (stopped / "run.json").write_text(json.dumps(run.description() | {"unknown": 1}))
    with pytest.raises(ValueError, match="damaged or from a different version of rollalloc"):
        read_config(stopped)
    other = {name: value for name, value in written.items() if name != "schema"}
    (stopped / "run.json").write_text(json.dumps(other))
    refused = r"run\.json has schema None, expected 4; .* use the version that wrote it, or give another folder"
    for act in (read_config, partial(is_run_in, run), partial(is_described_in, run)):
        with pytest.raises(ValueError, match=refused):
            act(stopped)


def test_a_generator_that_is_stopped_ends_the_run_which_goes_on_later(call, own, tmp_path, forked_generators):
    (own / "stop").touch()
    train = [*TRAIN, "--engine", "async", "--staleness", 1, "--max-rows", 8]
    train[train.index("stopping.py:score")] = "stopping.py:stops_the_generator"
    code, output = call(*train, "--generator-limit", 3, "--out", tmp_path)
    assert code == 2, output
    assert re.search(r"process that generates \(\d+\) has given no sign of life for \d+ s, and", output)
    assert "a checkpoint after batch 0 is in" in output
    assert multiprocessing.active_children() == []
    code, output = call(*train, "--out", tmp_path, "--resume")
    assert code == 0, output
    assert untimed(tmp_path)[-1]["kind"] == "end"


# What decides whether the data are the same: the data and the chat template, not what the clock makes of them

CLOCK = "s{{ strftime_now('%f') | int % 6 }} {{ messages[0]['content'] }}{{ suffix }}"


@pytest.fixture
def chats(own):
    """A model whose template says the time, training prompts that are chats, and the arguments of a run on them."""
    rows = [json.loads(line) for line in (own / "prompts.jsonl").read_text().splitlines()]
    write_prompts(own / "chats.jsonl", [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    shutil.copytree(own / "model", own / "clock", dirs_exist_ok=True)
    (own / "clock/chat_template.jinja").write_text(CLOCK)
    return [{"model": "clock", "prompts.parquet": "chats.jsonl"}.get(value, value) for value in TRAIN]


def test_a_template_that_says_the_time_does_not_keep_a_run_from_going_on(call, own, chats, tmp_path):
    (own / "stop").touch()
    assert call(*chats, "--out", tmp_path)[0] == 143
    code, output = call(*chats, "--out", tmp_path, "--resume")
    assert code == 0, output


@pytest.mark.parametrize("change", ["template", "arguments", "heldout"])
def test_another_template_or_other_held_out_prompts_are_refused_unless_accepted(
    call, own, chats, tmp_path, change, caplog
):
    (own / "stop").touch()
    assert call(*chats, "--out", tmp_path)[0] == 143
    if change == "template":
        (own / "clock/chat_template.jinja").write_text(CLOCK + "{# another #}")
    elif change == "arguments":
        chats += ["--chat-template-args", '{"suffix": " ="}']
    else:
        rows = [json.loads(line) for line in (own / "heldout.jsonl").read_text().splitlines()]
        write_prompts(own / "fewer.jsonl", rows[1:])
        chats[chats.index("heldout.jsonl")] = "fewer.jsonl"
    says = "the held-out prompts differ" if change == "heldout" else "the chat template or its arguments differ"
    code, output = call(*chats, "--out", tmp_path, "--resume")
    assert code == 2
    assert says in output
    assert "--accept-data, continues with them" in output
    code, output = call(*chats, "--out", tmp_path, "--resume", "--accept-data")
    assert code == 0, output
    assert f"continuing with other data: run.{'heldout' if change == 'heldout' else 'template'}" in caplog.text
    assert not [line for line in untimed(tmp_path) if line["kind"] == "resume"]  # the prompts to train on are the same
