"""Rungs on a GPU, on a CPU: a tiny one stops, goes on, goes on and comes to its end; nonsense is refused."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from rollalloc.lab.bench.plan import TABLE, make_plan, plan_of_rung
from rollalloc.lab.bench.rungs import RUNGS, read_rung
from rollalloc.lab.bench.tasks.tiny import Shape, tiny_model
from rollalloc.lab.bench.tiers import LADDER_METHODS
from rollalloc.models.policy import Policy
from small_run import one_torch_thread, task

__all__ = ["one_torch_thread", "task"]  # fixtures
FOLDER = Path(__file__).parents[2] / "benchmarks" / "rungs"
TINY = """
name = "tiny"
parameters = 1000
about = "a test"
[model]
hub = "{model}"
[questions]
train = "{train}"
heldout = "{heldout}"
reward = "{reward}"
single_answer = true
[run]
target = 0.5
max_rollouts = 128
learning_rate = 1e-3
eval_every = 64
max_new_tokens = 16
seeds = 2
device = "cpu"
"""


@pytest.fixture(scope="module")
def gpu():
    file = FOLDER.parent / "gpu.py"
    spec = importlib.util.spec_from_file_location("benchmark_gpu", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny(task, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.format(model=task.model, train=task.train, heldout=task.heldout, reward=task.reward))
    return file


def given(out, rung="", **changes):
    said = {"tasks": out.parent / "tasks", "minutes": None, "processes": 1, "device": "cpu", "methods": "grpo,raft"}
    return Namespace(out=out, rung=str(rung), **said | changes)


def test_a_rung_stops_when_its_time_is_up_and_goes_on_to_the_end(gpu, tiny, tmp_path, capfd):
    out = tmp_path / "out"
    assert gpu.carried_out(given(out, tiny, minutes=1e-6)) == 3
    assert "stopped by SIGTERM with 0 of 4 runs done" in capfd.readouterr().err
    frozen = {name: (out / name).read_bytes() for name in ("plan.json", "speed.json")}
    assert gpu.carried_out(given(out, tiny)) == 0
    assert {name: (out / name).read_bytes() for name in frozen} == frozen
    table = (out / TABLE).read_text()
    assert table in capfd.readouterr().out
    assert "Not finished" not in table
    assert " of 2 |" in table
    with pytest.raises(ValueError, match="begun with another plan"):
        gpu.carried_out(given(out, tiny, methods="grpo"))


def test_what_is_timed_is_sampled_to_its_last_token_both_ways(gpu, monkeypatch):
    model = tiny_model([None] * 50, Shape(hidden=32, layers=1, context=64)).eval()
    policy = Policy(model, None, (1,), 0, 64, 50)
    made = {}

    def once(ways, device, repeats=1):
        for name, way in ways.items():
            made[name] = way()
        return dict.fromkeys(ways, 1.0)

    monkeypatch.setattr(gpu, "_best", once)
    torch.manual_seed(0)
    gpu.measured(policy, Namespace(tokens=((2, 3, 4), (5, 6))), gpu.ON_CPU)
    assert [len(each.tokens) for each in made["ours"]] == [8] * 8
    assert [len(each.tokens) for each in made["one_token"]] == [1] * 8
    assert made["generate"].shape == (8, 3 + 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": "grpo,ppo"}, "unknown recipe 'ppo'"),
        ({"methods": "raft"}, "grpo is the baseline of every ratio"),
        ({"methods": "grpo,grpo"}, "named twice: grpo"),
        ({"rung": "qwen"}, "unknown rung 'qwen'; there are qwen2.5-0.5b-gsm8k, .*or give a file"),
        ({"minutes": 0.0}, "--minutes must be above 0"),
        ({"minutes": float("nan")}, "--minutes must be above 0"),
        ({"processes": 0}, "--processes must be at least 1"),
        ({"device": "cuda:9"}, "cannot be used here"),
    ],
)
def test_nonsense_is_refused_before_anything_is_made(gpu, tiny, tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        gpu.carried_out(given(**{"out": tmp_path / "out", "rung": tiny} | changes))
    assert not (tmp_path / "out").exists()


def test_what_is_to_be_brought_and_is_not_there_is_named(gpu, tmp_path):
    with pytest.raises(FileNotFoundError, match="rollalloc data prepare math math500 --out"):
        gpu.carried_out(given(tmp_path / "out", "qwen2.5-1.5b-math"))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.toml")), ids=lambda file: file.stem)
def test_every_rung_makes_a_plan(file):
    rung = read_rung(file)
    assert rung.name == file.stem
    plan = plan_of_rung(rung)
    assert {each.label for each in plan.contestants} == set(LADDER_METHODS)
    [planned] = plan.tasks
    assert len(plan.seeds_of(planned)) == rung.run.seeds
    assert planned.budget % planned.eval_every == 0


def test_a_rung_of_the_package_has_the_plan_of_its_tier():
    for rung in RUNGS.values():
        assert make_plan("ladder", tasks=[rung.task]) == plan_of_rung(rung)
