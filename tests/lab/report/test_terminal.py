"""What `rollalloc watch` shows of a run and of several."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from rollalloc.lab.report.terminal import view
from rollalloc.runs.discovery import is_over
from rollalloc.runs.reader import read_run
from rollalloc.runs.recorded import remaining


def shown(runs, width=110):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(view(runs))
    return console.file.getvalue()


def test_a_run_is_shown_whole(write_run):
    text = shown([read_run(write_run("ours", why=None, batches=30, unscored={"timeout [red]": 3}))])
    for part in (
        "ours · seed 0 · not ended",
        "50% of 6,000 · 0:01:00 until the budget is spent",
        "3,000 rollouts, 60,000 tokens, 40% taught",
        "target 0.8",
        "all alike",
        "impossible so far 40",
        "evicted 120 · visits to evicted 3 · quarantined 1",
        "25 tokens, four fifths 6–40, all 2–64; 5% cut off",
        "0.40 updates, at most 2",
        "3 × timeout [red]",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    "made", [{"old": True}, {"evaluated": False}, {"max_rollouts": None}, {"batches": 0, "why": None}]
)
def test_nothing_that_may_lack_is_needed(write_run, made):
    run = read_run(write_run(**made))
    assert "grpo · seed 0" in shown([run])
    assert "grpo" in shown([run, replace(run, metrics=[]), replace(run, description={})])


def test_what_cannot_be_read_or_shown_of_a_run_is_said_and_costs_no_other_its_line(write_run):
    runs = [read_run(write_run("good"))]
    for name, wrong in (("long", {"seconds": 9e15}), ("free", {"rollouts_paid": 0}), ("damaged", {"accounts": 1})):
        folder = write_run(name)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(runs[0].last | wrong) + "\n")
        runs.append(read_run(folder))
    assert "it cannot be shown: OverflowError" in shown([runs[1]])
    text = " ".join(shown(runs, 300).split())
    assert "good 0 6,000" in text
    assert "free-0 cannot be read in full: it cannot be shown: ZeroDivisionError" in text
    assert "damaged, seed 0 cannot be read in full: metrics.jsonl:75 expected an object with its kind" in text


@pytest.mark.parametrize("labels", [["grpo", "dapo_carry"], ["pilot_commit+pods", "a label of twenty-four c"]])
def test_eighty_columns_hold_of_several_runs_all_that_matters(write_run, labels):
    runs = [
        read_run(write_run(label, seed, why=why, max_rollouts=2_000_000))
        for label in labels
        for seed, why in ((0, None), (11, "target: reached"))
    ]
    runs = [replace(run, metrics=[*run.metrics[:-1], run.last | {"rollouts_paid": 1_234_567}]) for run in runs]
    text = shown(runs, 80)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("seed", "rollouts", "accuracy", "state", "1,234,567", "target reached", "not ended", *labels):
        assert word in text, text
    assert "…" not in text


def test_nothing_a_run_says_can_write_to_the_terminal(write_run):
    hostile = "\x1b]8;;http://a\x07[/red]\x9b\u202e"
    run = read_run(write_run(hostile, why=hostile, unscored={hostile: 1}))
    last = run.metrics[-1] | {"accounts": {hostile: 2**53, "trained": 1}}
    run = replace(run, metrics=[*run.metrics[:-1], last], problem=hostile)
    for runs in ([run], [run, run]):
        for width in (20, 80, 200):
            text = shown(runs, width)
            assert set(text).isdisjoint("\x1b\x07\x9b\u202e")
        assert "␛]8;;http" in text


def test_what_remains_is_the_budget_at_the_pace_so_far(write_run):
    assert remaining(read_run(write_run(why=None, batches=15, max_rollouts=6000))).total_seconds() == 90
    assert remaining(read_run(write_run())) is None
    assert remaining(replace(read_run(write_run(why=None)), unread=1)) is None
    assert remaining(read_run(write_run(why=None, max_rollouts=None))) is None
    slow = read_run(write_run(why=None, max_rollouts=2**53))
    assert remaining(replace(slow, metrics=[slow.last | {"seconds": 2.0**53}])) is None


def test_a_comparison_is_over_when_it_wrote_its_results(write_run, tmp_path):
    runs = [read_run(write_run())]
    assert is_over(runs[0].folder, runs)
    assert not is_over(tmp_path / "compare", runs)  # the next run may not have begun
    (tmp_path / "compare" / "results.json").write_text("[]")
    assert is_over(tmp_path / "compare", runs)
    assert not is_over(tmp_path / "compare", [*runs, read_run(write_run("running", why=None))])


def test_runs_that_were_trained_one_by_one_are_over_when_each_has_ended(write_run, tmp_path):
    folders = [write_run("", 0), write_run("", 1)]
    runs = [read_run(folder) for folder in folders]
    assert is_over(tmp_path / "compare", runs)
    assert not is_over(tmp_path / "compare", [runs[0], replace(runs[1], unread=1)])
    write_run("", 1, why=None)
    assert not is_over(tmp_path / "compare", [runs[0], read_run(folders[1])])
    assert not is_over(tmp_path / "compare", [*runs, read_run(write_run("of a comparison"))])


def test_rollouts_that_have_stopped_teaching_are_said(write_run):
    run = read_run(write_run("ours", why=None, batches=30))
    silent = {"all_wrong": 0.7, "mixed": 0.3}
    text = shown([replace(run, metrics=[*run.metrics, {**run.batches[-1], "teaching": silent}])], width=200)
    assert "teaching" not in shown([run])
    assert "70% of the last 2,048 rollouts were in groups that were all wrong" in text
