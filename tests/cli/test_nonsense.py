"""Nonsense for every option of every command, as typer lists them: refused in one message, before any work is begun.

A new option is covered by itself. What an option takes that others refuse is said here, with its reason.
"""

import json
import os
from dataclasses import fields
from typing import Any

import pytest
from typer.main import get_command

from rollalloc.cli import app
from rollalloc.cli.options import RunOptions

BUILT = get_command(app.app)
OWN = ("--model", "model", "--prompts", "prompts.parquet", "--heldout", "heldout.jsonl", "--device", "cpu")
OWN = (*OWN, "--reward", "my_reward.py:score", "--max-new-tokens", "4")
BASE = {
    "train": OWN,
    "compare": OWN,
    "bench": ("--tier", "smoke"),
    "features": ("--model", "model", "--prompts", "prompts.parquet", "--out", "made.safetensors"),
    "model": ("smollm2", "made"),
    "report": ("model",),
    "waste": ("log.jsonl",),
    "advise": ("log.jsonl",),
    "simulate": ("--gpus", "8"),
    "recipes": ("grpo",),
    "data prepare": ("gsm8k", "--from-local", "model"),
    "data chat": ("sums",),
    "data ladder": (),
    "data environment": ("gsm8k", "--out", "made.jsonl"),
    "data convert": ("prompts.jsonl", "--question", "prompt", "--answer", "data_source", "--out", "made.jsonl"),
}
BESIDE = {  # what else must be said for an option to mean something
    "lora_alpha": ("--lora", "4"),
    "lora_target": ("--lora", "4"),
    "schedule_steps": ("--schedule", "linear"),
}
WORK = (  # where a command begins what takes time
    "rollalloc.models.policy.Policy.load",
    "rollalloc.models.pretrained.make_model",
    "rollalloc.lab.bench.compare.compare",
    "rollalloc.lab.bench.leaderboard.run_leaderboard",
    "rollalloc.lab.bench.presets.task_files",
    "rollalloc.lab.bench.tasks.chat.prepare",
    "rollalloc.lab.simulate.simulation.simulate",
)
HUGE = "1" + "0" * 30
NO_TEXT = "\x1b[31mnonsense\n"
ANY_TEXT = {  # text that cannot be told to be wrong before a model or a column is looked at
    ("train", "model"),
    ("train", "lora_target"),
    ("features", "model"),
    ("data convert", "system"),
    ("data convert", "source"),
    ("waste", "reward"),
    ("advise", "reward"),
}
FILES = ("features", "report", "data convert", "data environment")  # commands whose --out is no folder
BELOW_ZERO = {("waste", "threshold"), ("advise", "threshold")}  # numbers that may be negative: rewards


def commands(command: Any, path: tuple[str, ...] = ()) -> Any:
    """Each command under its name."""
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from commands(below, (*path, name))
    else:
        yield " ".join(path), command


def nonsense(command: str, parameter: Any) -> list[str]:
    """Values that an option must refuse, whatever it is for."""
    kind, at = str(parameter.type_descriptor.annotation), (command, parameter.name)
    if "Path" in kind:
        reads = parameter.name in ("prompts", "heldout", "file", "log", "latency")
        writes = parameter.name in ("out", "tasks", "task_folder") and command not in FILES
        return ["", *(("model", "pipe.jsonl") if reads else ()), *(("my_reward.py/made",) if writes else ())]
    if "int" in kind or "float" in kind:
        whole = ["1.5", "-7"] if "int" in kind else ["nan", "inf", *(() if at in BELOW_ZERO else ("-7",))]
        return ["", "x", HUGE, *whole]
    return [] if at in ANY_TEXT else [NO_TEXT]


SHARED = {each.name for each in fields(RunOptions)}  # which `compare` has of `train`
CASES = [
    (name, parameter)
    for name, command in commands(BUILT)
    for parameter in command.params
    if parameter.type_descriptor.annotation is not bool
    and parameter.name != "help"
    and not (name == "compare" and parameter.name in SHARED - {"task"})
]


def test_no_command_is_left_out():
    assert {name for name, _ in commands(BUILT)} == {*BASE}


@pytest.fixture
def refused(own, rollalloc, monkeypatch, tmp_path):
    """Call a command in a copy of the user's folder; what it said, in one line, when it refused and left nothing."""

    def began(*_: Any, **__: Any) -> None:
        raise AssertionError("work was begun")

    for work in WORK:
        monkeypatch.setattr(work, began)
    monkeypatch.setattr(app, "app", BUILT)  # made once, not for each call
    for each in own.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "log.jsonl").write_text(json.dumps({"input": "1+1", "score": 1.0, "step": 1}) + "\n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def called(*words: str) -> str:
        code, out, err = rollalloc(*words)
        assert code == 2, (words, out + err)
        assert "Traceback" not in out + err
        assert "\x1b" not in out + err
        assert sorted(tmp_path.rglob("*")) == before, words
        return " ".join((out + err).split())

    return called


@pytest.mark.parametrize(("command", "parameter"), CASES, ids=[f"{name} {each.name}" for name, each in CASES])
def test_nonsense_is_refused_in_the_name_of_its_option(refused, command, parameter):
    for value in nonsense(command, parameter):
        words = [*command.split(), *BASE[command], *BESIDE.get(parameter.name, ())]
        if command in ("train", "compare") and parameter.name in ("task", "pool", "settings"):
            words = [command, "--task", "sort"]
        if parameter.opts[0].startswith("-"):
            while parameter.opts[0] in words:  # else it would be said twice, or beside what is right
                at = words.index(parameter.opts[0])
                del words[at : at + 2]
            words.append(f"{parameter.opts[0]}={value}")
        else:
            arguments = [each for each in dict(commands(BUILT))[command].params if not each.opts[0].startswith("-")]
            words[len(command.split()) + [each.name for each in arguments].index(parameter.name)] = value
        said = refused(*words)
        names = (parameter.opts[0], parameter.name, parameter.metavar, value.strip(), "nonsense")
        assert any(name and name.lower() in said.lower() for name in names), (value, said)
