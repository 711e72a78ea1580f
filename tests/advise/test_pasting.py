"""What is pasted for rollalloc itself, and what is said beside it; TRL and verl: tests/drivers/{trl,verl}/test_pasted.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from rollalloc.advise import pasting
from rollalloc.advise.pasting import FRAMEWORKS, changes, pasted
from rollalloc.advise.verdict import Choice
from rollalloc.cli import app
from rollalloc.cli.options import RunOptions, parameters_of
from rollalloc.cli.sources import run_of
from rollalloc.data.prompts import write_prompts
from rollalloc.models.settings import Sampling
from rollalloc.named import make_recipe, sizes_of
from rollalloc.train.config import Config

CHOICES = {
    choice.name: choice
    for choice in (Choice("grpo", 16, 4), *(Choice(recipe, 64, 1) for recipe in ("reinforce", "raft", "foresight")))
}
LEADERBOARD = Path(__file__).parents[2] / "lab" / "docs" / "leaderboard.md"


def parsed(text):
    """What `rollalloc train` takes a command for."""
    program, command, *words = shlex.split(text.replace("\\\n", ""))
    assert (program, command) == ("rollalloc", "train")
    return get_command(app.app).commands["train"].make_context("train", words).params


@pytest.mark.parametrize("name", CHOICES)
def test_our_own_command_trains_under_the_choice(name, tmp_path):
    choice = CHOICES[name]
    file = tmp_path / "my prompts.jsonl"
    write_prompts(file, [{"data_source": "mine", "prompt": "1 + 1", "reward_model": {"ground_truth": "2"}}])
    said = parsed(pasted(choice, "rollalloc", Config(model="my model", prompts=(str(file),), reward="a b.py:f")))
    given = RunOptions(**{each: said[each] for each in ("model", "prompts", "reward")}, max_rollouts=1)
    run = run_of(given, said["recipe"], parameters_of(said["set_"]), 0)
    stage = run.make_recipe().stages[0]
    assert (run.make_recipe().groups, stage.size.n) == (choice.groups, choice.n)
    assert (run.model, run.prompts, run.reward) == ("my model", (str(file),), "a b.py:f")


def test_the_command_samples_as_the_profile_was_sampled():
    config = Config(
        model="m",
        prompts=("p",),
        reward="r:f",
        sampling=Sampling(200, temperature=0.7),
        overlong_buffer=50,
        drop_overlong=True,
        chat_template_args='{"enable_thinking": false}',
    )
    options = parsed(pasted(CHOICES["raft"], "rollalloc", config))
    names = ("max_new_tokens", "temperature", "overlong_buffer", "drop_overlong", "chat_template_args")
    assert [options[name] for name in names] == [200, 0.7, 50, True, '{"enable_thinking": false}']


def test_the_command_for_a_built_in_task_has_task_and_no_model():
    options = parsed(pasted(CHOICES["raft"], "rollalloc", task="skills/late"))
    assert options["task"] == "skills/late"
    assert options["model"] is None
    assert options["recipe"] == "raft"


@pytest.mark.parametrize("name", ["reinforce", "raft", "foresight", "grpo"])
def test_a_choice_of_the_default_shape_is_pasted_as_the_default_recipe(name):
    """The advice rests on measurements of the defaults, so what is pasted must be the recipe that was measured."""
    defaults = sizes_of(name, {})
    choice = Choice(name, defaults["groups"], defaults["n"])
    assert make_recipe(name, pasting.parameters_of(choice)) == make_recipe(name, defaults)


def test_what_changes_is_said_and_no_more():
    eight, four, one = Choice("grpo", 8, 8), Choice("grpo", 16, 4), Choice("reinforce", 64, 1)
    assert changes(eight, eight) == ()
    [shape] = changes(four, eight)
    assert shape.startswith("A batch has 16 prompts × 4 instead of 8 × 8: still 64 rows.")
    shape, rate = changes(one, eight)
    assert "64 prompts × 1" in shape
    assert "Begin with your present learning rate" in rate
    assert "32 rows instead of 64" in changes(Choice("grpo", 8, 4), eight)[0]


def test_the_learning_rates_are_those_of_the_leaderboard():
    found = re.findall(
        r"--task (\S+) --recipes (\S+) .*--learning-rate (\S+) .*--settings tuned", LEADERBOARD.read_text("utf-8")
    )
    rates = {(task, recipe): float(rate) for task, recipe, rate in found}
    tasks = {task for task, _ in rates}
    ratios = [
        rates[task, one] / rates[task, "grpo"]
        for task in tasks
        for one in ("reinforce", "raft", "foresight")
        if (task, one) in rates
    ]
    assert len(tasks) == 6
    least, most, median = min(ratios), max(ratios), np.median(ratios)
    assert f"{least:.1f} to {most:.1f} times that of GRPO, and the median was {median:.1f} times" in pasting._RATES


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_names_of_files_are_quoted(framework):
    text = pasted(CHOICES["foresight"], framework, Config(model="a; rm -rf b", prompts=("c d",), reward="e:f"))
    assert "; rm" not in text or "'a; rm -rf b'" in text


def test_what_cannot_be_pasted_is_refused():
    with pytest.raises(ValueError, match="one of rollalloc, trl, verl to paste into, got 'slime'"):
        pasted(CHOICES["raft"], "slime")
    with pytest.raises(ValueError, match="TRL needs batches of at least 2 rows, got 1 × 1"):
        pasted(Choice("raft", 1, 1), "trl")
