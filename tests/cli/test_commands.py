"""What a person types and reads: help, errors without the names of classes, suggestions, defaults of built-in tasks."""

import re

import pytest
from typer.main import get_command

from nonsense import commands
from rollalloc.cli.app import app
from rollalloc.cli.options import RunOptions, reflowed
from rollalloc.cli.sources import end_said, run_of
from rollalloc.files.text import told

NAMES = [name for name, _ in commands(get_command(app))]


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_names_no_type_beside_a_flag_and_fits_a_terminal(rollalloc, name):
    code, out, _ = rollalloc(*name.split(), "--help", columns=80)
    assert code == 0
    assert "bool" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_help_of_rollalloc_names_no_type_beside_a_flag(rollalloc):
    for words in ([], ["data"]):
        assert "bool" not in rollalloc(*words, "--help")[1]


def test_a_docstring_has_one_line_for_each_paragraph_and_point():
    text = """Draw prompts.

        p ∝ q

    It draws each
    of them. docs/a.md.

    1. First, this
       goes on.
    2. Then that.
    """
    assert reflowed(text).splitlines() == [
        *("Draw prompts.", "", "    p ∝ q", "", "It draws each of them. docs/a.md.", ""),
        *("1. First, this goes on.", "2. Then that."),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report none", "error: none: there is no such folder; check the name"),
        ("train --task rg/gcdd", "error: unknown task 'rg/gcdd' (did you mean 'rg/gcd'?); there are "),
        ("train --task sort --recipe gropo", "error: unknown recipe 'gropo' (did you mean 'grpo'?); there are "),
        ("data prepare gsm9k", "error: unknown set 'gsm9k' (did you mean 'gsm8k'?); there are "),
        ("data chat sum", "error: unknown task 'sum' (did you mean 'sums'?); choose from "),
        ("model smolm2 new", "error: unknown model 'smolm2' (did you mean 'smollm2'?); there is "),
        ("waste model --format trll", "error: --format must be one of "),
        ("train --task sort --resume true", "error: Invalid value for '--resume': it takes no value; leave 'true' out"),
        ("waste log --json=yes", "error: Option '--json' does not take a value"),
        ("train --modle x", "error: No such option: --modle"),
        ("features --model model", "error: Missing option '--prompts'"),
        ("tain", "error: No such command 'tain'"),
    ],
)
def test_an_error_has_one_style_and_no_name_of_a_class(call, words, said):
    code, output = call(*words.split())
    assert code == 2
    assert output.startswith(said), output
    assert not re.search(r"\w+Error|Errno|╭", output)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("expected 1, got 2"), "expected 1, got 2"),
        (FileNotFoundError(2, "No such file or directory", "a.jsonl"), "a.jsonl: No such file or directory"),
        (OSError(18, "Invalid cross-device link", "a", None, "b"), "a: b: Invalid cross-device link"),
        (OSError("the disk is full"), "the disk is full"),
        (KeyError("answer"), "KeyError: 'answer'"),
        (MemoryError(), "MemoryError: "),
        (ValueError(), "ValueError: "),
    ],
)
def test_an_error_is_told_by_its_message_where_that_is_a_sentence(error, said):
    assert told(error) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_rollouts": 640}, "at most 640 rollouts, until a held-out accuracy of 0.6 (sort's; --target changes it)"),
        (
            {"target": 0.3},
            "at most 40,000 rollouts (sort's; --max-rollouts changes it), until a held-out accuracy of 0.3",
        ),
        ({"max_rollouts": 640, "target": 0.3}, "at most 640 rollouts, until a held-out accuracy of 0.3"),
        ({"max_rollouts": 640, "target": 1.0}, "at most 640 rollouts"),
    ],
)
def test_a_run_on_a_built_in_task_says_when_it_ends_and_whose_default_that_is(given, said):
    options = RunOptions(task="sort", **given)
    assert end_said(options, run_of(options, "grpo", {}, 0)) == said
