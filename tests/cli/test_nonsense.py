"""Nonsense for every option of every command, as typer lists them: refused in one message, before any work is begun.

A new option is covered by itself. What an option takes that others refuse is said here, with its reason.
"""

from dataclasses import fields

import pytest
from typer.main import get_command

from nonsense import CommandLine, commands, refusals
from rollalloc.cli import app
from rollalloc.cli.options import RunOptions

OWN = ("--model", "model", "--prompts", "prompts.parquet", "--heldout", "heldout.jsonl", "--device", "cpu")
OWN = (*OWN, "--reward", "my_reward.py:score", "--max-new-tokens", "4")
LINE = CommandLine(
    get_command(app.app),
    base={
        "train": OWN,
        "compare": OWN,
        "features": ("--model", "model", "--prompts", "prompts.parquet", "--out", "made.safetensors"),
        "model": ("smollm2", "made"),
        "report": ("model",),
        "waste": ("log.jsonl",),
        "advise": ("log.jsonl",),
        "recipes": ("grpo",),
        "data prepare": ("gsm8k", "--from-local", "model"),
        "data chat": ("sums",),
        "data environment": ("gsm8k", "--out", "made.jsonl"),
        "data convert": ("prompts.jsonl", "--question", "prompt", "--answer", "data_source", "--out", "made.jsonl"),
    },
    work=(
        "rollalloc.models.policy.Policy.load",
        "rollalloc.models.pretrained.make_model",
        "rollalloc.compare.compare.compare",
        "rollalloc.tasks.presets.task_files",
        "rollalloc.tasks.chat.prepare",
    ),
    beside={
        "lora_alpha": ("--lora", "4"),
        "lora_target": ("--lora", "4"),
        "schedule_steps": ("--schedule", "linear"),
    },
    any_text=frozenset(
        {
            *(("train", "model"), ("train", "lora_target"), ("features", "model")),
            *(("data convert", "system"), ("data convert", "source")),
            *(("waste", "reward"), ("advise", "reward")),
        }
    ),
    files=("features", "report", "data convert", "data environment"),
    below_zero=frozenset({("waste", "threshold"), ("advise", "threshold")}),  # rewards
)
SHARED = {each.name for each in fields(RunOptions)} - {"task"}  # which `compare` has of `train`
CASES = [(name, each) for name, each in LINE.cases() if not (name == "compare" and each.name in SHARED)]


def test_no_command_is_left_out():
    assert {name for name, _ in commands(LINE.built)} == {*LINE.base}


@pytest.fixture
def refused(own, rollalloc, monkeypatch, tmp_path):
    monkeypatch.setattr(app, "app", LINE.built)  # made once, not for each call
    return refusals(own, tmp_path, monkeypatch, LINE, rollalloc)


@pytest.mark.parametrize(("command", "parameter"), CASES, ids=[f"{name} {each.name}" for name, each in CASES])
def test_nonsense_is_refused_in_the_name_of_its_option(refused, command, parameter):
    LINE.check(refused, command, parameter)
