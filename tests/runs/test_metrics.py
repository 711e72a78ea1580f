"""The table of metrics: the guide is made from it, and what a run writes is in it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rollalloc.generate.stream.settings import Streaming
from rollalloc.runs.metrics import METRICS, paths, scalars, undeclared
from rollalloc.train.execution import execute
from rollalloc.train.objective import Loss
from small_run import one_torch_thread, run_of, task

__all__ = ["one_torch_thread", "run_of", "task"]  # fixtures
ROOT = Path(__file__).parents[2]


def test_the_guide_has_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import metrics_table

    monkeypatch.delitem(sys.modules, "metrics_table")
    guide = metrics_table.GUIDE.read_text("utf-8")
    assert metrics_table.with_table(guide) == guide, "run python tools/metrics_table.py"
    with pytest.raises(ValueError, match=r"metrics\.md must hold"):
        metrics_table.with_table("no marks")


def test_a_name_stands_once_for_one_place():
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
    execute(replace(run, settings=replace(run.settings, **settings)), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"features", "batch", "eval", "end"}
    for line in lines:
        assert not undeclared((name for name, _ in paths(line)), "every line", line["kind"]), line["kind"]
