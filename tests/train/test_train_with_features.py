"""Runs of recipes that predict: where their features are from, what is kept of them, and a resume."""

import json
import logging

import numpy as np
import pytest

from rollalloc.data.feature_blocks import own_features
from rollalloc.data.feature_file import read_features, write_features
from rollalloc.data.prompts import load_prompts
from rollalloc.train.config import Config
from rollalloc.train.train import train
from tiny_policy import killed_after, lines_of, untimed

FORESIGHT = {"groups": 8, "replay": 4, "replay_staleness": 3}


@pytest.fixture
def predicting(run_of):
    def made(parameters=FORESIGHT, recipe="foresight", **changes) -> Config:
        return run_of(recipe, parameters, **changes)

    return made


def batches_of(folder):
    return [line for line in lines_of(folder) if line["kind"] == "batch"]


# About half of any model's answers are right: what is replayed must not hang on what a hardly trained one happens to solve.
HALF = """
from hashlib import sha256


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sha256(f"{ground_truth} {solution_str}".encode()).digest()[0] % 2)
"""


def test_features_are_made_at_the_start_and_kept_with_the_run(predicting, tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    run = predicting(reward=f"{tmp_path / 'half.py'}:compute_score")
    train(run, tmp_path / "run")
    prompts = load_prompts(*run.prompts)
    kept = read_features(tmp_path / "run" / "features.safetensors", prompts.keys)
    assert set(kept.blocks) == {"hidden", "tokens", "length"}
    [cost] = [line for line in lines_of(tmp_path / "run") if line["kind"] == "features"]
    assert (cost["features_prompts"], cost["features_tokens"]) == (80, kept.cost.tokens)
    assert cost["rollouts_paid"] == 0
    batches = batches_of(tmp_path / "run")
    assert all(batch["groups"] == 8 and batch["rows"] == 8 + batch["replayed"] for batch in batches)
    assert sum(batch["replayed"] for batch in batches) > 0
    assert "weight/record" in batches[-1]["prediction"]


def test_a_resumed_run_goes_on_with_its_features_and_is_the_unbroken_one(predicting, tmp_path, monkeypatch):
    run = predicting(checkpoint_every=2)
    train(run, tmp_path / "unbroken")

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "broken", killed_after(7))

    def another_machine(*_, **__):
        raise AssertionError("features are made again, which another machine would round otherwise")

    monkeypatch.setattr("rollalloc.train.loading.features_of", another_machine)
    train(run, tmp_path / "broken", resume=True)
    assert untimed(tmp_path / "broken") == untimed(tmp_path / "unbroken")


def test_features_of_ones_own_are_read_by_key(predicting, tmp_path):
    run = predicting()
    prompts = load_prompts(*run.prompts)
    rows_ND = np.random.default_rng(0).standard_normal((80, 3))
    write_features(tmp_path / "own.safetensors", prompts.keys[::-1], own_features({"mine": rows_ND[::-1]}))
    train(predicting(features=str(tmp_path / "own.safetensors")), tmp_path / "run")
    assert {"weight/mine/0.1", "weight/mine/1", "weight/mine/10"} <= batches_of(tmp_path / "run")[-1][
        "prediction"
    ].keys()


def test_without_features_it_says_so_and_predicts_from_records(predicting, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(predicting(features="none"), tmp_path / "run")
    assert "without features" in caplog.text
    assert not (tmp_path / "run" / "features.safetensors").exists()
    assert not [line for line in lines_of(tmp_path / "run") if line["kind"] == "features"]


@pytest.mark.parametrize(
    ("recipe", "parameters", "features", "error", "message"),
    [
        ("grpo", {"groups": 4, "n": 4}, "none", ValueError, "does not use them"),
        ("foresight", FORESIGHT, "missing.safetensors", FileNotFoundError, "expected a file that"),
    ],
)
def test_features_that_nobody_reads_or_that_are_not_there_are_refused(
    predicting, tmp_path, monkeypatch, recipe, parameters, features, error, message
):
    monkeypatch.setattr("rollalloc.train.train.Policy.load", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(error, match=message):
        train(predicting(parameters, recipe, features=features), tmp_path / "run")


def test_spo_is_told_how_far_the_weights_moved(predicting, tmp_path):
    train(predicting({"groups": 8}, "spo"), tmp_path / "run")
    moved = [batch["approx_kl"] for batch in batches_of(tmp_path / "run")]
    assert all(0 <= each < 1 for each in moved)
    assert max(moved) > 0
    state = json.loads((tmp_path / "run" / "allocator.json").read_text())
    assert state["kl_sum"] == pytest.approx(sum(moved))
