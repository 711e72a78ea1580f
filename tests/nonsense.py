"""Nonsense for every option of every command of a command line, as typer lists them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HUGE = "1" + "0" * 30
NO_TEXT = "\x1b[31mnonsense\n"
READ = ("prompts", "heldout", "file", "log", "latency")  # options that name a file to read
WRITTEN = ("out", "tasks", "task_folder")  # options that name a folder to write to
Called = Callable[..., tuple[int, str, str]]


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each command under its name."""
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from commands(each, (*path, name))
    else:
        yield " ".join(path), command


@dataclass(frozen=True)
class CommandLine:
    """What must be said beside an option, and what options take that others refuse.

    Attributes:
        built: the command line, as click has it.
        base: by command, words with which it is called.
        beside: by option, words without which the option means nothing.
        any_text: options that take text which cannot be told to be wrong before a model or a column is looked at.
        files: commands whose --out is no folder.
        below_zero: numbers that may be negative.
        work: names of functions with which a command begins what takes time.
    """

    built: Any
    base: dict[str, tuple[str, ...]]
    work: tuple[str, ...]
    beside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    any_text: frozenset[tuple[str, str]] = frozenset()
    files: tuple[str, ...] = ()
    below_zero: frozenset[tuple[str, str]] = frozenset()

    def cases(self) -> list[tuple[str, Any]]:
        """Every option that takes a value, with its command's name."""
        return [
            (name, parameter)
            for name, command in commands(self.built)
            for parameter in command.params
            if parameter.type_descriptor.annotation is not bool and parameter.name != "help"
        ]

    def nonsense(self, command: str, parameter: Any) -> list[str]:
        """Values that an option must refuse, whatever it is for."""
        kind, at = str(parameter.type_descriptor.annotation), (command, parameter.name)
        if "Path" in kind:
            writes = parameter.name in WRITTEN and command not in self.files
            reads = parameter.name in READ
            return ["", *(("model", "pipe.jsonl") if reads else ()), *(("my_reward.py/made",) if writes else ())]
        if "int" in kind or "float" in kind:
            whole = ["1.5", "-7"] if "int" in kind else ["nan", "inf", *(() if at in self.below_zero else ("-7",))]
            return ["", "x", HUGE, *whole]
        return [] if at in self.any_text else [NO_TEXT]

    def words(self, command: str, parameter: Any, value: str) -> list[str]:
        """A call of a command that is right except for this value."""
        words = [*command.split(), *self.base[command], *self.beside.get(parameter.name, ())]
        if command in ("train", "compare") and parameter.name in ("task", "pool", "settings"):
            words = [command, "--task", "sort"]
        if parameter.opts[0].startswith("-"):
            while parameter.opts[0] in words:  # else it would be said twice, or beside what is right
                at = words.index(parameter.opts[0])
                del words[at : at + 2]
            return [*words, f"{parameter.opts[0]}={value}"]
        params = dict(commands(self.built))[command].params
        arguments = [each.name for each in params if not each.opts[0].startswith("-")]
        words[len(command.split()) + arguments.index(parameter.name)] = value
        return words

    def check(self, refused: Callable[..., str], command: str, parameter: Any) -> None:
        """Every nonsense for an option is refused in the option's name."""
        for value in self.nonsense(command, parameter):
            said = refused(*self.words(command, parameter, value))
            names = (parameter.opts[0], parameter.name, parameter.metavar, value.strip(), "nonsense")
            assert any(name and name.lower() in said.lower() for name in names), (value, said)


def refusals(
    own: Path, folder: Path, patched: pytest.MonkeyPatch, line: CommandLine, called: Called
) -> Callable[..., str]:
    """Call a command in a copy of the user's folder; what it said, in one line, when it refused and left nothing."""

    def began(*_: Any, **__: Any) -> None:
        raise AssertionError("work was begun")

    for work in line.work:
        patched.setattr(work, began)
    for each in own.iterdir():
        (folder / each.name).symlink_to(each)
    (folder / "log.jsonl").write_text(json.dumps({"input": "1+1", "score": 1.0, "step": 1}) + "\n")
    os.mkfifo(folder / "pipe.jsonl")
    patched.chdir(folder)
    before = sorted(folder.rglob("*"))

    def refused(*words: str) -> str:
        code, out, err = called(*words)
        assert code == 2, (words, out + err)
        assert "Traceback" not in out + err
        assert "\x1b" not in out + err
        assert sorted(folder.rglob("*")) == before, words
        return " ".join((out + err).split())

    return refused
