"""The arms and the table of lab/experiments/reuse.py."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import reuse
from rollalloc.runs.cost import Curve


def curve_with(*accuracy):
    paid = tuple(float(500 * at) for at in range(len(accuracy)))
    return Curve(paid, paid, paid, paid, tuple(range(len(accuracy))), accuracy, (0.0,) * len(accuracy))


def write_run(place, accuracies, every):
    """A run's metrics with these accuracies, `every` rollouts apart."""
    place.mkdir(parents=True)
    paid = [
        {
            "at": at * every,
            "rollouts_paid": at * every,
            "tokens_paid": 5 * at * every,
            "seconds": 0.1 * at,
            "version": at,
        }
        for at in range(len(accuracies))
    ]
    lines = [
        {"kind": "eval", **each, "accuracy": accuracy, "standard_error": 0.0, "optimizer_steps": each["version"]}
        for each, accuracy in zip(paid, accuracies, strict=True)
    ]
    lines.append({"kind": "end", "why": "the budget is spent", **paid[-1]})
    text = "".join(json.dumps({"accounts": {}, **line}) + "\n" for line in lines)
    (place / "metrics.jsonl").write_text(text)


def test_an_arm_names_its_kind_steps_and_rate():
    assert reuse.options("plain1-6e-4") == ["--learning-rate", "6e-4", "--optimizer-steps", "1"]
    replayed = reuse.options("replay2-3e-4")
    assert replayed == ["--learning-rate", "3e-4", "--optimizer-steps", "2", "--set", "replay=32"]
    assert [each for each in reuse.options("gated3-6e-4") if "=" in each] == [
        "replay=64",
        "replay_moved=0.1",
        "replay_pause=4",
    ]
    assert "replay=32" in reuse.options("gated1-6e-4")


@pytest.mark.parametrize("arm", ["gatd3-6e-4", "gated-3e-4", "plain3", "plain3-", "plain0-3e-4", "plain3-fast", ""])
def test_a_name_that_is_no_arm_is_refused(arm):
    with pytest.raises(ArgumentTypeError, match=r"such as gated3-3e-4, got"):
        reuse.arms_of(f"plain1-6e-4,{arm}")


def test_a_fall_is_measured_from_the_level_at_the_target():
    assert reuse.fall(curve_with(0.5, 0.8, 0.9, 0.7, 0.9), 1) == pytest.approx(0.85 - 0.7)
    assert reuse.fall(curve_with(0.5, 0.8, 0.9, 0.95), 1) == 0


def test_the_table_leaves_out_pairs_in_which_neither_run_reached_the_target(tmp_path):
    task = reuse.Task("skills/late", 0.85, 2_000, 2_000, 500)
    curves = {
        ("plain1-6e-4", 9741): (0.5, 0.6, 0.7, 0.9, 0.95),  # .85 after 1,375 rollouts
        ("gated3-6e-4", 9741): (0.5, 0.875, 0.95, 0.95, 0.95),  # .85 after 466.7
        ("plain1-6e-4", 9742): (0.5, 0.6, 0.6, 0.6, 0.6),
        ("gated3-6e-4", 9742): (0.5, 0.6, 0.6, 0.6, 0.6),
        ("plain1-6e-4", 9743): (0.5, 0.6, 0.6, 0.6, 0.6),  # has no pair: its partner is not over
    }
    for (arm, seed), accuracies in curves.items():
        write_run(reuse.place_of(tmp_path, task, arm, seed), accuracies, task.every)
    plain, gated = reuse.rows(tmp_path, task, ["plain1-6e-4", "gated3-6e-4"])
    assert "| 1 of 2 | 1,375 2,000 | 1.00" in plain
    assert "| 1 of 2 | 467 2,000 | 2.95" in gated


def test_runs_are_ranked_only_if_all_are_over(tmp_path, capsys):
    for task in reuse.EIGHT_M:
        write_run(reuse.place_of(tmp_path, task, "plain1-3e-4", 8900), (0.5, 0.6, 0.8), task.every)
        write_run(reuse.place_of(tmp_path, task, "plain3-3e-4", 8900), (0.5, 0.4), task.every)
    reuse.rank(tmp_path, "8m", ["plain1-3e-4", "plain3-3e-4"], [8900])
    assert "| plain1-3e-4 | 0.700 | 0.700 | 0.7000 |" in capsys.readouterr().out
    half = reuse.place_of(tmp_path, task, "plain3-3e-4", 8900) / "metrics.jsonl"
    lines = half.read_text().splitlines(keepends=True)
    for left in (lines[:-1], []):
        half.write_text("".join(left))
        with pytest.raises(SystemExit, match=r"1 of 4 runs are not over, such as .*balanced/plain3-3e-4-8900"):
            reuse.rank(tmp_path, "8m", ["plain1-3e-4", "plain3-3e-4"], [8900])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["tune", "8m", "plain1-3e-4"], "tune needs seeds other than the final ones"),
        (["rank", "8m", "plain1-3e-4", "8900", "9741"], "rank needs seeds other than the final ones"),
        (["table", "8m", "plain1-3e-4", "9741"], "table takes no seeds"),
        (["table", "8m", "plain1-3e-4"], "has no seed of 9741, .* of which every arm is over"),
        (["table", "8m", "plain"], "expected plain, replay or gated"),
    ],
)
def test_a_command_that_can_do_nothing_says_why(tmp_path, monkeypatch, capsys, given, said):
    monkeypatch.setattr(sys, "argv", ["reuse.py", given[0], str(tmp_path), *given[1:]])
    with pytest.raises(SystemExit) as ended:
        reuse.main()
    assert ended.value.code
    assert re.search(said, f"{capsys.readouterr().err} {ended.value.code}")


@pytest.mark.parametrize(
    ("reached", "bound"),
    [([], None), ([(1, 1)], ""), ([(1, 1), (0, 1)], ">"), ([(1, 0), (1, 1)], "<"), ([(1, 0), (0, 1)], None)],
)
def test_a_ratio_is_a_bound_on_the_side_of_the_run_that_missed(reached, bound):
    assert reuse.bound_of([({"reached": a}, {"reached": b}) for a, b in reached]) == bound


def test_a_queue_ends_with_the_run_that_was_asked_to_stop(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("rollalloc.cli.app.app", lambda words, **_: asked.append(words))
    monkeypatch.setattr("rollalloc.train.train.time", None)  # `run` sets the clock; this puts it back
    with pytest.raises(SystemExit, match=r"skills-late/plain1-6e-4-1 was stopped; the same command resumes it"):
        reuse.run(tmp_path, "0.15m", ["plain1-6e-4"], [1])
    assert len(asked) == 1
