"""lab/experiments/released_lm.py in its smallest shape: the pool, the plan, and a run of every arm."""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from pathlib import Path

from rollalloc_lab.tasks.ladder import Mixture
from rollalloc_lab.tasks.rungs import RUNGS, Model, WarmedUp

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import released_lm
from released_lm import ARMS, Curve, Scale, carry_out, plan, show

QUICK = Scale(
    replace(
        RUNGS["0.15m"],
        name="quick",
        model=Model(hidden=32, layers=1),
        warm_up=WarmedUp(steps=3, batch=4, learning_rate=1e-3, check_every=2, low=0.0, high=1.0, pass_at_8=0.0),
    ),
    learning_rate=1e-3,
    rollouts=128,
    seeds=(1,),
    train=64,
    heldout=8,
    groups=2,
    n=8,
    shares=(1.0, 0.0, 0.0, 0.0, 0.0),
    mixture=Mixture(train=100, heldout=20),
)


def test_every_arm_of_the_plan_runs_and_a_second_call_makes_nothing_anew(tmp_path, capsys):
    out, tasks = tmp_path / "out", tmp_path / "tasks"
    assert carry_out(QUICK, out, tasks, 10, "cpu") == len(ARMS) == len(list(plan(QUICK)))
    made = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert len(made) == 4
    assert carry_out(QUICK, out, tasks, 10, "cpu") == 4
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == made
    capsys.readouterr()
    show(QUICK, out, tasks, "cpu")
    table = capsys.readouterr().out
    assert all(f"| {arm} | 1 |" in table for arm in ARMS)


def test_no_run_begins_after_the_minutes(tmp_path):
    assert carry_out(QUICK, tmp_path / "out", tmp_path / "tasks", 0, "cpu") == 0


def test_methods_are_compared_in_equal_shape():
    shapes = {arm: ARMS[arm].parameters(released_lm.SCALES["135m"]) for arm in ARMS}
    assert shapes["pc"]["n_pilot"] + shapes["pc"]["n_commit"] == shapes["grpo"]["n"] == 64
    assert shapes["pods"]["m"] == shapes["grpo16"]["n"] == 16
    assert len({shape["groups"] for shape in shapes.values()}) == 1
    assert ARMS["pc"].steps == ARMS["grpo"].steps
    assert ARMS["pods"].steps == ARMS["grpo16"].steps


def test_a_level_is_reached_at_the_first_evaluation_that_shows_it():
    curve = Curve([0.2, 0.5, 0.4, 0.7], {"rollouts": [10.0, 20.0, 30.0, 40.0]})
    assert curve.until(0.45, "rollouts") == 20
    assert curve.until(0.8, "rollouts") == inf
