"""What is read of a run's files, what is kept of a long run, and how damage is reported."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from rollalloc.files.regular import LONGEST
from rollalloc.runs.reader import newest_lines, read_metrics, read_run


def line(batch, **said):
    spent = {"rollouts_paid": 10 * batch, "tokens_paid": 0, "seconds": 1.0, "accounts": {"trained": 10 * batch}}
    return json.dumps({"kind": "batch", "batch": batch, **spent} | said) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def batches(run):
    return [line["batch"] for line in run.metrics]


def test_of_a_long_run_a_bounded_number_of_lines_is_kept(path, monkeypatch):
    monkeypatch.setattr("rollalloc.runs.reader.MOST_LINES", 16)
    for upto in (1, 2, 33, 34, 35, 100, 1001):
        path.write_text("".join(line(at) for at in range(upto)))
        kept = read_run(path.parent).metrics
        assert len(kept) <= 2 * 16
        assert len(kept) >= min(upto, 16)
        assert (kept[0]["batch"], kept[-1]["batch"]) == (0, upto - 1)
        apart = {other["batch"] - one["batch"] for one, other in pairwise(kept[1:-1])}
        assert len(apart) <= 1  # evenly


def test_a_torn_line_is_left_out_and_a_whole_one_needs_no_end(path):
    (path.parent / "run.json").write_text("{}")
    for text, known in ((line(1) + '{"kind": "ba', [1]), (line(1) + line(2).rstrip("\n"), [1, 2]), ("", [])):
        path.write_text(text)
        run = read_run(path.parent)
        assert batches(run) == known
        assert [each["batch"] for each in read_metrics(path)] == known
        assert run.problem is None


def test_the_newest_line_of_each_kind_is_read_from_the_end(path):
    evaluated = {"kind": "eval", "at": 10, "accuracy": 0.5}
    path.write_text(line(1) + line(2) + line(1, **evaluated) + line(3) + '{"kind": "ba')
    assert [(each["kind"], each["batch"]) for each in newest_lines(path.parent)] == [("eval", 1), ("batch", 3)]
    path.unlink()
    assert newest_lines(path.parent) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "metrics.jsonl:2 is not a line of JSON"),
        ("[" * 100_000, "metrics.jsonl:2 is not a line of JSON (it is nested too deeply)"),
        ("[1]", "metrics.jsonl:2 is not a line of JSON (expected an object, got a list)"),
        ("\ufffe{}", "metrics.jsonl:2 is not a line of JSON"),
        (line(2, rollouts_paid=-1).strip(), "rollouts_paid: expected a whole number from 0, got -1"),
        (line(2, rollouts_paid=True).strip(), "rollouts_paid: expected a whole number from 0, got true"),
        (line(2, tokens_paid=10**400).strip(), "got a number that is too large"),
        (line(2, seconds=float("nan")).strip(), "seconds: expected a finite number from 0, got NaN"),
        (line(2, accounts={"trained": -1}).strip(), "names, got an object"),
        (line(2, accounts={str(at): 1 for at in range(1000)}).strip(), "under at most 64 names"),
        ('{"kind": "batch"}', "rollouts_paid is missing"),
        (line(1).strip(), "metrics.jsonl:2 is repeated or out of order, batch 1 after 1: two runs, or one run twice"),
        ('{"x": "' + "x" * LONGEST + '"}', "metrics.jsonl:2 is longer than 1,048,576 bytes"),
    ],
)
def test_a_wrong_line_is_named_and_left_out(path, wrong, said):
    path.write_text(line(1) + wrong + "\n" + line(3))
    run = read_run(path.parent)
    assert batches(run) == [1, 3]
    assert run.problem is not None
    assert said in run.problem
    assert "; 1 line left out" in run.problem


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": {"count": 1}},
        {"lengths": {"count": 1, "truncated": 0, "quantiles": [1, 2, 3, 4, 5, 6, float("inf")]}},
        {"prompts": {"new": "many"}},
        {"evicted": 1.5},
        {"unscored": [1]},
        {"grad_norm": "none"},
        {"teaching": {"taught": -1}},
    ],
)
def test_of_a_line_with_a_wrong_field_the_rest_is_taken(path, wrong):
    others = {"revived": None, "loss": float("nan"), "unknown": {"to": [1]}}
    path.write_text(line(1, **others, **wrong))
    run = read_run(path.parent)
    assert batches(run) == [1]
    assert next(iter(wrong)) not in run.metrics[0]
    assert run.problem is not None
    assert f"metrics.jsonl:1 {next(iter(wrong))}: expected " in run.problem
    assert "left out" not in run.problem
    path.write_text(line(1, **others))
    assert read_run(path.parent).problem == "run.json: No such file or directory"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "run.json: it is empty"),
        ("{", "line 1 column 2"),
        ("[" * 100_000, "nested too deeply"),
        ('{"seed": "x"}', "seed: expected a whole number, or no seed, got"),
        ('{"target": Infinity}', "target: expected a finite number"),
        ('{"prompts": [1]}', "prompts: expected a list of paths"),
        ('{"model": 1}', "model: expected text"),
        ('{"max_rollouts": 0}', "max_rollouts: expected a whole number from 1"),
        ('{"parameters": [1]}', "parameters: expected an object"),
        ('{"label": 3}', "label: expected text"),
    ],
)
def test_a_wrong_description_is_named_and_the_metrics_are_read(path, wrong, said):
    path.write_text(line(1))
    (path.parent / "run.json").write_text(wrong)
    run = read_run(path.parent)
    assert run.problem is not None
    assert said in run.problem
    assert run.problem.startswith("run.json: ")
    assert run.paid == 10
    assert run.label == path.parent.name
