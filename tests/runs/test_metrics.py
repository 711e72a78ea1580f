"""The table of metrics: the guide is made from it, and what a run writes is in it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rollalloc import recipes
from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Batch, Done, Row
from rollalloc.models.settings import Loss, Streaming
from rollalloc.runs.metrics import METRICS, of_batch, paths, scalars, undeclared
from rollalloc.train.train import train
from small_run import run_of, task
from tiny_policy import one_thread

__all__ = ["one_thread", "run_of", "task"]  # fixtures
ROOT = Path(__file__).parents[2]


def test_the_guide_has_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import metrics_table

    monkeypatch.delitem(sys.modules, "metrics_table")
    guide = metrics_table.GUIDE.read_text("utf-8")
    assert metrics_table.with_table(guide) == guide, "run python tools/metrics_table.py"
    with pytest.raises(ValueError, match=r"metrics\.md must hold"):
        metrics_table.with_table("no marks")


def test_a_metric_has_one_line_for_each_place():
    places = [(metric.name, place) for metric in METRICS for place in metric.where]
    assert len(places) == len(set(places))


def test_undeclared_names_are_found_by_place():
    names = (
        "rows",
        "accounts/trained",
        "unscored/a reason / of any kind\n",
        "stage/pilot/groups",
        "stage/pilot",
        "made_up",
    )
    assert undeclared(names, "every line", "batch") == ["stage/pilot/groups", "stage/pilot", "made_up"]
    assert undeclared(names, "verl") == ["unscored/a reason / of any kind\n", "stage/pilot", "made_up"]


def test_scalars_are_the_numbers_by_their_paths():
    nested = {"accounts": {"trained": 3}, "short": True, "why": "text", "lost": None, "loss": 0.5}
    assert scalars(nested) == {"rollalloc/accounts/trained": 3.0, "rollalloc/short": 1.0, "rollalloc/loss": 0.5}


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_every_line_of_a_run_is_in_the_table(engine, tmp_path, run_of):
    run = run_of("foresight", {"groups": 16})
    settings = {"engine": engine, "streaming": Streaming(overlap=False), "loss": Loss(kl=0.01)}
    train(replace(run, **settings), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"features", "batch", "eval", "end"}
    for line in lines:
        assert not undeclared((name for name, _ in paths(line)), "every line", line["kind"]), line["kind"]


@pytest.mark.parametrize(
    ("advantages", "weight"), [([1.0, -0.25, 1.0], 0.125), ([1.0, -1.0], 1.0), ([0.5, 0.0], 0.0), ([-1.0, 0.0], None)]
)
def test_the_weight_of_failures_is_of_the_batch_s_fresh_rows(advantages, weight):
    allocator = Allocator(recipes.reinforce(2), prompts=4, seed=0)
    rows = [Row(i, 0, i, advantage, 1.0, 0) for i, advantage in enumerate(advantages)]
    replayed = Row(9, 0, 9, 5.0, 1.0, 0, replays=1)
    assert of_batch(allocator, Batch((*rows, replayed), 0))["negative_weight"] == weight


def test_reinforce_s_weight_of_failures_is_the_one_it_was_given():
    allocator = Allocator(recipes.reinforce(8, neg=0.3), prompts=32, seed=0)
    for order in allocator.ask().generate:
        allocator.tell([Done(each, each % 3 == 0, each % 3 == 0, 1, 0) for each in order.rollouts])
    batch = allocator.ask().batch
    assert batch is not None
    assert of_batch(allocator, batch)["negative_weight"] == pytest.approx(0.3)
