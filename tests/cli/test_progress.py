"""What is shown while runs go on: readable where the terminal is narrow, and as it happens where there is none."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import io
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console

from rollalloc.cli.app import log_handler
from rollalloc.cli.progress import Lines, RunProgress, Standings, TimeLeft, say, staged, table, took

LABELS = ("grpo", "dapo", "dapo_carry", "pilot_commit", "pods", "darts", "racing", "pilot_commit+pods")


ROW = {
    "done": "12/15",
    "curve": "▁▂▃▄▅▆▇█▁▂▃▄",
    "accuracy": "0.850",
    "rollouts": "1,234,567",
    "left, at most": "12:34:56",
    "taught": "32%",
    "wasted on": "zero variance 54%, out of band 15%",
}


def console(width, **options):
    return Console(width=width, file=io.StringIO(), color_system=None, **options)


@pytest.mark.parametrize("tasks", [["skills/late"], ["skills/late", "rg/number_filtering_misled"]])
def test_eighty_columns_hold_every_recipe_by_its_whole_name_and_what_matters(tasks):
    shown = console(80)
    shown.print(table([{"task": task, "recipe": label, **ROW} for task in tasks for label in LABELS]))
    text = shown.file.getvalue()
    assert "…" not in text
    for word in (*LABELS, *tasks, "12/15", "0.850", "1,234,567"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_model_that_is_warmed_up_shows_its_curve_as_it_learns(monkeypatch):
    terminal = console(120, force_terminal=True)
    monkeypatch.setattr("rollalloc.cli.progress.Console", lambda stderr: terminal)
    with staged() as shown:
        for step, right in enumerate((None, 0.0, 0.3, 0.99)):
            shown("warming up", step, 4, right)
    assert "warming up ▁▃█ 99% of tokens right" in terminal.file.getvalue()


def test_a_comparison_shows_each_recipes_curve_of_the_evaluations_seen_so_far():
    run = SimpleNamespace(task="rg/gcd", name="grpo")

    def state(folder, rollouts, accuracy):
        curve = SimpleNamespace(rollouts=rollouts, accuracy=accuracy)
        of_run = {"folder": folder, "curve": curve, "grouped": True, "ended": False, "budget": 640}
        return SimpleNamespace(accounts={"trained": 64} if rollouts else {}, paid=64 if rollouts else 0, **of_run)

    shown = console(120, force_terminal=True)
    with Standings(shown) as standings:
        standings.show([(run, state("a", (0, 32), (0.1, 0.4))), (run, state("b", (), ()))])
        standings.show([(run, state("a", (64,), (0.9,))), (run, state("b", (), ()))])
    assert "▁▄█" in shown.file.getvalue()
    assert "0.900" in shown.file.getvalue()
    assert "64" in shown.file.getvalue()


def line(paid, **fields):
    given = {"kind": "batch", "rollouts_paid": paid, "accounts": {"trained": paid // 2}, "unscored": {}}
    return given | {"reward_mean": 0.5, "accuracy": 0.25} | fields


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rollalloc.cli.progress.time.monotonic", lambda: now[0])
    return now


def test_where_there_is_no_terminal_lines_come_as_it_happens_with_the_time_left(clock):
    shown = console(40, force_terminal=False)
    with RunProgress(shown, 100) as progress:
        progress.show(line(0, kind="eval"))
        assert shown.file.getvalue() == "0 rollouts · 0 trained on · held-out 0.250\n"
        clock[0] += 30
        progress.show(line(20))
        clock[0] += 0.1  # too soon for another
        progress.show(line(21))
        progress.show(line(100, kind="end"))
    assert shown.file.getvalue().splitlines()[1:] == [
        "20 rollouts · 10 trained on · held-out 0.250 · reward 0.500 · 2:00 left"
    ]


@pytest.mark.parametrize(("width", "trained", "reward"), [(80, False, True), (60, False, False), (200, True, True)])
def test_a_runs_line_of_progress_is_whole_where_the_terminal_is_narrow(clock, width, trained, reward):
    shown = console(width, force_terminal=True)
    with RunProgress(shown, 1_000_000) as progress:
        progress.show(line(0, kind="eval"))
        clock[0] += 3600
        progress.show(line(123_456))
    text = shown.file.getvalue()
    assert "123,456 rollouts · " in text
    assert "held-out 0.250" in text
    assert "7:06:00 left" in text
    assert "…" not in text
    assert ("61,728 trained on" in text, "reward 0.500" in text) == (trained, reward)


def test_a_command_took_what_the_clock_says_its_imports_included(monkeypatch):
    monkeypatch.setattr("rollalloc.cli.progress.BEGAN", 1000.0)
    monkeypatch.setattr("rollalloc.cli.progress.time.time", lambda: 1135.4)
    assert took().startswith("this took 2 min 15 s, with ")


def test_the_time_left_counts_from_where_a_resumed_run_went_on(clock):
    left = TimeLeft()
    assert left(0.5) == ""
    clock[0] += 10
    assert left(0.6) == "0:40"
    assert left(1.0) == ""


def test_nothing_that_is_said_acts_on_the_terminal():
    shown, lines = console(80, force_terminal=False), console(80, force_terminal=False)
    say(shown, "model and metrics are in \x1b]0;owned\x07[red]\u202e")
    Lines(lines).say("a reason \x1b[2J")
    text = shown.file.getvalue() + lines.file.getvalue()
    assert set(text).isdisjoint("\x1b\x07\u202e")
    assert "␛]0;owned␇[red]" in text


def test_a_reader_that_is_gone_ends_no_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    lines = Lines(Console(file=Gone(), force_terminal=False))
    lines.say("one")
    lines.say("two")


def test_a_warning_is_printed_above_the_live_table_and_not_into_it():
    terminal = console(80, force_terminal=True)
    with Standings(terminal):
        log_handler().handle(logging.LogRecord("rollalloc", logging.WARNING, "", 0, "it is slow", None, None))
    assert "it is slow" in terminal.file.getvalue()
