"""The benchmark for GPUs in its short form, on a CPU: it stops, goes on, comes to its end, and refuses nonsense."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from rollalloc.lab.bench.plan import TABLE
from rollalloc.models.policy import Policy


@pytest.fixture(scope="module")
def gpu():
    file = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("benchmark_gpu", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def given(out, **changes):
    said = {"model": None, "data": None, "minutes": None, "processes": 1, "device": "cpu", "short": True}
    return Namespace(out=out, **said | {"methods": "grpo,raft", "tasks": "stories"} | changes)


def test_it_stops_when_its_time_is_up_and_goes_on_to_the_end(gpu, tmp_path, capfd):
    assert gpu.carried_out(given(tmp_path, minutes=1e-6)) == 3
    assert "stopped by SIGTERM with 0 of 6 runs done" in capfd.readouterr().err
    frozen = {name: (tmp_path / name).read_bytes() for name in ("plan.json", "speed.json")}
    assert gpu.carried_out(given(tmp_path)) == 0
    assert {name: (tmp_path / name).read_bytes() for name in frozen} == frozen
    said = capfd.readouterr().out
    table = (tmp_path / TABLE).read_text()
    assert table in said
    assert "model: a stand-in" in table
    assert "Not finished" not in table
    assert "| grpo | 0 of 2 |" in table or "| grpo | 2 of 2 |" in table or "| grpo | 1 of 2 |" in table
    with pytest.raises(ValueError, match="begun with another plan"):
        gpu.carried_out(given(tmp_path, methods="grpo"))


def test_the_share_of_the_bandwidth_is_of_what_a_step_reads(gpu, monkeypatch):
    """10 tokens of 2 rows in 1 s less 0.1 s for the prefill and the first; a step reads the weights and what rows hold."""
    model = gpu.tiny_model([None] * 50, gpu.Shape(hidden=32, layers=2, context=64)).eval()
    policy = Policy(model, None, (1,), 0, 64, 50)
    monkeypatch.setattr(gpu, "_bandwidth", lambda device, size: 1e6)
    monkeypatch.setattr(gpu, "_best", lambda ways, device: {"ours": 1.0, "one_token": 0.1, "generate": 3.0})
    size = gpu.replace(gpu.SHORT, asked=(1, 2, 10))
    found = gpu.measured(policy, Namespace(tokens=((2, 3, 4),)), size)["float32"]
    # Tied embeddings are the head's; a layer has 4·32² and 3·32·128 weights and 2·32 of norms; the last norm 32.
    weights = 4 * (50 * 32 + 2 * (4 * 32**2 + 3 * 32 * 128 + 64) + 32)
    cache = 2 * 2 * 32 * 4
    most = 2 * 1e6 / (weights + 2 * (3 + 5) * cache)
    assert found["tokens_per_s"] == 20
    assert found["against_generate"] == 3
    assert found["decoding_tokens_per_s"] == pytest.approx(2 * 9 / 0.9)
    assert found["bandwidth_share"] == pytest.approx(20 / most)


def test_what_is_timed_is_sampled_to_its_last_token_both_ways(gpu, monkeypatch):
    model = gpu.tiny_model([None] * 50, gpu.Shape(hidden=32, layers=1, context=64)).eval()
    policy = Policy(model, None, (1,), 0, 64, 50)
    made = {}

    def once(ways, device, repeats=1):
        for name, way in ways.items():
            made[name] = way()
        return dict.fromkeys(ways, 1.0)

    monkeypatch.setattr(gpu, "_best", once)
    torch.manual_seed(0)
    gpu.measured(policy, Namespace(tokens=((2, 3, 4), (5, 6))), gpu.SHORT)
    assert [len(each.tokens) for each in made["ours"]] == [8] * 8
    assert [len(each.tokens) for each in made["one_token"]] == [1] * 8
    assert made["generate"].shape == (8, 3 + 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": "grpo,ppo"}, "unknown method 'ppo'; there are grpo, dapo_carry"),
        ({"methods": "raft"}, "grpo is what every ratio is to"),
        ({"methods": "grpo,grpo"}, "each method once"),
        ({"tasks": ""}, "unknown task ''; there are filter, stories"),
        ({"minutes": 0.0}, "--minutes must be above 0"),
        ({"minutes": float("nan")}, "--minutes must be above 0"),
        ({"processes": 0}, "--processes must be at least 1"),
        ({"device": "cuda:9"}, "cannot be used here"),
    ],
)
def test_nonsense_is_refused_before_anything_is_made(gpu, tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        gpu.carried_out(given(tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_what_is_to_be_brought_and_is_not_there_is_named(gpu, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"stories.train\.parquet.*rollalloc data chat stories"):
        gpu.carried_out(given(tmp_path / "out", data=tmp_path))
    with pytest.raises(FileNotFoundError, match="rollalloc model smollm2"):
        gpu.carried_out(given(tmp_path / "out", model=tmp_path / "none"))


def test_every_method_and_setting_makes_a_plan(gpu):
    for size in (gpu.FULL, gpu.SHORT):
        plan = gpu.plan_of(size, {"filter": 0.2}, list(gpu.METHODS), size.rates[0], {})
        assert [each.recipe for each in plan.contestants] == list(gpu.METHODS)
        assert {len(each.grid) for each in plan.contestants} == {len(size.rates[0])}
        assert json.dumps(plan.described())
    assert len(gpu.FULL.seeds) >= 5
